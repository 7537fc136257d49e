"""Ready episodes in the order of their readiness, complete groups of them, and the leases they are under.

Idea: a group is `size` ready episodes of one task and model, the oldest first. It is complete from the moment the last
of them became ready, and complete groups are leased in the order of those moments. An episode that comes back from a
lease takes its old place again, so groups form as they did before.

Invariant: an episode's share of a model stands in its queue exactly while it is ready, in the order of its number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

GroupKey = tuple[str, str]
"""Model and task."""
Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""Task and episode ids of each group."""


@dataclass(slots=True)
class LeasedBatch:
    """A batch of one model, and what became of it: ``state`` is leased, trained or returned. ``number`` counts leases;
    ``given`` tells how many rewards each episode had when it was leased, because a later lease may deliver more."""

    id: str
    model: str
    lease_until: float
    policy_version: int
    groups: Groups
    number: int = 0
    given: dict[str, int] = field(default_factory=dict)
    state: str = "leased"

    def episodes(self) -> Iterator[str]:
        for _, episodes in self.groups:
            yield from episodes


@dataclass(slots=True)
class ReadyQueues:
    """For each model and task its ready episodes, the longest ready first.

    ``complete`` counts whole groups of ``group_size``, and ``waiting`` the tasks with ready episodes and no such group.
    """

    group_size: int
    complete: int = 0
    waiting: int = 0
    _next: int = 0
    _number: dict[tuple[str, str], int] = field(default_factory=dict)
    _queues: dict[GroupKey, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, model: str, task: str, episode: str) -> None:
        """`episode` is ready, for the first time or again."""
        number = self._number.setdefault((model, episode), self._next)
        self._next = max(self._next, number + 1)
        queue = self._queues.setdefault((model, task), [])
        self._count(queue, -1)
        insort(queue, (number, episode))
        self._count(queue, 1)

    def remove(self, model: str, task: str, episode: str) -> None:
        """`episode` is leased, trained or discarded."""
        queue = self._queues[model, task]
        self._count(queue, -1)
        del queue[bisect_left(queue, (self._number[model, episode], episode))]
        self._count(queue, 1)
        if not queue:
            del self._queues[model, task]

    def regroup(self, group_size: int) -> None:
        """Count by another size of groups."""
        self.group_size, self.complete, self.waiting = group_size, 0, 0
        for queue in self._queues.values():
            self._count(queue, 1)

    def forget(self, model: str, episode: str) -> None:
        """`episode` never comes back."""
        self._number.pop((model, episode), None)

    def ready(self, model: str | None) -> Iterator[tuple[str, str]]:
        """``(model, episode)`` of every ready episode of `model` (None: of every model)."""
        for (name, _), queue in self._queues.items():
            if model in (None, name):
                yield from ((name, episode) for _, episode in queue)

    def choose(
        self, groups: int, size: int, model: str | None, usable: Callable[[str, str], bool]
    ) -> tuple[str, Groups] | None:
        """A model and the `groups` groups of `size` usable episodes that became complete first; None if there are
        fewer. With several models (None: every model) it is the one that had its groups together first."""
        found: dict[str, list[tuple[int, str, tuple[str, ...]]]] = {}
        for (name, task), queue in self._queues.items():
            if model not in (None, name) or len(queue) < size:
                continue
            rest = [item for item in queue if usable(name, item[1])]
            for start in range(0, len(rest) - size + 1, size)[:groups]:
                members = rest[start : start + size]
                episodes = tuple(episode for _, episode in members)
                found.setdefault(name, []).append((members[-1][0], task, episodes))
        whole = [(sorted(some)[:groups], name) for name, some in found.items() if len(some) >= groups]
        if not whole:
            return None
        chosen, name = min(whole, key=lambda item: (item[0][-1][0], item[1]))
        return name, tuple((task, episodes) for _, task, episodes in chosen)

    def _count(self, queue: list[tuple[int, str]], sign: int) -> None:
        whole = len(queue) // self.group_size
        self.complete += sign * whole
        self.waiting += sign * (bool(queue) and not whole)
