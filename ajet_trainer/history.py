"""Which leased batches are part of the weights, which of these are in a checkpoint, and what the proxy must still hear.

A batch passes through three states: *trained* (its gradient is in the weights in memory), *saved* (those weights are
in a checkpoint, whose folder holds this history) and *acknowledged* (the proxy knows). Only saved batches are
acknowledged. After a crash the checkpoint's history says which batches to acknowledge before anything else; a batch
that was trained after the last checkpoint is in no history, so its lease runs out and it is trained again, once.

If an acknowledgement comes too late (the lease ran out while the trainer was down), the proxy may lease the same
episodes again under another batch: `blocked` names them, and admission refuses them. Acknowledged batches can never
come back and are forgotten, so the history stays as small as what is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One trained batch: the policy version that holds its gradient, and its episodes."""

    batch: str
    version: int
    episodes: tuple[str, ...]


class History:
    """The states of the batches that were trained and are not acknowledged yet, oldest first."""

    def __init__(self, saved: Iterable[Entry] = (), lost: Iterable[str] = ()) -> None:
        self._saved = list(saved)
        self._trained: list[Entry] = []
        self._lost = set(lost)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """What `state` of the checkpoint's history restores: everything in it is saved."""
        entries = [Entry(e["batch"], e["version"], tuple(e["episodes"])) for e in state.get("saved", ())]
        return cls(entries, state.get("lost", ()))

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint that is written now: plain lists, strings and integers."""
        return {
            "saved": [
                {"batch": e.batch, "version": e.version, "episodes": list(e.episodes)}
                for e in (*self._saved, *self._trained)
            ],
            "lost": sorted(self._lost),
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

    @property
    def blocked(self) -> frozenset[str]:
        """Episodes that are in the weights already, whatever batch they may come in again."""
        pending = (episode for entry in (*self._saved, *self._trained) for episode in entry.episodes)
        return frozenset(self._lost.union(pending))

    def acknowledged(self, batch: str) -> None:
        """The proxy has heard: the batch's episodes cannot come back."""
        self._saved = [entry for entry in self._saved if entry.batch != batch]

    def refused(self, batch: str) -> None:
        """The lease was gone: the batch's episodes may come back and must not be trained again."""
        self._lost.update(episode for entry in self._saved if entry.batch == batch for episode in entry.episodes)
        self.acknowledged(batch)
