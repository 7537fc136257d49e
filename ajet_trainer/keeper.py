"""Keeps the leases of the batches in hand alive while they are trained or wait for their checkpoint.

One thread extends every held lease three times per lease length. A refusal is remembered, not raised: the batch may be
in the weights already, and `ajet_trainer.history` knows what to do when its acknowledgement is refused too.
"""

from __future__ import annotations

import threading
from typing import Protocol

from ajet_sdk.errors import AjetError, ProxyUnreachable

LEASE_S = 300.0
"""How long a lease lasts that is not extended."""


class Extends(Protocol):
    def extend(self, daemon: str, batch: str, lease_s: float) -> None: ...


class Keeper:
    """Holds leases from `hold` to `release`. Use as a context manager; leaving it stops the thread."""

    def __init__(self, daemons: Extends, lease_s: float = LEASE_S) -> None:
        self._daemons, self.lease_s = daemons, lease_s
        self._held: dict[tuple[str, str], None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def hold(self, daemon: str, batch: str) -> None:
        with self._lock:
            self._held[daemon, batch] = None

    def release(self, daemon: str, batch: str) -> None:
        with self._lock:
            self._held.pop((daemon, batch), None)

    @property
    def held(self) -> tuple[tuple[str, str], ...]:
        """Daemon and id of the batches in hand, oldest first."""
        with self._lock:
            return tuple(self._held)

    def extend_all(self) -> None:
        """One round over everything held; a failure leaves the rest untouched. A daemon that does not answer is asked
        once: waiting for it batch after batch would let the leases of the others run out."""
        silent: set[str] = set()
        for daemon, batch in self.held:
            if daemon in silent:
                continue
            try:
                self._daemons.extend(daemon, batch, self.lease_s)
            except ProxyUnreachable:
                silent.add(daemon)
            except AjetError:
                continue

    def _run(self) -> None:
        while not self._stop.wait(self.lease_s / 3):
            self.extend_all()
