"""Remembers which leased batches are in the weights, which of these in a checkpoint, and what the proxy must still
hear.

A batch passes through three states. It is *trained* when its gradient is in the weights in memory. It is *saved* when
those weights are in a checkpoint, whose folder holds this list. It is *acknowledged* when the proxy knows. Only saved
batches are acknowledged. After a crash the checkpoint says which batches to acknowledge before anything else. A batch
that was trained after the last checkpoint is in none, so its lease runs out and it is trained again, once.

An acknowledgement may come too late: the lease ran out while the trainer was down. Then the proxy may lease the same
episodes again under another batch: `blocked` names them, and admission refuses them. Acknowledged batches can never
come back and are forgotten, so the list stays as small as what is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ajet_trainer.running import Known, Lanes


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One trained batch: the policy version that holds its gradient, and its episodes. `filtered` are those episodes of
    it that were not trained, each with the reason."""

    batch: str
    version: int
    episodes: tuple[str, ...]
    filtered: Mapping[str, str] = field(default_factory=dict)


class TrainedBatches:
    """The states of the batches that were trained and are not acknowledged yet, oldest first."""

    def __init__(self, saved: Iterable[TrainedBatch] = (), lost: Iterable[str] = ()) -> None:
        self._saved = list(saved)
        self._trained: list[TrainedBatch] = []
        self._lost = frozenset(lost)
        self.lanes: Lanes = {}
        """The returns of what was trained, by which `ajet_trainer.running` tells what a call may expect."""
        self.line = ""
        """The last step's line of `metrics.jsonl`, which lacks it where a crash came between checkpoint and line."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TrainedBatches:
        """Restores the `state` of a checkpoint: everything in it is saved. Without a checkpoint it is empty."""
        if not state:
            return cls()
        batches = cls(
            (TrainedBatch(**one | {"episodes": tuple(one["episodes"])}) for one in state["saved"]), state["lost"]
        )
        batches.line = state["line"]
        batches.lanes = {lane: Known(*known) for lane, known in state["lanes"].items()}
        return batches

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint that is written now: plain lists, strings and numbers."""
        return {
            "saved": [asdict(one) | {"episodes": list(one.episodes)} for one in (*self._saved, *self._trained)],
            "lost": sorted(self._lost),
            "line": self.line,
            "lanes": {lane: list(known) for lane, known in self.lanes.items()},
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

    @property
    def blocked(self) -> frozenset[str]:
        """Episodes that are in the weights already, whatever batch they may come in again."""
        return self._lost.union(*(one.episodes for one in (*self._saved, *self._trained)))

    def acknowledged(self, batch: TrainedBatch) -> None:
        """The proxy has heard: the batch's episodes cannot come back."""
        self._saved.remove(batch)

    def refused(self, batch: TrainedBatch) -> None:
        """The lease was gone: the batch's episodes may come back and must not be trained again."""
        self._lost |= frozenset(batch.episodes)
        self.acknowledged(batch)
