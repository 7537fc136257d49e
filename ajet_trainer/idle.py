"""Which share of the time trainer and engines had nothing to do, from one step to the next.

The trainer is idle while it waits for episodes. An engine is idle while no agent's request is under way at its daemon;
of several daemons the mean counts. Each daemon tells in how many seconds of its life some request was. What that grew
by between two looks, of the time between them, is its busy share. A daemon that started anew counts from 0, so that all
it tells is new.

A step's shares are of the time since the last step's: a wait for a batch that held nothing to train is in them too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean


class Idle:
    """Adds up what was idle since the last `shares`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since, self._waited, self._busy = clock(), 0.0, dict[str, float]()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the trainer has nothing to do."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def shares(self, busy: Mapping[str, float]) -> dict[str, float | None]:
        """The idle shares since the last call, from 0 to 1. `busy` are the seconds that each daemon tells now. The
        engines' share is None if no daemon told it at both ends."""
        now = self._clock()
        wall = max(now - self._since, 1e-9)
        engines = [1 - self._grown(daemon, seconds) / wall for daemon, seconds in busy.items() if daemon in self._busy]
        shares = {"trainer": _share(self._waited / wall), "engine": _share(fmean(engines)) if engines else None}
        self._since, self._waited, self._busy = now, 0.0, dict(busy)
        return shares

    def _grown(self, daemon: str, seconds: float) -> float:
        before = self._busy[daemon]
        return seconds - before if seconds >= before else seconds


def _share(value: float) -> float:
    """A share that clocks of two processes cannot push over its ends."""
    return round(min(max(value, 0.0), 1.0), 4)
