"""Ready episodes in the order of their readiness, complete groups of them, and the leases they are under.

Idea: a group is `size` ready episodes of one task and model, the oldest first. It is complete from the moment the last
of them became ready, and complete groups are leased in the order of those moments. An episode that comes back from a
lease takes its old place again, so groups form as they did before.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice

GroupKey = tuple[str, str]
"""Model and task."""
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

    def episodes(self) -> Iterator[str]:
        for _, episodes in self.groups:
            yield from episodes


@dataclass(slots=True)
class ReadyQueues:
    """For each model and task its ready episodes, the longest ready first. The number and the oldest version of a share
    outlive its leases."""

    group_size: int
    changes: int = 0
    """How often a share came or went."""
    _next: int = 0
    _places: dict[Share, tuple[int, int]] = field(default_factory=dict)
    _queues: dict[GroupKey, list[tuple[int, str]]] = field(default_factory=dict)
    _oldest: dict[GroupKey, list[int]] = field(default_factory=dict, init=False)
    """The oldest versions of the shares of each queue, in its order."""
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
        """The number of tasks with ready episodes and no whole group."""
        return sum(
            number for lengths in self._lengths.values() for length, number in lengths.items()
            if length < self.group_size
        )

    def add(self, model: str, task: str, episode: str, oldest: int) -> None:
        """`episode` is ready, for the first time or again; `oldest` is the lowest version in its share's tokens."""
        number, oldest = self._places.setdefault((model, episode), (self._next, oldest))
        self._next = max(self._next, number + 1)
        self.changes += 1
        queue = self._queues.setdefault((model, task), [])
        at = bisect_left(queue, (number, episode))
        queue.insert(at, (number, episode))
        self._oldest.setdefault((model, task), []).insert(at, oldest)
        self._grown(model, len(queue) - 1, len(queue))
        insort(self._ages.setdefault(model, []), (oldest, episode))

    def remove(self, model: str, task: str, episode: str) -> None:
        """`episode` is leased, trained or discarded."""
        self.changes += 1
        number, oldest = self._places[model, episode]
        queue, ages = self._queues[model, task], self._ages[model]
        at = bisect_left(queue, (number, episode))
        del queue[at], self._oldest[model, task][at]
        self._grown(model, len(queue) + 1, len(queue))
        del ages[bisect_left(ages, (oldest, episode))]
        if not queue:
            del self._queues[model, task], self._oldest[model, task]
        if not ages:
            del self._ages[model]

    def regroup(self, group_size: int) -> None:
        """Count by another size of groups, and rebuild whatever follows from the queues."""
        self.group_size, self._oldest, self._lengths, self._ages = group_size, {}, {}, {}
        for (model, task), queue in self._queues.items():
            self._grown(model, 0, len(queue))
            oldest = self._oldest[model, task] = [self._places[model, episode][1] for _, episode in queue]
            self._ages.setdefault(model, []).extend(zip(oldest, (episode for _, episode in queue), strict=True))
        for ages in self._ages.values():
            ages.sort()

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

    def older(self, model: str, version: int) -> Sequence[str]:
        """The ready episodes of `model` with a token of an older version than `version`."""
        ages = self._ages.get(model, [])
        return [episode for _, episode in ages[: bisect_left(ages, (version,))]]

    def choose(
        self, groups: int, size: int, model: str | None, fits: Callable[[Share], bool] = lambda share: True,
        teaches: Teaches = lambda model, members: True, *, out: Collection[Share] = frozenset(),
        fresh: Callable[[str], int] | None = None,
    ) -> tuple[str, Groups] | None:
        """A model and its first `groups` groups, each of `size` episodes that are not `out` and that all fit; None if
        there are fewer. With several models (None: every model), it is the one whose last group comes first. `fresh`
        tells for a model the oldest version that still counts as fresh; without it, all are.

        `fits` is asked in the order of the groups, and for none that comes after what is chosen. What it refuses is out
        as well, and groups are formed anew. Then `teaches` is asked of each group, and those that it refuses are left.
        """
        whole: list[tuple[Rank, str, Groups]] = []
        for name in self._lengths:
            if model in (None, name) and self._whole(name, size) >= groups:
                since = 0 if fresh is None else fresh(name)
                late = self._ages[name][0][0] < since
                good = partial(teaches, name)
                found = self._freshest_first(name, groups, size, fits, good, out, since) if late else list(
                    islice((one for one in self._in_order(name, size, fits, out) if good(one[1][1])), groups)
                )
                if len(found) == groups:
                    whole.append((found[-1][0], name, tuple(group for _, group in found)))
        if not whole:
            return None
        _, name, chosen = min(whole)
        return name, chosen

    def _freshest_first(
        self, model: str, groups: int, size: int, fits: Callable[[Share], bool],
        good: Callable[[tuple[str, ...]], bool], out: Collection[Share], since: int,
    ) -> list[Ranked]:
        """The first `groups` groups of `model`, or fewer. Those with a version older than `since` come last."""
        gone = {episode for name, episode in out if name == model}
        queues = {
            key[1]: (queue, self._oldest[key])
            for key, queue in self._queues.items() if len(queue) >= size and key[0] == model
        }  # fmt: skip
        if gone:
            queues = {task: _without(*queue, gone) for task, queue in queues.items()}
        while True:
            formed = [
                (since - min(since, *oldest[at : at + size]), queue[at + size - 1][0], task, at)
                for task, (queue, oldest) in queues.items() for at in range(0, len(queue) - size + 1, size)
            ]  # fmt: skip
            heapify(formed)
            found, misfits = list[Ranked](), dict[str, set[str]]()
            while formed and len(found) < groups:
                late, number, task, at = heappop(formed)
                members = tuple(episode for _, episode in queues[task][0][at : at + size])
                if refused := {episode for episode in members if not fits((model, episode))}:
                    misfits.setdefault(task, set()).update(refused)
                    continue
                if good(members):
                    found.append(((late, number), (task, members)))
            if not misfits:
                return found
            queues |= {task: _without(*queues[task], refused) for task, refused in misfits.items()}

    def _in_order(
        self, model: str, size: int, fits: Callable[[Share], bool], out: Collection[Share]
    ) -> Iterator[Ranked]:
        """The groups of `size` episodes of `model` that fit, in the order in which they were complete. The queue whose
        next group can be complete soonest is looked at next, and only as far as that group lacks episodes."""
        ahead: list[tuple[int, str, int, tuple[str, ...]]] = []

        def look_later(task: str, queue: Sequence[tuple[int, str]], at: int, members: tuple[str, ...]) -> None:
            if (end := at + size - len(members)) <= len(queue):
                heappush(ahead, (queue[end - 1][0], task, at, members))

        for (name, task), queue in self._queues.items():
            if name == model:
                look_later(task, queue, 0, ())
        while ahead:
            number, task, at, members = heappop(ahead)
            queue, end = self._queues[model, task], at + size - len(members)
            shares = ((model, episode) for _, episode in queue[at:end])
            members += tuple(share[1] for share in shares if share not in out and fits(share))
            if len(members) == size:
                yield (0, number), (task, members)
                members = ()
            look_later(task, queue, end, members)

    def _whole(self, model: str, size: int) -> int:
        """How many groups of `size` its queues hold."""
        return sum(number * (length // size) for length, number in self._lengths[model].items())

    def _grown(self, model: str, before: int, now: int) -> None:
        """A queue of `model` has changed its length; a length of 0 is no queue."""
        lengths = self._lengths.setdefault(model, Counter())
        for length, change in ((before, -1), (now, 1)):
            lengths[length] += change
            if not (length and lengths[length]):
                del lengths[length]
        if not lengths:
            del self._lengths[model]


def _without(
    queue: list[tuple[int, str]], oldest: list[int], gone: Collection[str]
) -> tuple[list[tuple[int, str]], list[int]]:
    """A queue and its oldest versions, without the episodes that are `gone`."""
    left = [at for at, (_, episode) in enumerate(queue) if episode not in gone]
    return [queue[at] for at in left], [oldest[at] for at in left]
