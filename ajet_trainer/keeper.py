"""Keeps the leases of the batches in hand alive, while they are trained or wait for their checkpoint.

A thread extends every held lease three times per lease length. A refusal is not raised: the batch may be in the weights
already, and `TrainedBatches` knows what to do when its acknowledgement is refused too.
"""

from __future__ import annotations

import threading

from ajet_sdk.errors import AjetError, ProxyUnreachable
from ajet_trainer.link import Link
from ajet_trainer.repeating import Repeating

LEASE_S = 300.0
"""The length of a lease that is not extended. It outlives two rounds that fail."""


class Keeper(Repeating):
    """Extends each lease from `hold` to `release`. Use as a context manager; leaving it stops the thread."""

    def __init__(self, link: Link, lease_s: float = LEASE_S) -> None:
        super().__init__("lease keeper", lease_s / 3)
        self._link, self.lease_s = link, lease_s
        self._held: dict[str, None] = {}
        self._lock = threading.Lock()

    def hold(self, batch: str) -> None:
        with self._lock:
            self._held[batch] = None

    def release(self, batch: str) -> None:
        with self._lock:
            self._held.pop(batch, None)

    @property
    def held(self) -> tuple[str, ...]:
        """The batches in hand, oldest first."""
        with self._lock:
            return tuple(self._held)

    def turn(self) -> None:
        """One round over everything held. A refusal leaves the rest untouched. A proxy that does not answer ends the
        round: it would answer for no other batch."""
        for batch in self.held:
            try:
                self._link.extend(batch, self.lease_s)
            except ProxyUnreachable:
                return
            except AjetError:
                continue
