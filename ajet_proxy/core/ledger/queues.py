"""The groups of each model and group key as they fill, which of them are whole, and the leases they are under.

Idea: who is compared with whom is settled as episodes open (`ajet_proxy.core.ledger.groups`). An episode that comes
back from a lease takes its old seat again, so groups form as they did before. Where nothing of a group key is open, no
seat is kept free: what is left of its groups is put together. A group key that has ended gives what is left then as a
smaller group.

Invariant: an episode has a seat for each model that it may train, exactly while it is open, sealed or ready.

A trainer that waits makes the proxy look again and again (`ajet_proxy.core.ledger.looks`). So whole groups stand in
order, group keys are counted, and shares are ordered by their oldest version, as they come and go.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from sys import maxsize
from typing import Any, ClassVar, NamedTuple

from ajet_proxy.core.ledger.groups import LATE, OPEN, READY, Group, Seat, Share, dealt, in_order
from ajet_proxy.core.ledger.progress import GroupKey

Key = tuple[str, GroupKey]
"""A model and a group key."""
Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""Task and episode ids of each group."""


@dataclass(slots=True)
class LeasedBatch:
    """A batch of one model, and what became of it. ``state`` is leased, trained or returned. ``number`` counts leases.
    ``rewards_at_lease`` tells how many rewards each episode had then, because a later lease may deliver more.
    ``earlier`` has the episodes with which groups are compared besides, each group by the name of its first one."""

    id: str
    model: str
    lease_until: float
    policy_version: int
    groups: Groups
    number: int = 0
    rewards_at_lease: dict[str, int] = field(default_factory=dict)
    state: str = "leased"
    branch: int = 0
    """The branch that the model was on (`ajet_proxy.core.ledger.births`)."""
    earlier: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def episodes(self) -> Iterator[str]:
        for _, episodes in self.groups:
            yield from episodes


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
    """The groups of one model and group key, by their numbers, and what they add up to. ``rest`` are the ready episodes
    that no whole group has, and ``rests`` the groups with them. ``free`` are the groups with free seats, and ``orders``
    says when the members were opened; all in order."""

    groups: dict[int, Group]
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


