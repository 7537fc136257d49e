"""Openings that wait for room in their lanes: first come, first served.

A thousand clients may wait at once. So whatever happens in the ledger wakes as many of a lane as there is room for, and
nobody else looks again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice


class Pace:
    """`room` tells how many more episodes of a lane may be opened now; None is any number. Call `changed` when that may
    have changed, as long as `watch` says that anybody waits."""

    def __init__(self, room: Callable[[str], int | None], watch: Callable[[bool], None] = lambda waits: None) -> None:
        self._room, self._watch = room, watch
        self._waiting: dict[str, deque[asyncio.Event]] = {}
        self._stopping = False

    async def enter(self, lane: str, hold_s: float) -> bool:
        """Returns once an episode of `lane` may be opened, which its caller does at once. False if that took longer
        than `hold_s`, or if nobody is held any more."""
        if lane not in self._waiting and self._room(lane) != 0:
            return True
        if not self._waiting:
            self._watch(True)
        turn, waiting = asyncio.Event(), self._waiting.setdefault(lane, deque())
        waiting.append(turn)
        try:
            async with asyncio.timeout(hold_s):
                while not self._stopping:
                    await turn.wait()
                    turn.clear()
                    if self._room(lane) != 0:
                        return True
        except TimeoutError:
            pass
        finally:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[lane]
            if not self._waiting:
                self._watch(False)
            self.changed()  # whom it keeps out no longer, if it goes away
        return False

    def full(self) -> list[str]:
        """The lanes in which somebody waits."""
        return sorted(self._waiting)

    def changed(self) -> None:
        """Something happened: those who have room now go on."""
        for lane, waiting in self._waiting.items():
            for turn in islice(waiting, self._room(lane)):
                turn.set()

    def stop(self) -> None:
        """Nobody is held from now on."""
        self._stopping = True
        for turn in (turn for waiting in self._waiting.values() for turn in waiting):
            turn.set()
