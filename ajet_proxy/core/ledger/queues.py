"""Ready episodes in the order of their readiness, complete groups of them, and the leases they are under.

Idea: a group is `size` ready episodes of one pot and model, the oldest first. It is complete from the moment the last
of them became ready, and complete groups are leased in the order of those moments. An episode that comes back from a
lease takes its old place again, so groups form as they did before. A pot that has ended gives what is left of it as a
smaller group. Where lanes have shares, each turn takes the first group of the lane whose turn it is.

Where a trainer takes nothing beyond a certain age, and agents play faster than it trains, this order alone would have
every group trained at its last moment. So groups with a token of an older version than is `fresh` come after all
others, and the freshest of them first.

Invariant: an episode's share of a model stands in its queue exactly while it is ready, in the order of its number.

A trainer that waits makes the proxy look again and again. So queues are counted by length, and shares are ordered by
their oldest version, as they come and go. A look that finds too few groups goes through no queue. A look for what is
stale finds that alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Protocol

from ajet_proxy.core.ledger.pots import Pot

Share = tuple[str, str]
"""Model and episode."""
Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""Task and episode ids of each group."""
Rank = tuple[int, int]
"""By which groups are taken: how many versions its oldest token is older than what is fresh, and the number of its last
episode."""
Ranked = tuple[Rank, tuple[str, tuple[str, ...]]]
"""A group behind its rank."""
Teaches = Callable[[str, tuple[str, ...]], bool]
"""Whether a model may have such a group of episodes."""


@dataclass(slots=True)
class LeasedBatch:
    """A batch of one model, and what became of it. ``state`` is leased, trained or returned. ``number`` counts leases.
    ``rewards_at_lease`` tells how many rewards each episode had then, because a later lease may deliver more."""

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

    def episodes(self) -> Iterator[str]:
        for _, episodes in self.groups:
            yield from episodes


class Order(Protocol):
    """In which order the lanes have their turns (`ajet_proxy.core.ledger.mix.Turns`)."""

    def next(self, has: Callable[[str], bool]) -> str | None:
        """The lane whose group is taken next, of those that `has` says have one; None: of none now."""

    def take(self, lane: str) -> None:
        """A group of it is taken."""


@dataclass(frozen=True, slots=True)
class Demand:
    """``groups`` groups of ``size`` episodes; with ``by_episode``, groups that have as many episodes together. What is
    left of a pot that ``ended`` is a group too, if it has ``least`` episodes."""

    groups: int
    size: int
    by_episode: bool = False
    least: int = 1
    ended: Collection[Pot] = frozenset()

    def counted(self, group: Collection[str]) -> int:
        """As how much of the demand a group counts."""
        return len(group) if self.by_episode else 1


