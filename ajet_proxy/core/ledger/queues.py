"""The queues of all models, and the leases that take from them.

Invariant: an episode has a seat for each model that it may train, exactly while it is open, sealed or ready. A model
has a queue exactly while an episode has a seat for it, or may come back to one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ajet_proxy.core.ledger.groups import OPEN, Seat, Share
from ajet_proxy.core.ledger.model_queue import ModelQueue
from ajet_proxy.core.ledger.progress import GroupKey

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


@dataclass(slots=True)
class ReadyQueues:
    """For each model its queue. ``group_size`` is that of models without one of their own, which ``sizes`` has."""

    KEPT: ClassVar = ("group_size", "sizes", "table")
    group_size: int
    sizes: dict[str, int] = field(default_factory=dict)
    table: dict[str, ModelQueue] = field(default_factory=dict)

    def derive(self) -> None:
        """Rebuild whatever follows from what a snapshot has, where a group key is a plain tuple."""
        for queue in self.table.values():
            for group in queue.groups.values():
                group.group_key = GroupKey(*group.group_key)
        self.arrange(self.group_size, self.sizes)

    def of(self, model: str) -> ModelQueue:
        """The queue of `model`; an empty one that is kept nowhere, if nothing has a seat for it."""
        return self.table.get(model) or ModelQueue(self.sizes.get(model, self.group_size))

    def sit(
        self, model: str, group_key: GroupKey, episode: str, order: int, stood: float = 0.0, state: str = OPEN
    ) -> None:
        """`episode`, which was opened as number `order`, takes a seat for `model`."""
        self.table.setdefault(model, self.of(model)).sit(group_key, episode, Seat(-1, order, stood), state)

    def forget(self, model: str, episode: str) -> None:
        """`episode` never comes back."""
        seats = self.of(model).seats
        if seats.pop(episode, None) is not None and not seats:
            del self.table[model]

    def arrange(self, group_size: int, sizes: Mapping[str, int]) -> None:
        """Groups have these sizes from now on; and rebuild whatever follows from the groups."""
        self.group_size, self.sizes = group_size, dict(sizes)
        for model, queue in self.table.items():
            queue.arrange(self.sizes.get(model, group_size))

    @property
    def complete(self) -> int:
        """The number of whole groups."""
        return sum(queue.complete for queue in self.table.values())

    @property
    def waiting(self) -> int:
        """The number of group keys with ready episodes and no whole group."""
        return sum(queue.waiting for queue in self.table.values())

    def models(self) -> Sequence[str]:
        """The models with ready episodes."""
        return tuple(model for model, queue in self.table.items() if queue.ages)

    def ready(self) -> Iterator[Share]:
        """Every ready share, those of one model as they were ready."""
        for model, queue in self.table.items():
            for episode in sorted((one for _, one in queue.ages), key=lambda one: queue.seats[one].number):
                yield model, episode

    def needed(self) -> Collection[str]:
        """The episodes with which others may be compared."""
        groups = (group for queue in self.table.values() for group in queue.groups.values())
        return {one for group in groups for one in group.earlier}
