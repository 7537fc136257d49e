"""Keeps the leases of the batches in hand alive, while they are trained or wait for their checkpoint.

A thread extends every held lease three times per lease length. A refusal is not raised: the batch may be in the weights
already, and `TrainedBatches` knows what to do when its acknowledgement is refused too.
"""

from __future__ import annotations

import logging
import threading

from ajet_sdk.errors import AjetError, ProxyUnreachable
from ajet_trainer.link import Link

logger = logging.getLogger(__name__)
LEASE_S = 300.0
"""How long a lease lasts that is not extended."""


class Keeper:
    """Extends each lease from `hold` to `release`. Use as a context manager; leaving it stops the thread."""

    def __init__(self, link: Link, lease_s: float = LEASE_S) -> None:
        self._link, self.lease_s = link, lease_s
        self._held: dict[str, None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

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

    def extend_all(self) -> None:
        """One round over everything held. A refusal leaves the rest untouched. A proxy that does not answer ends the
        round: it would answer for no other batch."""
        for batch in self.held:
            try:
                self._link.extend(batch, self.lease_s)
            except ProxyUnreachable:
                return
            except AjetError:
                continue

    def _run(self) -> None:
        while not self._stop.wait(self.lease_s / 3):
            try:
                self.extend_all()
            except Exception:  # the next round is as good, and a lease outlives two that fail
                logger.warning("leases could not be extended", exc_info=True)
