"""Openings that wait for room in their lanes: who completes a group goes first, then who came first.

Where a hundred agents wait to play a dozen tasks, the room for two groups would else go to some episodes of each task.
None of them makes a group, and they grow old until the others come.

A thousand clients may wait at once. So whatever happens in the ledger wakes as many of a lane as there is room for,
each once, and nobody else looks again. Those of one lane whose episodes may train the same models wait together.

Nobody is held for ever. One that is refused and soon asks again, by the same name, stands where it stood.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import count, islice, takewhile

from ajet_proxy.core.ledger.progress import GroupKey

AGAIN_S = 5.0
"""One that was refused keeps its number for so long."""
MOST_KEPT = 10_000
"""So many numbers are kept; the oldest go first."""
Waiter = tuple[int, asyncio.Event]
"""One that waits, with its number in the order in which all came."""
Where = tuple[str, tuple[str, ...]]
"""A lane, and the models that episodes may train."""


def _number(waiter: Waiter) -> int:
    return waiter[0]


class Pace:
    """`room` tells how many more episodes of a lane may be opened now that may train some models; None is any number.
    `lacking` tells how many episodes the group lacks that was begun in a group key, if one was. Call `changed` when
    that may have changed."""

    def __init__(
        self, room: Callable[[str, tuple[str, ...]], int | None],
        lacking: Callable[[GroupKey, tuple[str, ...]], int] = lambda group_key, models: 0,
    ) -> None:
        self._room, self._lacking = room, lacking
        self._waiting: dict[Where, dict[GroupKey, list[Waiter]]] = {}
        self._woken = Counter[Where]()
        """The number of those that are about to look for the room that they were woken for."""
        self._kept: dict[Hashable, tuple[int, float]] = {}
        self._numbers = count()
        self._stopping = False

    async def enter(
        self, group_key: GroupKey, hold_s: float, models: tuple[str, ...] = (), name: Hashable = None
    ) -> bool:
        """Returns once an episode of `group_key` that may train `models` may be opened, which its caller does at once.
        False if that took longer than `hold_s`, or if nobody is held any more. A `name` is of one episode."""
        where = group_key.lane, models
        if where not in self._waiting and not self._woken[where] and self._room(*where) != 0:
            return True
        number, until = self._kept.pop(name, (0, 0.0))
        waiter = number if until > asyncio.get_running_loop().time() else next(self._numbers), asyncio.Event()
        try:
            async with asyncio.timeout(hold_s):
                while not self._stopping:
                    await self._wait(where, group_key, waiter)
                    waiter[1].clear()
                    if self._room(*where) != 0:
                        return True
        except TimeoutError:
            self._keep(name, waiter[0])
        finally:
            if waiter[1].is_set():
                self.changed()  # somebody else has the room, if it goes away
        return False

    async def _wait(self, where: Where, group_key: GroupKey, waiter: Waiter) -> None:
        """Stand in the line of `where` until woken."""
        insort(self._waiting.setdefault(where, {}).setdefault(group_key, []), waiter, key=_number)
        try:
            await waiter[1].wait()
        finally:
            if waiter[1].is_set():
                self._woken[where] -= 1
                if not self._woken[where]:
                    del self._woken[where]
            else:
                self._leave(where, group_key, waiter)

    def _keep(self, name: Hashable, number: int) -> None:
        now = asyncio.get_running_loop().time()
        for old in list(takewhile(lambda one: self._kept[one][1] <= now, self._kept)):
            del self._kept[old]
        if name is not None:
            self._kept[name] = number, now + AGAIN_S
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def _leave(self, where: Where, group_key: GroupKey, waiter: Waiter) -> None:
        by_key = self._waiting[where]
        by_key[group_key].remove(waiter)
        if not by_key[group_key]:
            del by_key[group_key]
        if not by_key:
            del self._waiting[where]

    def full(self) -> list[Where]:
        """The lanes, each of a model, in which somebody waits."""
        return sorted(self._waiting)

    def changed(self) -> None:
        """Something happened: those who have room now go on."""
        some = [(where, room) for where in self._waiting if (room := self._room(*where)) != 0]
        for where, room in sorted(some, key=self._first):
            self._wake(where, None if room is None else max(0, room - self._woken[where]))

    def _wake(self, where: Where, most: int | None) -> None:
        """Wake at most so many of those who wait there (None: all)."""
        by_key = self._waiting[where]
        for group_key, waiter in list(islice(self._in_order(by_key, where[1]), most)) if most != 0 else ():
            waiter[1].set()
            self._woken[where] += 1
            self._leave(where, group_key, waiter)

    def _first(self, where: tuple[Where, int | None]) -> int:
        """The number of who came first of those who wait there."""
        return min(waiters[0][0] for waiters in self._waiting[where[0]].values())

    def _in_order(
        self, by_key: dict[GroupKey, list[Waiter]], models: tuple[str, ...]
    ) -> Iterator[tuple[GroupKey, Waiter]]:
        """The waiters of a lane: as many as the groups lack that were begun, then group key by group key."""
        first = sorted(by_key.items(), key=lambda item: item[1][0][0])
        begun = [(group_key, waiters, self._lacking(group_key, models)) for group_key, waiters in first]
        yield from ((group_key, one) for group_key, waiters, lacking in begun for one in waiters[:lacking])
        yield from ((group_key, one) for group_key, waiters, lacking in begun for one in waiters[lacking:])

    def stop(self) -> None:
        """Nobody is held from now on."""
        self._stopping = True
        for where in list(self._waiting):
            self._wake(where, None)
