"""How many episodes of a run the world has room for, as far as it has said that it is full (`Busy`).

Idea: as many as played when it was full. From then on another one begins when one of them ends. Now and then one more
finds out if there is room by now, after pauses that grow.
"""

from __future__ import annotations

from collections.abc import Callable

from ajet_sdk.play.schedule import pause_after

FULL_S = 1800.0
"""A run begins no more once its world has been full for so long while nothing of the run played."""


class Room:
    """Counts what is `playing`. It is `over` once the world has been full for too long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.playing, self.over = 0, False
        self._most: int | None = None
        self._pauses = self._alone = 0
        self._again = self._since = 0.0

    def begins(self) -> bool:
        """Counts one more as playing, if it may begin now."""
        if self._most is not None and self.playing >= self._most:
            if (now := self._clock()) < self._again:
                return False
            self._wait(now)
        self.playing += 1
        return True

    def left(self) -> None:
        """One has not begun after all."""
        self.playing -= 1

    def ended(self, *, full: bool) -> None:
        """One has ended; if the world was `full`, it has not played."""
        self.left()
        now, alone = self._clock(), not self.playing
        if not full:
            self._alone = 0
            if self._most is not None and self.playing >= self._most:
                self._most, self._pauses = self.playing + 1, 0
            return
        self._most = self.playing
        if alone:  # a place that was just left may be free in a moment
            self._since = self._since if self._alone else now
            self._again, self._alone = now + pause_after(self._alone), self._alone + 1
            self.over = now - self._since >= FULL_S
        elif now >= self._again:
            self._wait(now)

    def _wait(self, now: float) -> None:
        self._again, self._pauses = now + pause_after(self._pauses), self._pauses + 1
