"""The groups of one model as they fill, and what of them can be leased.

Idea: who is compared with whom is settled as episodes open (`ajet_proxy.core.ledger.groups`). An episode that comes
back from a lease takes its old seat again, so groups form as they did before. Where nothing of a group key is open, no
seat is kept free: what is left of its groups is put together. A group key that has ended gives what is left then as a
smaller group.

A trainer that waits makes the proxy look again and again (`ajet_proxy.core.ledger.looks`). So whole groups stand in
order, group keys are counted, and episodes are ordered by their oldest version, as they come and go.

Invariant: all that is counted or in order is as the groups and seats alone would make it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from sys import maxsize
from typing import Any, NamedTuple

from ajet_proxy.core.ledger.groups import LATE, OPEN, READY, Group, Seat, dealt, in_order
from ajet_proxy.core.ledger.progress import GroupKey


@dataclass(frozen=True, slots=True)
class Demand:
    """``groups`` groups of ``size`` episodes; with ``by_episode``, groups that have as many episodes together. All must
    be there, and the first ``most`` are taken. What is left of a group key that ``ended`` is a group too, if it has
    ``least`` episodes. If groups may end ``early``, so is what is left of one that is cut (`Group.is_cut`), with those
    that it is compared with."""

    groups: int
    size: int
    by_episode: bool = False
    least: int = 1
    ended: Collection[GroupKey] = frozenset()
    early: bool = False
    most: int = maxsize

    @property
    def taken(self) -> int:
        return min(self.groups, self.most)

    def counted(self, group: Collection[str]) -> int:
        """As how much of the demand a group counts."""
        return len(group) if self.by_episode else 1


class Formed(NamedTuple):
    """Episodes that can be leased as a group. ``number`` is when the last of them was ready, and ``oldest`` the lowest
    version in their tokens."""

    number: int
    oldest: int
    group_key: GroupKey
    group: int
    members: tuple[str, ...]


@dataclass(slots=True)
class Seating:
    """The groups of one group key, by their numbers, and what they add up to. ``rest`` are the ready episodes that no
    whole group has, and ``rests`` the groups with them. ``free`` are the groups with free seats, and ``orders`` says
    when the members were opened; all in order."""

    groups: dict[int, Group] = field(default_factory=dict)
    open: int = 0
    late: int = 0
    ready: int = 0
    rest: int = 0
    whole: int = 0
    rests: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)

    def spare(self, size: int) -> int:
        """The number of further groups of `size`, while nothing is open or late."""
        return 0 if self.open or self.late else self.rest // size

    def count(self, group: Group, change: int) -> None:
        """`group` counts as it is (1), or no longer (-1)."""
        self.open += change * group.open
        self.late += change * group.late
        self.ready += change * group.ready
        if group.whole:
            self.whole += change
        elif group.ready:
            self.rest += change * group.ready
            _list(self.rests, group.number, change)
        if group.free > 0 and not group.late:
            _list(self.free, group.number, change)


@dataclass(slots=True)
class ModelQueue:
    """The groups of one model by their numbers, each with ``size`` seats. So many were ``made``. An episode has one of
    the ``seats`` until it never comes back."""

    size: int
    made: int = 0
    seats: dict[str, Seat] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    seatings: dict[GroupKey, Seating] = field(default_factory=dict, init=False)
    complete: int = field(default=0, init=False)
    """The number of groups that are whole or spare."""
    waiting: int = field(default=0, init=False)
    """The number of group keys with ready episodes and no such group."""
    whole: dict[str, list[Formed]] = field(default_factory=dict, init=False)
    """For each lane the whole groups, in order."""
    spare: dict[GroupKey, int] = field(default_factory=dict, init=False)
    """The number of spare groups that a group key has, if it has any."""
    cut: dict[int, Group] = field(default_factory=dict, init=False)
    """The groups that are cut (`Group.is_cut`)."""
    begun: dict[int, Group] = field(default_factory=dict, init=False)
    """The groups in which somebody is waited for, and others have ended."""
    ages: list[tuple[int, str]] = field(default_factory=list, init=False)
    """The ready episodes, those with the oldest version first."""

    # -- who sits where

    def sit(self, group_key: GroupKey, episode: str, seat: Seat, state: str) -> None:
        """`episode` is opened, or turns out to be of this model and group key. Its `seat` is in the first group that
        has one free. If others have seats already that opened after it, it gets one before them, and they move up."""
        self.seats[episode] = seat
        known = self.seatings.setdefault(group_key, Seating())
        early = bool(known.orders) and seat.order < known.orders[-1]
        for number in sorted(known.groups) if early else known.free[:1]:
            group = known.groups[number]
            if number in known.free:
                self._put(group, episode, state)
                seat.group = number
                return
            last = max(group.members, key=lambda one: self.seats[one].order)
            moving = self.seats[last]
            if moving.order > seat.order and not group.late:
                after = group.members[last]
                self._put(group, episode, state)
                self._put(group, last, None)
                seat.group, episode, state, seat = number, last, after, moving
        self._put(self._new(group_key, self.made), episode, state)
        seat.group, self.made = self.made, self.made + 1

    def leave(self, episode: str, *, dropped: bool = False) -> None:
        """`episode` is discarded, or is not of this model and group key after all. Somebody else gets its seat, unless
        it is `dropped` or leased: then the others are still compared with it."""
        self._put(self.groups[self.seats[episode].group], episode, None, dropped)

    def late(self, episode: str) -> None:
        """`episode` is waited for no longer."""
        self._put(self.groups[self.seats[episode].group], episode, LATE)

    def add(self, group_key: GroupKey, episode: str, number: int, oldest: int, lasted: float = 0.0) -> None:
        """`episode`, which has a seat, is ready, as number `number`; `oldest` is the lowest version in its share's
        tokens. It was open for `lasted` seconds. If it was ready before, a lease brings it back. If its group was taken
        without it, it sits down with those that open now, if any do. So as many slow ones come into later groups as
        earlier ones lack."""
        seat = self.seats[episode]
        if seat.number < 0:
            seat.number, seat.oldest = number, oldest
        group = self.groups.get(seat.group) or self._new(group_key, seat.group)
        if group.members.get(episode) == LATE and group.earlier:
            known = self.seatings[group_key]
            if known.free and (filling := known.groups[known.free[0]]).open:
                self._put(group, episode, None)
                group, seat.group = filling, filling.number
        self._put(group, episode, READY, lasted=lasted)

    def age(self, oldest: Callable[[str], int]) -> None:
        """Versions are told otherwise from now on; `oldest` tells that of an episode."""
        for episode, seat in self.seats.items():
            if seat.number >= 0:
                seat.oldest = oldest(episode)
        self.arrange(self.size)

    def part(self) -> None:
        """Nothing is compared with what was ready before."""
        for group in self.groups.values():
            group.earlier = []
        self.arrange(self.size)

    def arrange(self, size: int) -> None:
        """Groups have this `size` from now on; and rebuild whatever follows from the groups."""
        if size != self.size:
            self.size, self.groups = size, {}
            for known in self.seatings.values():
                old = [known.groups[number] for number in sorted(known.groups)]
                self.groups |= {one.number: one for one in dealt(old, size, self.seats, self.made) if one.members}
                self.made = max(self.made, -1, *self.groups) + 1
        self.complete = self.waiting = 0
        self.seatings, self.whole, self.spare, self.cut, self.begun, self.ages = {}, {}, {}, {}, {}, []
        for group in self.groups.values():
            known = self.seatings.setdefault(group.group_key, Seating())
            known.groups[group.number] = group
            for episode, state in group.members.items():
                seat = self.seats[episode]
                seat.group = group.number
                known.orders.append(seat.order)
                if state == READY:
                    self.ages.append((seat.oldest, episode))
            self._count(known, group, 1)
        self.ages.sort()
        for known in self.seatings.values():
            known.orders.sort()

    def _new(self, group_key: GroupKey, number: int) -> Group:
        """A new group, without members, or one that a lease had taken whole."""
        group = self.groups[number] = Group(group_key, number, self.size)
        self.seatings.setdefault(group_key, Seating()).groups[number] = group
        return group

    def _put(
        self, group: Group, episode: str, state: str | None, dropped: bool = False, lasted: float = 0.0
    ) -> None:
        """`episode` is a member of `group` in that state, or none any more; and all that follows."""
        known, seat, before = self.seatings[group.group_key], self.seats[episode], group.members.get(episode)
        self._count(known, group, -1)
        if dropped:
            group.lose(episode)
        else:
            group.put(episode, state)
        _list(known.orders, seat.order, (state is not None) - (before is not None))
        _list(self.ages, (seat.oldest, episode), (state == READY) - (before == READY))
        if state is not None and episode in group.earlier:
            group.earlier.remove(episode)
        group.slowest = max(group.slowest, lasted)
        self._count(known, group, 1)
        if not group.members:
            del self.groups[group.number], known.groups[group.number]
            if not known.groups:
                del self.seatings[group.group_key]

    def _count(self, known: Seating, group: Group, change: int) -> None:
        """`group` is about to change (-1), or has changed (1). One without members counts for nothing."""
        if not group.members:
            return
        self._count_key(group.group_key, known, -1)
        known.count(group, change)
        self._count_key(group.group_key, known, 1)
        for holds, index in ((group.is_cut, self.cut), (group.open and group.slowest, self.begun)):
            if holds and change > 0:
                index[group.number] = group
            elif holds:
                del index[group.number]
        if group.whole:
            lane = group.group_key.lane
            taken = [one for one in in_order(group, self.seats) if group.members[one] == READY][: group.size]
            _list(self.whole.setdefault(lane, []), self._formed(group.group_key, group.number, taken), change)
            if not self.whole[lane]:
                del self.whole[lane]

    def _count_key(self, group_key: GroupKey, known: Seating, change: int) -> None:
        spare = known.spare(self.size)
        self.complete += change * (known.whole + spare)
        self.waiting += change * (known.ready > 0 and not known.whole + spare)
        if spare and change > 0:
            self.spare[group_key] = spare
        elif spare:
            del self.spare[group_key]

    def _formed(self, group_key: GroupKey, number: int, members: Sequence[str]) -> Formed:
        seats = [self.seats[episode] for episode in members]
        last, oldest = max(seat.number for seat in seats), min(seat.oldest for seat in seats)
        return Formed(last, oldest, group_key, number, tuple(members))

    # -- what can be leased

    def compared(self, members: Iterable[str]) -> tuple[str, ...]:
        """Which episodes a group that is leased is compared with besides: those that were in the same group earlier, if
        it is what is left of one."""
        numbers = {self.seats[episode].group for episode in members}
        group = self.groups[numbers.pop()]
        return () if numbers else tuple(group.earlier)

    def touched(self, out: Collection[str]) -> dict[GroupKey, set[int]]:
        """The group keys and groups in which something is `out`."""
        found: dict[GroupKey, set[int]] = {}
        for episode in out:
            if (group := self.groups.get(self.seats[episode].group)) is not None:
                found.setdefault(group.group_key, set()).add(group.number)
        return found

    def apart(self, demand: Demand, out: Collection[str]) -> dict[GroupKey, set[int]]:
        """The group keys that have more to take than whole groups, each with its groups in which something is `out`.
        All group keys if `demand` wants groups of another size."""
        keys: Iterable[GroupKey] = self.seatings
        if demand.size == self.size:
            cut = (group.group_key for group in self.cut.values()) if demand.early else ()
            left = (key for key in demand.ended if (known := self.seatings.get(key)) is not None and known.rest)
            keys = chain(self.spare, cut, left)
        return {**{key: set() for key in keys}, **self.touched(out)}

    def older(self, version: int) -> Sequence[str]:
        """The ready episodes with a token of an older version than `version`."""
        return [episode for _, episode in self.ages[: bisect_left(self.ages, (version,))]]

    def left_over(self, demand: Demand, out: Collection[str]) -> Iterator[str]:
        """Yield what is left of group keys that have ended, and is too little for a group. `out` is left out."""
        touched = self.touched(out)
        for key in demand.ended:
            known = self.seatings.get(key)
            if known is not None and (
                0 < known.rest % self.size < demand.least or key in touched or demand.size != self.size
            ):
                yield from self.parts(key, demand, out, touched.get(key, ()))[1]

    def overdue(self, after: Callable[[float], float], played: Callable[[str], float]) -> Iterator[str]:
        """The episodes for which their groups have waited long enough. `played` tells for how many seconds one has been
        open, and `after` when that is enough, by those of the slowest other."""
        for group in self.begun.values():
            enough = after(group.slowest)
            for episode, state in group.members.items():
                if state == OPEN and played(episode) >= enough:
                    yield episode

    def may_have(self, demand: Demand) -> bool:
        """Tell whether the model may have what is asked for."""
        size = demand.size
        if size != self.size:
            least = size if not (demand.early or demand.ended) else demand.least
            return len(self.ages) >= demand.groups * (1 if demand.by_episode else least)
        number = self.complete * (size if demand.by_episode else 1)
        if number >= demand.groups:
            return True
        left = [known.rest for key in demand.ended if (known := self.seatings.get(key)) is not None]
        left += [group.ready for group in self.cut.values() if demand.early]
        return number + (sum(left) if demand.by_episode else sum(map(bool, left))) >= demand.groups

    def parts(
        self, group_key: GroupKey, demand: Demand, out: Collection[str], touched: Collection[int]
    ) -> tuple[list[Formed], list[str]]:
        """Find what can be taken of a group key besides its whole groups, and what nobody will ever take. Nothing is
        taken that is `out`. The groups that are `touched` have something that is."""
        size, known = demand.size, self.seatings[group_key]
        if size == self.size:
            groups = [known.groups[number] for number in sorted({*known.rests, *touched})]
        else:
            groups = list(dealt([known.groups[number] for number in sorted(known.groups)], size, self.seats, 0))
        found, rest = list[list[str]](), list[str]()
        for group in groups:
            ready = [one for one in in_order(group, self.seats) if group.members[one] == READY]
            mine = [one for one in ready if one not in out]
            waits = group.open or not (group.late or group.earlier or len(mine) < len(ready))
            if len(mine) >= size or (demand.early and mine and not waits and demand.least <= len(mine + group.earlier)):
                found.append(mine[:size])
            else:
                rest += mine
        left, ended = list[str](), group_key in demand.ended
        for at in range(0, len(rest), size) if ended or not (known.open or known.late) else ():
            part = rest[at : at + size]
            if len(part) == size or (ended and len(part) >= demand.least):
                found.append(part)
            elif ended and not known.late:
                left = part
        return [self._formed(group_key, number, part) for number, part in enumerate(found)], left


def _list(names: list[Any], name: Any, change: int) -> None:
    """`names`, which are in order, have that `name` from now on (1), or no longer (-1), or as before (0)."""
    if change > 0:
        insort(names, name)
    elif change < 0:
        del names[bisect_left(names, name)]
