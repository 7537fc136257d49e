"""Groups by opening: which episodes are compared is settled as they open, and never by how soon they end.

Idea: an episode takes a seat as it opens. The seats of one group key and model are numbered, and `size` neighbors are a
group. So quick episodes are compared with slow ones, as chance has opened them. A group can be taken once all its seats
hold episodes that are ready. The seat of one that is discarded goes to the next that opens.

A group that loses members otherwise keeps their names (``earlier``): they were trained without the others, or a lease
has dropped them. What is left of it is compared with them too.

Invariant: whether an episode keeps its seat is decided without looking at what it has earned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ajet_proxy.core.ledger.progress import GroupKey

OPEN, LATE, READY = "open", "late", "ready"
"""The states of a member of a group: it is played, it is played and waited for no longer, or it can be leased."""
Share = tuple[str, str]
"""Model and episode."""


@dataclass(slots=True)
class Seat:
    """The seat of a share, which outlives its leases. ``order`` is when its episode was opened: after how many others.
    ``number`` is when it was first ready, and ``oldest`` the lowest policy version in its tokens. ``stood`` is how long
    the gate of its model had been shut when it sat down, in seconds."""

    group: int
    order: int
    stood: float = 0.0
    number: int = -1
    oldest: int = 0


@dataclass(slots=True)
class Group:
    """``members`` have seats in it; it has ``size`` of them. ``slowest`` is for how many seconds the slowest of
    those that were ready had been open."""

    group_key: GroupKey
    number: int
    size: int
    members: dict[str, str] = field(default_factory=dict)
    earlier: list[str] = field(default_factory=list)
    slowest: float = 0.0
    open: int = 0
    late: int = 0
    ready: int = 0

    @property
    def free(self) -> int:
        """The number of seats that it has left. Those stay taken that others have had with whom the rest is
        compared."""
        return self.size - len(self.members) - len(self.earlier)

    @property
    def whole(self) -> bool:
        return self.ready >= self.size

    @property
    def is_cut(self) -> bool:
        """Tell whether nobody is waited for, though not all of its members are ready now."""
        return not self.open and 0 < self.ready < self.size and bool(self.late or self.earlier)

    def put(self, episode: str, state: str | None) -> None:
        """`episode` is a member in that state, or none any more."""
        for one, change in ((self.members.pop(episode, None), -1), (state, 1)):
            if one is not None:
                setattr(self, one, getattr(self, one) + change)
        if state is not None:
            self.members[episode] = state

    def lose(self, episode: str) -> None:
        """A ready member goes, with which the others are still compared."""
        self.put(episode, None)
        self.earlier = [*self.earlier, episode][-self.size :]


def in_order(group: Group, seats: Mapping[str, Seat]) -> list[str]:
    """The members of a group as they were opened, by the `seats` of its model."""
    return sorted(group.members, key=lambda episode: seats[episode].order)


def dealt(groups: Sequence[Group], size: int, seats: Mapping[str, Seat], first: int) -> Iterator[Group]:
    """The same members in groups of another `size`, numbered from `first`. A free seat stays between those that it is
    between."""
    line = list[tuple[str | None, Group]]()
    for group in groups:
        line += ((episode, group) for episode in in_order(group, seats))
        line += [(None, group)] * (group.free if group is not groups[-1] else 0)
    for at in range(0, len(line), size):
        part = line[at : at + size]
        whence = {id(group): group for _, group in part}.values()
        made = Group(
            groups[0].group_key, first + at // size, size, earlier=[one for group in whence for one in group.earlier],
            slowest=max(group.slowest for group in whence),
        )
        for episode, group in part:
            if episode is not None:
                made.put(episode, group.members[episode])
        yield made