@dataclass(slots=True)
class ReadyQueues:
    """For each model and pot its ready episodes, the longest ready first. The number and the oldest version of a share
    outlive its leases."""

    group_size: int
    changes: int = 0
    """How often a share came or went."""
    _next: int = 0
    _places: dict[Share, tuple[int, int]] = field(default_factory=dict)
    _queues: dict[tuple[str, Pot], list[tuple[int, str]]] = field(default_factory=dict)
    _oldest: dict[tuple[str, Pot], list[int]] = field(default_factory=dict, init=False)
    """The oldest versions of the shares of each queue, in its order."""
    _lanes: dict[str, dict[str, dict[Pot, None]]] = field(default_factory=dict, init=False)
    """For each model and lane, the pots that have a queue, in the order in which they got it."""
    _lengths: dict[str, Counter[int]] = field(default_factory=dict, init=False)
    """For each model, how many of its queues have a length."""
    _ages: dict[str, list[tuple[int, str]]] = field(default_factory=dict, init=False)
    """For each model its ready episodes, those with the oldest version first."""

    @property
    def complete(self) -> int:
        """The number of whole groups of ``group_size``."""
        return sum(self._whole(model, self.group_size) for model in self._lengths)

    @property
    def waiting(self) -> int:
        """The number of pots with ready episodes and no whole group."""
        return sum(
            number for lengths in self._lengths.values() for length, number in lengths.items()
            if length < self.group_size
        )

    def add(self, model: str, pot: Pot, episode: str, oldest: int) -> None:
        """`episode` is ready, for the first time or again; `oldest` is the lowest version in its share's tokens."""
        number, oldest = self._places.setdefault((model, episode), (self._next, oldest))
        self._next = max(self._next, number + 1)
        self.changes += 1
        queue = self._queues.setdefault((model, pot), [])
        at = bisect_left(queue, (number, episode))
        queue.insert(at, (number, episode))
        self._oldest.setdefault((model, pot), []).insert(at, oldest)
        self._grown(model, pot, len(queue) - 1, len(queue))
        insort(self._ages.setdefault(model, []), (oldest, episode))

    def remove(self, model: str, pot: Pot, episode: str) -> None:
        """`episode` is leased, trained or discarded."""
        self.changes += 1
        number, oldest = self._places[model, episode]
        queue, ages = self._queues[model, pot], self._ages[model]
        at = bisect_left(queue, (number, episode))
        del queue[at], self._oldest[model, pot][at]
        self._grown(model, pot, len(queue) + 1, len(queue))
        del ages[bisect_left(ages, (oldest, episode))]
        if not queue:
            del self._queues[model, pot], self._oldest[model, pot]
        if not ages:
            del self._ages[model]

    def regroup(self, group_size: int) -> None:
        """Count by another size of groups, and rebuild whatever follows from the queues."""
        self.group_size, self._oldest, self._lanes, self._lengths, self._ages = group_size, {}, {}, {}, {}
        for (model, pot), queue in self._queues.items():
            self._grown(model, pot, 0, len(queue))
            oldest = self._oldest[model, pot] = [self._places[model, episode][1] for _, episode in queue]
            self._ages.setdefault(model, []).extend(zip(oldest, (episode for _, episode in queue), strict=True))
        for ages in self._ages.values():
            ages.sort()

    def age(self, model: str, oldest: Callable[[str], int]) -> None:
        """Versions of `model` are told otherwise from now on; `oldest` tells that of an episode."""
        for (name, episode), (number, _) in tuple(self._places.items()):
            if name == model:
                self._places[name, episode] = number, oldest(episode)
        self.regroup(self.group_size)

    def forget(self, model: str, episode: str) -> None:
        """`episode` never comes back."""
        self._places.pop((model, episode), None)

    def models(self) -> Sequence[str]:
        """The models with ready episodes."""
        return tuple(self._lengths)

    def ready(self) -> Iterator[Share]:
        """Every ready share."""
        for (model, _), queue in self._queues.items():
            yield from ((model, episode) for _, episode in queue)

    def pots(self) -> Iterator[Pot]:
        """The pot of every ready share."""
        for (_, pot), queue in self._queues.items():
            yield from (pot for _ in queue)

    def older(self, model: str, version: int) -> Sequence[str]:
        """The ready episodes of `model` with a token of an older version than `version`."""
        ages = self._ages.get(model, [])
        return [episode for _, episode in ages[: bisect_left(ages, (version,))]]

    def length(self, model: str, pot: Pot) -> int:
        """How many episodes of `model` are ready in `pot`."""
        return len(self._queues.get((model, pot), ()))

    def groups(self, model: str, demand: Demand) -> Counter[str]:
        """How many groups as `demand` wants them `model` has of each lane."""
        out, size = Counter[str](), demand.size
        for lane, pots in self._lanes.get(model, {}).items():
            for pot in pots:
                whole, left = divmod(self.length(model, pot), size)
                out[lane] += whole + (pot in demand.ended and left >= demand.least)
        return out

    def members(self, model: str, pot: Pot) -> list[str]:
        """The ready episodes of `model` in `pot`, the longest ready first."""
        return [episode for _, episode in self._queues.get((model, pot), ())]

    def choose(
        self, demand: Demand, model: str | None, fits: Callable[[Share], bool] = lambda share: True,
        teaches: Teaches = lambda model, members: True, *, out: Collection[Share] = frozenset(),
        fresh: Callable[[str], int] | None = None, order: Callable[[str], Order | None] = lambda model: None,
    ) -> tuple[str, Groups] | None:
        """A model and its first groups, as many as `demand` says, of episodes that are not `out` and that all fit; None
        if there are fewer. With several models (None: every model), it is the one whose last group comes first. `fresh`
        tells for a model the oldest version that still counts as fresh; without it, all are. `order` tells for a model
        in which order its lanes have their turns; None: whatever was complete first.

        `fits` is asked in the order of the groups of a lane, and for few that come after what is chosen. What it
        refuses is out as well, and groups are formed anew. Then `teaches` is asked of each group, and those that it
        refuses are left.
        """
        chosen: list[tuple[Rank, str, Groups]] = []
        for name in self._lengths:
            if model in (None, name) and self._enough(name, demand):
                since = 0 if fresh is None else fresh(name)
                look = _Look(self, name, demand, fits, teaches, {one for other, one in out if other == name}, since)
                found = look.groups(partial(order, name))
                if found:
                    chosen.append((found[-1][0], name, tuple(group for _, group in found)))
        if not chosen:
            return None
        _, name, groups = min(chosen)
        return name, groups

    def _enough(self, model: str, demand: Demand) -> bool:
        """Whether the queues of `model` may hold what is asked for."""
        whole = self._whole(model, demand.size) * (demand.size if demand.by_episode else 1)
        if whole >= demand.groups:
            return True
        left = [self.length(model, pot) % demand.size for pot in demand.ended]
        small = [number for number in left if number >= demand.least]
        return whole + (sum(small) if demand.by_episode else len(small)) >= demand.groups

    def _whole(self, model: str, size: int) -> int:
        """How many groups of `size` its queues hold."""
        return sum(number * (length // size) for length, number in self._lengths[model].items())

    def _grown(self, model: str, pot: Pot, before: int, now: int) -> None:
        """A queue of `model` has changed its length; a length of 0 is no queue."""
        lanes, lengths = self._lanes.setdefault(model, {}), self._lengths.setdefault(model, Counter())
        if not before:
            lanes.setdefault(pot.lane, {})[pot] = None
        for length, change in ((before, -1), (now, 1)):
            lengths[length] += change
            if not (length and lengths[length]):
                del lengths[length]
        if not now:
            del lanes[pot.lane][pot]
            if not lanes[pot.lane]:
                del lanes[pot.lane]
        if not lengths:
            del self._lengths[model], self._lanes[model]


class _Look:
    """One look through the queues of a model, for what a lease may take."""

    def __init__(
        self, queues: ReadyQueues, model: str, demand: Demand, fits: Callable[[Share], bool], teaches: Teaches,
        out: set[str], since: int,
    ) -> None:
        """`out` are episodes that no group may have, and what is older than `since` comes last."""
        self._queues, self._oldest, self._lanes = queues._queues, queues._oldest, queues._lanes[model]
        self._model, self._demand, self._fits, self._teaches = model, demand, fits, teaches
        self._out, self._since = out, since
        self._late = queues._ages[model][0][0] < since
        self._refused: set[str] = set()

    def groups(self, order: Callable[[], Order | None]) -> list[Ranked]:
        """The groups that are taken; none if there are too few."""
        while True:
            turns = order()
            found = self._in_turns(turns) if turns is not None else self._first()
            if not self._refused:
                return found
            self._out |= self._refused
            self._refused = set()

    def _first(self) -> list[Ranked]:
        """Those that were complete first, of all lanes."""
        found, counted = list[Ranked](), 0
        for one in self._stream(chain.from_iterable(self._lanes.values())):
            found.append(one)
            counted += self._demand.counted(one[1][1])
            if counted >= self._demand.groups:
                return found
        return []

    def _in_turns(self, turns: Order) -> list[Ranked]:
        """Turn by turn, the first group of the lane whose turn it is."""
        streams: dict[str, Iterator[Ranked]] = {}
        heads: dict[str, Ranked | None] = {}
        found, counted = list[Ranked](), 0

        def has(lane: str) -> bool:
            if lane not in heads:
                stream = streams.setdefault(lane, self._stream(self._lanes.get(lane, ())))
                heads[lane] = next(stream, None)
            return heads[lane] is not None

        while counted < self._demand.groups:
            lane = turns.next(has)
            if lane is None or not has(lane) or (one := heads.pop(lane)) is None:
                return []
            turns.take(lane)
            found.append(one)
            counted += self._demand.counted(one[1][1])
        return found

    def _stream(self, pots: Iterable[Pot]) -> Iterator[Ranked]:
        """The groups of these pots that can be taken, first things first. What does not fit is `_refused` meanwhile, or
        is left out at once."""
        ranked = self._freshest_first(pots) if self._late else self._in_order(pots)
        return (one for one in ranked if self._teaches(self._model, one[1][1]))

    def _freshest_first(self, pots: Iterable[Pot]) -> Iterator[Ranked]:
        """Those with a version older than is fresh come last."""
        size, since, formed = self._demand.size, self._since, list[tuple[int, int, Pot, tuple[str, ...]]]()
        for pot in pots:
            queue, oldest = self._queues[self._model, pot], self._oldest[self._model, pot]
            if self._out:
                queue, oldest = _without(queue, oldest, self._out)
            for at in range(0, len(queue), size):
                part = queue[at : at + size]
                if self._makes_a_group(len(part), pot):
                    late = since - min(since, *oldest[at : at + size])
                    formed.append((late, part[-1][0], pot, tuple(episode for _, episode in part)))
        heapify(formed)
        while formed:
            late, number, pot, members = heappop(formed)
            refused = {episode for episode in members if not self._fits((self._model, episode))}
            self._refused |= refused
            if not refused:
                yield (late, number), (pot.task, members)

    def _in_order(self, pots: Iterable[Pot]) -> Iterator[Ranked]:
        """In the order in which they were complete. The queue whose next group can be complete soonest is looked at
        next, and only as far as that group lacks episodes."""
        size, ahead = self._demand.size, list[tuple[int, Pot, int, tuple[str, ...]]]()

        def look_later(pot: Pot, at: int, members: tuple[str, ...]) -> None:
            queue = self._queues[self._model, pot]
            if (end := at + size - len(members)) <= len(queue):
                heappush(ahead, (queue[end - 1][0], pot, at, members))
            elif at < len(queue) and self._makes_a_group(len(members) + len(queue) - at, pot):
                heappush(ahead, (queue[-1][0], pot, at, members))

        for pot in pots:
            look_later(pot, 0, ())
        while ahead:
            number, pot, at, members = heappop(ahead)
            queue, end = self._queues[self._model, pot], at + size - len(members)
            shares = ((self._model, episode) for _, episode in queue[at:end])
            members += tuple(share[1] for share in shares if share[1] not in self._out and self._fits(share))
            if len(members) == size or (end >= len(queue) and self._makes_a_group(len(members), pot)):
                yield (0, number), (pot.task, members)
                members = ()
            look_later(pot, end, members)

    def _makes_a_group(self, members: int, pot: Pot) -> bool:
        """Whether so many episodes are a group: as many as were asked for, or what is left of a pot that ended."""
        return members == self._demand.size or (pot in self._demand.ended and members >= self._demand.least)


def _without(
    queue: list[tuple[int, str]], oldest: list[int], gone: Collection[str]
) -> tuple[list[tuple[int, str]], list[int]]:
    """A queue and its oldest versions, without the episodes that are `gone`."""
    left = [at for at, (_, episode) in enumerate(queue) if episode not in gone]
    return [queue[at] for at in left], [oldest[at] for at in left]
