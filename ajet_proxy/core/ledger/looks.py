"""One look through the groups of a model, for what a lease may take.

Idea: whole groups are leased in the order of the moments in which the last of their members became ready. Where lanes
have shares, each turn takes the first group of the lane whose turn it is.

Where a trainer takes nothing beyond a certain age, and agents play faster than it trains, this order alone would have
every group trained at its last moment. So groups with a token of an older version than is `fresh` come after all
others, and the freshest of them first.

Invariant: a look that finds too few groups goes through none. One that finds them costs what it takes, and what is in
its way: group keys with something that is left, or out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from heapq import merge

from ajet_proxy.core.ledger.groups import Share
from ajet_proxy.core.ledger.mix import Turns
from ajet_proxy.core.ledger.model_queue import Demand, Formed, ModelQueue
from ajet_proxy.core.ledger.queues import Groups, ReadyQueues

Rank = tuple[int, int]
"""By which groups are taken: how many versions its oldest token is older than what is fresh, and when the last of its
episodes was ready."""
Ranked = tuple[Rank, tuple[str, tuple[str, ...]]]
"""A group behind its rank."""
Apart = Mapping[str, list[Formed]]
"""By lane, groups that are made of what is left."""
Teaches = Callable[[str, tuple[str, ...]], bool]
"""Tells whether a model may have such a group of episodes."""


def choose(
    queues: ReadyQueues, demand: Demand, model: str | None, fits: Callable[[Share], bool] = lambda share: True,
    teaches: Teaches = lambda model, members: True, *, out: Collection[Share] = frozenset(),
    fresh: Callable[[str], int] | None = None, order: Callable[[str], Turns | None] = lambda model: None,
) -> tuple[str, Groups] | None:
    """A model and its first groups, as many as `demand` takes, of episodes that are not `out` and that all fit. None if
    there are fewer, or if the model cannot have all that is asked for. With several models (None: every model), it is
    the one whose last group comes first. `fresh` tells for a model the oldest version that still counts as fresh;
    without it, all are. `order` tells for a model in which order its lanes have their turns; None: whatever was
    complete first.

    `fits` is asked in the order of the groups of a lane, and for few that come after what is chosen. What it
    refuses is out as well, and groups are formed anew. Then `teaches` is asked of each group, and those that it
    refuses are left.
    """
    chosen: list[tuple[Rank, str, Groups]] = []
    for name in queues.models():
        if model in (None, name) and (queue := queues.of(name)).may_have(demand):
            since = 0 if fresh is None else fresh(name)
            look = Look(queue, name, demand, fits, teaches, {one for other, one in out if other == name}, since)
            found = look.groups(partial(order, name))
            if found:
                chosen.append((found[-1][0], name, tuple(group for _, group in found)))
    if not chosen:
        return None
    _, name, groups = min(chosen)
    return name, groups


def count(queue: ModelQueue, model: str, demand: Demand) -> Counter[str]:
    """Count the groups of each lane that `model` has, as `demand` wants them."""
    look = Look(queue, model, demand, lambda share: True, lambda *_: True, set(), 0)
    return Counter(one.group_key.lane for one in look.formed())


class Look:
    """One look through the groups of a model, for what a lease may take."""

    def __init__(
        self, queue: ModelQueue, model: str, demand: Demand, fits: Callable[[Share], bool], teaches: Teaches,
        out: set[str], since: int,
    ) -> None:
        """`out` are episodes that no group may have, and what is older than `since` comes last."""
        self._queue, self._model, self._demand, self._fits, self._teaches = queue, model, demand, fits, teaches
        self._out, self._since = out, since
        self._whole = queue.whole if demand.size == queue.size else {}
        self._late = bool(queue.older(since))
        self._refused: set[str] = set()
        self._touched: set[int] = set()

    def groups(self, order: Callable[[], Turns | None]) -> list[Ranked]:
        """The groups that are taken; none if there are too few."""
        while True:
            turns = order()
            found = self._in_turns(turns) if turns is not None else self._first()
            if not self._refused:
                return found
            self._out |= self._refused
            self._refused = set()

    def formed(self) -> Iterator[Formed]:
        """All groups that are whole, or are made of what is left."""
        apart = self._apart()
        for lane in self._lanes(apart):
            yield from self._of_lanes([lane], apart)

    def _first(self) -> list[Ranked]:
        """The groups that were complete first, of all lanes."""
        found, counted, apart = list[Ranked](), 0, self._apart()
        for one in self._stream(self._lanes(apart), apart):
            found.append(one)
            counted += self._demand.counted(one[1][1])
            if counted >= self._demand.taken:
                return found
        return []

    def _in_turns(self, turns: Turns) -> list[Ranked]:
        """Turn by turn, the first group of the lane whose turn it is."""
        streams: dict[str, Iterator[Ranked]] = {}
        heads: dict[str, Ranked | None] = {}
        found, counted, apart = list[Ranked](), 0, self._apart()

        def has(lane: str) -> bool:
            if lane not in heads:
                stream = streams.setdefault(lane, self._stream([lane], apart))
                heads[lane] = next(stream, None)
            return heads[lane] is not None

        while counted < self._demand.taken:
            lane = turns.next(has)
            if lane is None or not has(lane) or (one := heads.pop(lane)) is None:
                return []
            turns.take(lane)
            found.append(one)
            counted += self._demand.counted(one[1][1])
        return found

    def _stream(self, lanes: Collection[str], apart: Apart) -> Iterator[Ranked]:
        """The groups of these lanes that can be taken, first things first. What does not fit is `_refused` meanwhile.
        """
        formed = self._of_lanes(lanes, apart)
        if self._late:
            formed = iter(sorted(formed, key=self._rank))
        for one in formed:
            refused = {episode for episode in one.members if not self._fits((self._model, episode))}
            self._refused |= refused
            if not refused and self._teaches(self._model, one.members):
                yield self._rank(one), (one.group_key.task, one.members)

    def _rank(self, one: Formed) -> Rank:
        return self._since - min(self._since, one.oldest), one.number

    def _of_lanes(self, lanes: Collection[str], apart: Apart) -> Iterator[Formed]:
        """The groups of these lanes in the order in which they were complete."""
        whole = ((one for one in self._whole.get(lane, ()) if one.group not in self._touched) for lane in lanes)
        return merge(*whole, sorted(one for lane in lanes for one in apart.get(lane, ())))

    def _lanes(self, apart: Iterable[str]) -> list[str]:
        return list({**self._whole, **dict.fromkeys(apart)})

    def _apart(self) -> Apart:
        """By lane, what can be taken besides whole groups. Of those that have something that is out, what else they
        have is left."""
        found, apart = dict[str, list[Formed]](), self._queue.apart(self._demand, self._out)
        self._touched = {number for groups in apart.values() for number in groups}
        for key, touched in apart.items():
            found.setdefault(key.lane, []).extend(self._queue.parts(key, self._demand, self._out, touched)[0])
        return found
