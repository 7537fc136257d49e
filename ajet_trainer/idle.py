"""The share of the time in which trainer and engines had nothing to do, from one step to the next.

The trainer is idle while it waits for episodes. Engines are idle while no agent's request is under way at the
daemon. It tells in how many seconds of its life some request was. What that grew by between two looks, of the time
between them, is the engines' busy share. A daemon that started anew counts from 0, so that all it tells is new.

A step's shares are of the time since the last step's: a wait for a batch that held nothing to train is in them too.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Idle:
    """Tells what was idle since the last `shares`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since, self._waited = clock(), 0.0
        self._busy: float | None = None

    def shares(self, waited: float, busy: float | None) -> dict[str, float | None]:
        """The idle shares since the last call, from 0 to 1. `waited` are the seconds of the trainer's waits so far, and
        `busy` those that the daemon tells now. The engines' share is None if it did not tell them at both ends."""
        now, engine = self._clock(), None
        wall = max(now - self._since, 1e-9)
        if busy is not None and self._busy is not None:
            grown = busy - self._busy if busy >= self._busy else busy
            engine = _share(1 - grown / wall)
        shares = {"trainer": _share((waited - self._waited) / wall), "engine": engine}
        self._since, self._waited, self._busy = now, waited, busy
        return shares


def _share(value: float) -> float:
    """A share that clocks of two processes cannot push over its ends."""
    return round(min(max(value, 0.0), 1.0), 4)
