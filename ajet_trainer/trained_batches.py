"""Which leased batches are part of the weights, which of these are in a checkpoint, and what the proxy must still hear.

A batch passes through three states. It is *trained* when its gradient is in the weights in memory. It is *saved* when
those weights are in a checkpoint, whose folder holds this list. It is *acknowledged* when the proxy knows. Only saved
batches are acknowledged. After a crash the checkpoint says which batches to acknowledge before anything else. A batch
that was trained after the last checkpoint is in none, so its lease runs out and it is trained again, once.

An acknowledgement may come too late: the lease ran out while the trainer was down. Then the proxy may lease the same
episodes again under another batch: `blocked` names them, and admission refuses them. Acknowledged batches can never
come back and are forgotten, so the list stays as small as what is in flight.

Several daemons may feed one trainer, and two of them may call their episodes by the same name. So everything here
belongs to the daemon that gave it, known by its URL. What came from a daemon whose URL is not configured belongs to
``ANY``: it may have moved, so its episodes are blocked at every daemon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ANY = ""
"""In place of a URL: whichever daemon knows the batch or the episode."""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One trained batch: the policy version that holds its gradient, its episodes, and the daemon that gave it.
    `filtered` are those episodes of it that were not trained, each with the reason."""

    batch: str
    version: int
    episodes: tuple[str, ...]
    daemon: str = ANY
    filtered: Mapping[str, str] = field(default_factory=dict)


class TrainedBatches:
    """The states of the batches that were trained and are not acknowledged yet, oldest first."""

    def __init__(self, saved: Iterable[TrainedBatch] = (), lost: Iterable[tuple[str, str]] = ()) -> None:
        self._saved = list(saved)
        self._trained: list[TrainedBatch] = []
        self._lost = set(lost)
        self.line = ""
        """What `metrics.jsonl` says of the last step, and lacks where a crash came between checkpoint and line."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any], daemons: Collection[str] = ()) -> TrainedBatches:
        """What the `state` in a checkpoint restores: everything in it is saved. `daemons` are those in use."""

        def known(daemon: str) -> str:
            return daemon if daemon in daemons else ANY

        saved = [
            TrainedBatch(**one | {"episodes": tuple(one["episodes"]), "daemon": known(one["daemon"])})
            for one in state.get("saved", ())
        ]
        batches = cls(saved, ((known(daemon), episode) for daemon, episode in state.get("lost", ())))
        batches.line = state.get("line", "")
        return batches

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint that is written now: plain lists, strings and integers."""
        return {
            "saved": [asdict(one) | {"episodes": list(one.episodes)} for one in (*self._saved, *self._trained)],
            "lost": sorted([daemon, episode] for daemon, episode in self._lost),
            "line": self.line,
        }

    def trained(self, batch: TrainedBatch) -> None:
        """The weights in memory now hold this batch."""
        self._trained.append(batch)

    def saved(self) -> None:
        """A checkpoint with `state` is complete."""
        self._saved += self._trained
        self._trained = []

    @property
    def unacknowledged(self) -> tuple[TrainedBatch, ...]:
        """Saved batches that the proxy has not heard of, oldest first."""
        return tuple(self._saved)

    @property
    def unsaved(self) -> tuple[TrainedBatch, ...]:
        """Trained batches that a crash would bring back."""
        return tuple(self._trained)

    def blocked(self, daemon: str) -> frozenset[str]:
        """Episodes of `daemon` that are in the weights already, whatever batch they may come in again."""
        pending = {(one.daemon, name) for one in (*self._saved, *self._trained) for name in one.episodes}
        return frozenset(name for owner, name in pending | self._lost if owner in (ANY, daemon))

    def acknowledged(self, batch: TrainedBatch) -> None:
        """The proxy has heard: the batch's episodes cannot come back."""
        self._saved.remove(batch)

    def refused(self, batch: TrainedBatch) -> None:
        """The lease was gone: the batch's episodes may come back and must not be trained again."""
        self._lost.update((batch.daemon, episode) for episode in batch.episodes)
        self.acknowledged(batch)