@dataclass(slots=True)
class ReadyQueues:
    """For each model and group key its groups. ``group_size`` is that of models without one of their own, which
    ``sizes`` has."""

    KEPT: ClassVar = ("group_size", "sizes", "changes", "_next", "_made", "_seats", "_groups")
    group_size: int
    changes: int = 0
    """How often a share came or went."""
    sizes: dict[str, int] = field(default_factory=dict)
    _next: int = 0
    _made: int = 0
    _seats: dict[Share, Seat] = field(default_factory=dict)
    _groups: dict[Key, dict[int, Group]] = field(default_factory=dict)
    complete: int = field(default=0, init=False)
    """The number of whole groups."""
    waiting: int = field(default=0, init=False)
    """The number of group keys with ready episodes and no whole group."""
    _seatings: dict[Key, Seating] = field(default_factory=dict, init=False)
    _keys: dict[int, Key] = field(default_factory=dict, init=False)
    """Whose group that is of a number."""
    _ready: Counter[str] = field(default_factory=Counter, init=False)
    """For each model, how many of its episodes are ready."""
    _whole: dict[str, dict[str, list[Formed]]] = field(default_factory=dict, init=False)
    """For each model and lane its whole groups, in order."""
    _count: Counter[str] = field(default_factory=Counter, init=False)
    """For each model, how many groups it has that are whole or spare."""
    _spare: dict[str, dict[Key, Key]] = field(default_factory=dict, init=False)
    """For each model, the group keys with spare groups."""
    _cut: dict[str, dict[int, Key]] = field(default_factory=dict, init=False)
    """For each model, the groups that are cut."""
    _begun: dict[str, dict[int, Key]] = field(default_factory=dict, init=False)
    """For each model, the groups in which somebody is waited for, and others have ended."""
    _ages: dict[str, list[tuple[int, str]]] = field(default_factory=dict, init=False)
    """For each model its ready episodes, those with the oldest version first."""

    def derive(self) -> None:
        """Rebuild whatever follows from what a snapshot has, where a group key is a plain tuple."""
        self._groups = {(model, GroupKey(*group_key)): groups for (model, group_key), groups in self._groups.items()}
        self.arrange(self.group_size, self.sizes)

    def size_of(self, model: str) -> int:
        """The number of seats in groups of `model`."""
        return self.sizes.get(model, self.group_size)

    # -- who sits where

    def sit(
        self, model: str, group_key: GroupKey, episode: str, order: int, stood: float = 0.0, state: str = OPEN
    ) -> None:
        """`episode` is opened, as number `order`, or turns out to be of this model and group key. It gets the first
        free seat. If others have seats already that opened after it, it gets one before them, and they move up."""
        self._seats[model, episode] = Seat(-1, order, stood)
        self._enter((model, group_key), episode, state)

    def _enter(self, key: Key, episode: str, state: str) -> None:
        """Find `episode` a seat."""
        known = self._seatings.setdefault(key, Seating(self._groups.setdefault(key, {})))
        seat = self._seats[key[0], episode]
        early = bool(known.orders) and seat.order < known.orders[-1]
        for number in sorted(known.groups) if early else known.free[:1]:
            group = known.groups[number]
            if number in known.free:
                self._put(key, group, episode, state)
                seat.group = number
                return
            last = max(group.members, key=lambda one: self._seats[key[0], one].order)
            moving = self._seats[key[0], last]
            if moving.order > seat.order and not group.late:
                after = group.members[last]
                self._put(key, group, episode, state)
                self._put(key, group, last, None)
                seat.group, episode, state, seat = number, last, after, moving
        self._put(key, self._new(key, self._made), episode, state)
        seat.group, self._made = self._made, self._made + 1

    def leave(self, model: str, group_key: GroupKey, episode: str, *, dropped: bool = False) -> None:
        """`episode` is discarded, or is not of this model and group key after all. Somebody else gets its seat, unless
        it is `dropped` or leased: then the others are still compared with it."""
        key, seat = (model, group_key), self._seats[model, episode]
        group = self._groups[key][seat.group]
        if group.members[episode] == READY:
            self.changes += 1
            ages = self._ages[model]
            del ages[bisect_left(ages, (seat.oldest, episode))]
            if not ages:
                del self._ages[model]
        self._put(key, group, episode, None, dropped)

    def knows(self, model: str, episode: str) -> bool:
        """Tell whether `episode` has a seat for `model`, or had one that it may come back to."""
        return (model, episode) in self._seats

    def stood(self, model: str, episode: str) -> float:
        """For how long the gate of `model` had been shut when `episode` sat down, in seconds."""
        return self._seats[model, episode].stood

    def late(self, model: str, group_key: GroupKey, episode: str) -> None:
        """`episode` is waited for no longer."""
        self.changes += 1
        group = self._groups[model, group_key][self._seats[model, episode].group]
        self._put((model, group_key), group, episode, LATE)

    def add(self, model: str, group_key: GroupKey, episode: str, oldest: int, lasted: float = 0.0) -> None:
        """`episode`, which has a seat, is ready; `oldest` is the lowest version in its share's tokens. It was open for
        `lasted` seconds. If it was ready before, a lease brings it back. If its group was taken without it, it sits
        down with those that open now, if any do. So as many slow ones come into later groups as earlier ones lack.
        """
        key, seat = (model, group_key), self._seats[model, episode]
        if seat.number < 0:
            seat.number, seat.oldest, self._next = self._next, oldest, self._next + 1
        self.changes += 1
        group = self._groups.get(key, {}).get(seat.group) or self._new(key, seat.group)
        if group.members.get(episode) == LATE and group.earlier:
            known = self._seatings[key]
            if (filling := known.groups.get(known.free[0] if known.free else -1)) is not None and filling.open:
                self._put(key, group, episode, None)
                group, seat.group = filling, filling.number
        insort(self._ages.setdefault(model, []), (seat.oldest, episode))
        self._put(key, group, episode, READY, lasted=lasted)

    def age(self, model: str, oldest: Callable[[str], int]) -> None:
        """Versions of `model` are told otherwise from now on; `oldest` tells that of an episode."""
        for (name, episode), seat in self._seats.items():
            if name == model and seat.number >= 0:
                seat.oldest = oldest(episode)
        self.arrange(self.group_size, self.sizes)

    def forget(self, model: str, episode: str) -> None:
        """`episode` never comes back."""
        self._seats.pop((model, episode), None)

    def compared(self, model: str, group_key: GroupKey, members: Sequence[str]) -> tuple[str, ...]:
        """Which episodes a group that is leased is compared with besides: those that were in the same group earlier, if
        it is what is left of one."""
        known = self._groups[model, group_key]
        numbers = {self._seats[model, episode].group for episode in members}
        group = known[numbers.pop()]
        return () if numbers else tuple(group.earlier)

    def part(self, model: str) -> None:
        """Nothing of `model` is compared with what was ready before."""
        for (name, _), groups in self._groups.items():
            for group in groups.values() if name == model else ():
                group.earlier = []
        self.arrange(self.group_size, self.sizes)

    def needed(self) -> Collection[str]:
        """The episodes with which others may be compared."""
        return {one for groups in self._groups.values() for group in groups.values() for one in group.earlier}

    def arrange(self, group_size: int, sizes: Mapping[str, int]) -> None:
        """Groups have these sizes from now on; and rebuild whatever follows from the groups."""
        self.group_size, self.sizes = group_size, dict(sizes)
        self.complete = self.waiting = 0
        self._seatings, self._keys, self._ready, self._count = {}, {}, Counter(), Counter()
        self._whole, self._spare, self._cut, self._begun, self._ages = {}, {}, {}, {}, {}
        for key, groups in self._groups.items():
            (model, _), size = key, self.size_of(key[0])
            if any(group.size != size for group in groups.values()):
                old = [groups.pop(number) for number in sorted(groups)]
                groups |= {one.number: one for one in dealt(model, old, size, self._seats, self._made) if one.members}
                self._made = max(self._made, *groups, -1) + 1
            known = self._seatings[key] = Seating(groups)
            for group in groups.values():
                self._keys[group.number] = key
                for episode, state in group.members.items():
                    seat = self._seats[model, episode]
                    seat.group = group.number
                    known.orders.append(seat.order)
                    if state == READY:
                        self._ages.setdefault(model, []).append((seat.oldest, episode))
                self._count_group(key, known, group, 1)
            known.orders.sort()
        for ages in self._ages.values():
            ages.sort()

    def _new(self, key: Key, number: int) -> Group:
        """A new group, without members, or one that a lease had taken whole."""
        group = Group(number, self.size_of(key[0]))
        groups = self._groups.setdefault(key, {})
        self._seatings.setdefault(key, Seating(groups))
        groups[number], self._keys[number] = group, key
        return group

    def _put(
        self, key: Key, group: Group, episode: str, state: str | None, dropped: bool = False, lasted: float = 0.0
    ) -> None:
        """`episode` is a member of `group` in that state, or none any more; and all that follows."""
        known = self._seatings[key]
        if group.members:
            self._count_group(key, known, group, -1)
        order, before = self._seats[key[0], episode].order, len(group.members)
        if dropped:
            group.lose(episode)
        else:
            group.put(episode, state)
        if len(group.members) > before:
            insort(known.orders, order)
        elif len(group.members) < before:
            del known.orders[bisect_left(known.orders, order)]
        if state is None:
            if not group.members:
                del known.groups[group.number], self._keys[group.number]
                if not known.groups:
                    del self._groups[key], self._seatings[key]
                return
        elif episode in group.earlier:
            group.earlier.remove(episode)
        group.slowest = max(group.slowest, lasted)
        self._count_group(key, known, group, 1)

    def _count_group(self, key: Key, known: Seating, group: Group, change: int) -> None:
        """`group` is about to change (-1), or has changed (1)."""
        model, group_key = key
        self._count_key(key, known, -1)
        for name in ("open", "late", "ready"):
            setattr(known, name, getattr(known, name) + change * getattr(group, name))
        self._ready[model] += change * group.ready
        whole = group.whole
        known.whole += change * whole
        known.rest += change * group.ready * (not whole)
        for holds, index in ((group.is_cut, self._cut), (group.open and group.slowest, self._begun)):
            _note(index, model, group.number, key if holds else None, change)
        _list(known.free, group.number, group.free > 0 and not group.late, change)
        _list(known.rests, group.number, bool(group.ready) and not whole, change)
        if whole:
            lanes = self._whole.setdefault(model, {})
            formed = self._formed(key, group.number, self._taken(model, group))
            _list(lanes.setdefault(group_key.lane, []), formed, True, change)
            if not lanes[group_key.lane]:
                del lanes[group_key.lane]
            if not lanes:
                del self._whole[model]
        self._count_key(key, known, 1)
        if not self._ready[model]:
            del self._ready[model]
            self._count.pop(model, None)

    def _count_key(self, key: Key, known: Seating, change: int) -> None:
        model = key[0]
        spare = known.spare(self.size_of(model))
        self.complete += change * (known.whole + spare)
        self._count[model] += change * (known.whole + spare)
        self.waiting += change * (known.ready > 0 and not known.whole + spare)
        _note(self._spare, model, key, None if not spare else key, change)

    def _taken(self, model: str, group: Group) -> list[str]:
        """Of a group that is whole, what is taken first."""
        return [one for one in in_order(model, group, self._seats) if group.members[one] == READY][: group.size]

    def _formed(self, key: Key, number: int, members: Sequence[str]) -> Formed:
        seats = [self._seats[key[0], episode] for episode in members]
        last, oldest = max(seat.number for seat in seats), min(seat.oldest for seat in seats)
        return Formed(last, oldest, key[1], number, tuple(members))

    # -- what can be leased

    def models(self) -> Sequence[str]:
        """The models with ready episodes."""
        return tuple(self._ready)

    def ready(self) -> Iterator[Share]:
        """Every ready share, those of one model and group key as they were ready."""
        for (model, _), groups in self._groups.items():
            found = [one for group in groups.values() for one, state in group.members.items() if state == READY]
            yield from sorted(((model, one) for one in found), key=lambda share: self._seats[share].number)

    def whole(self, model: str) -> Mapping[str, Sequence[Formed]]:
        """For each lane the whole groups of `model`, in order."""
        return self._whole.get(model, {})

    def touched(self, model: str, out: Collection[str]) -> dict[Key, set[int]]:
        """The group keys and groups in which something is `out`."""
        found: dict[Key, set[int]] = {}
        for episode in out:
            number = self._seats[model, episode].group
            if (key := self._keys.get(number)) is not None:
                found.setdefault(key, set()).add(number)
        return found

    def apart(self, model: str, demand: Demand, out: Collection[str]) -> dict[Key, set[int]]:
        """The group keys of `model` that have more to take than whole groups, each with its groups in which something
        is `out`. All group keys if `demand` wants groups of another size."""
        progress: Iterable[Key]
        if demand.size != self.size_of(model):
            progress = (key for key in self._seatings if key[0] == model)
        else:
            cut = self._cut.get(model, {}).values() if demand.early else ()
            ended = ((model, group_key) for group_key in demand.ended)
            left = (key for key in ended if (known := self._seatings.get(key)) is not None and known.rest)
            progress = chain(self._spare.get(model, {}), cut, left)
        return {**{key: set() for key in progress}, **self.touched(model, out)}

    def older(self, model: str, version: int) -> Sequence[str]:
        """The ready episodes of `model` with a token of an older version than `version`."""
        ages = self._ages.get(model, [])
        return [episode for _, episode in ages[: bisect_left(ages, (version,))]]

    def left_over(self, model: str, demand: Demand, out: Collection[Share]) -> Iterator[Share]:
        """Yield what is left of group keys that have ended, and is too little for a group. `out` is left out."""
        gone, size = {episode for name, episode in out if name == model}, self.size_of(model)
        touched = self.touched(model, gone)
        for key in ((model, group_key) for group_key in demand.ended):
            known = self._seatings.get(key)
            if known is not None and (0 < known.rest % size < demand.least or key in touched or demand.size != size):
                left = self.parts(key, demand, gone, touched.get(key, ()))[1]
                yield from ((model, episode) for episode in left)

    def begun(self) -> Sequence[str]:
        """The models with groups in which somebody is waited for, and others have ended."""
        return tuple(self._begun)

    def overdue(self, model: str, after: Callable[[float], float], played: Callable[[str], float]) -> Iterator[str]:
        """The episodes of `model` for which their groups have waited long enough. `played` tells for how many seconds
        one has been open, and `after` when that is enough, by those of the slowest other."""
        for number, key in self._begun.get(model, {}).items():
            group = self._groups[key][number]
            enough = after(group.slowest)
            for episode, state in group.members.items():
                if state == OPEN and played(episode) >= enough:
                    yield episode

    def may_have(self, model: str, demand: Demand) -> bool:
        """Tell whether `model` may have what is asked for."""
        size = demand.size
        if size != self.size_of(model):
            least = size if not (demand.early or demand.ended) else demand.least
            return self._ready[model] >= demand.groups * (1 if demand.by_episode else least)
        number = self._count[model] * (size if demand.by_episode else 1)
        if number >= demand.groups:
            return True
        cut = self._cut.get(model, {}) if demand.early else {}
        ended = (self._seatings.get((model, group_key)) for group_key in demand.ended)
        left = [known.rest for known in ended if known is not None]
        left += [self._groups[key][group].ready for group, key in cut.items()]
        return number + (sum(left) if demand.by_episode else sum(map(bool, left))) >= demand.groups

    def parts(
        self, key: Key, demand: Demand, out: Collection[str], touched: Collection[int]
    ) -> tuple[list[Formed], list[str]]:
        """Find what can be taken of a model and group key besides its whole groups, and what nobody will ever take.
        Nothing is taken that is `out`. The groups that are `touched` have something that is."""
        (model, group_key), size, known = key, demand.size, self._seatings[key]
        if size == self.size_of(model):
            groups = [known.groups[number] for number in sorted({*known.rests, *touched})]
        else:
            groups = [known.groups[number] for number in sorted(known.groups)]
            groups = list(dealt(model, groups, size, self._seats, 0))
        found, rest = list[list[str]](), list[str]()
        for group in groups:
            ready = [one for one in in_order(model, group, self._seats) if group.members[one] == READY]
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
        return [self._formed(key, number, part) for number, part in enumerate(found)], left


def _note(index: dict[str, dict[Any, Key]], model: str, name: Any, key: Key | None, change: int) -> None:
    """For `model`, `index` has `key` by that name from now on (1), or no longer (-1); None: it has none."""
    if key is not None and change > 0:
        index.setdefault(model, {})[name] = key
    elif key is not None:
        del index[model][name]
        if not index[model]:
            del index[model]


def _list(names: list[Any], name: Any, holds: bool, change: int) -> None:
    """`names`, which are in order, have that `name` from now on (1), or no longer (-1), if that `holds`."""
    if holds and change > 0:
        insort(names, name)
    elif holds:
        del names[bisect_left(names, name)]
