"""Time and identity, the two things the pure core may not make for itself.

`Clock.now` is Unix time that never runs backwards while the process lives. It is read once from the wall clock and then
advances with the monotonic clock. So a step of the system's clock neither expires leases nor reorders calls.
"""

from __future__ import annotations

import secrets
import time

DRAWN = 256
"""Ids at once: asking the system for randomness costs more than all else of an id."""


class Clock:
    """Unix seconds and fresh ids."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._bits: list[str] = []

    def now(self) -> float:
        """Unix time in seconds; non-decreasing."""
        return self._offset + time.monotonic()

    def wall(self) -> float:
        """The system's clock now, for comparison with other programs' times."""
        return time.time()

    def new_id(self, kind: str) -> str:
        """A fresh id such as ``ep-1f0c…`` (64 random bits; no underscore, which verl's keys do not take)."""
        if not self._bits:
            drawn = secrets.token_hex(8 * DRAWN)
            self._bits = [drawn[at : at + 16] for at in range(0, len(drawn), 16)]
        return f"{kind}-{self._bits.pop()}"
