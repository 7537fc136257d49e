"""Which leased batches are part of the weights, which of these are in a checkpoint, and what the proxy must still hear.

A batch passes through three states: *trained* (its gradient is in the weights in memory), *saved* (those weights are
in a checkpoint, whose folder holds this history) and *acknowledged* (the proxy knows). Only saved batches are
acknowledged. After a crash the checkpoint's history says which batches to acknowledge before anything else; a batch
that was trained after the last checkpoint is in no history, so its lease runs out and it is trained again, once.

If an acknowledgement comes too late (the lease ran out while the trainer was down), the proxy may lease the same
episodes again under another batch: `blocked` names them, and admission refuses them. Acknowledged batches can never
come back and are forgotten, so the history stays as small as what is in flight.

Several daemons may feed one trainer, and two of them may call their episodes by the same name, so everything here
belongs to the daemon that gave it, known by its URL. What came from a daemon whose URL is configured no more belongs to
``ANY``: it may have moved, so its episodes are blocked wherever they come from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ANY = ""
"""In place of a URL: whichever daemon knows the batch or the episode."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One trained batch: the policy version that holds its gradient, its episodes, the daemon that gave it, and those
    episodes of it that were not trained, each with the reason."""

    batch: str
    version: int
    episodes: tuple[str, ...]
    daemon: str = ANY
    filtered: Mapping[str, str] = field(default_factory=dict)


class History:
    """The states of the batches that were trained and are not acknowledged yet, oldest first."""

    def __init__(self, saved: Iterable[Entry] = (), lost: Iterable[tuple[str, str]] = ()) -> None:
        self._saved = list(saved)
        self._trained: list[Entry] = []
        self._lost = set(lost)
        self.line = ""
        """What `metrics.jsonl` says of the last step, and lacks where a crash came between checkpoint and line."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any], daemons: Collection[str] = ()) -> History:
        """What `state` of the checkpoint's history restores: everything in it is saved. `daemons` are those in use."""

        def known(daemon: str) -> str:
            return daemon if daemon in daemons else ANY

        entries = [
            Entry(e["batch"], e["version"], tuple(e["episodes"]), known(e.get("daemon", ANY)), e.get("filtered", {}))
            for e in state.get("saved", ())
        ]
        pairs = [(ANY, item) if isinstance(item, str) else (known(item[0]), item[1]) for item in state.get("lost", ())]
        history = cls(entries, pairs)
        history.line = state.get("line", "")
        return history

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint that is written now: plain lists, strings and integers."""
        return {
            "saved": [
                {"batch": e.batch, "version": e.version, "episodes": list(e.episodes), "daemon": e.daemon,
                 "filtered": dict(e.filtered)}
                for e in (*self._saved, *self._trained)
            ],
            "lost": sorted([daemon, episode] for daemon, episode in self._lost),
            "line": self.line,
        }

    def trained(self, entry: Entry) -> None:
        """The weights in memory now hold this batch."""
        self._trained.append(entry)

    def saved(self) -> None:
        """A checkpoint with `state` is complete."""
        self._saved += self._trained
        self._trained = []

    @property
    def unacknowledged(self) -> tuple[Entry, ...]:
        """Saved batches that the proxy has not heard of, oldest first."""
        return tuple(self._saved)

    @property
    def unsaved(self) -> tuple[Entry, ...]:
        """Trained batches that a crash would bring back."""
        return tuple(self._trained)

    def blocked(self, daemon: str) -> frozenset[str]:
        """Episodes of `daemon` that are in the weights already, whatever batch they may come in again."""
        pending = {(entry.daemon, name) for entry in (*self._saved, *self._trained) for name in entry.episodes}
        return frozenset(name for owner, name in pending | self._lost if owner in (ANY, daemon))

    def acknowledged(self, entry: Entry) -> None:
        """The proxy has heard: the batch's episodes cannot come back."""
        self._saved.remove(entry)

    def refused(self, entry: Entry) -> None:
        """The lease was gone: the batch's episodes may come back and must not be trained again."""
        self._lost.update((entry.daemon, episode) for episode in entry.episodes)
        self.acknowledged(entry)
