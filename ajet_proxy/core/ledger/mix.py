"""The mix: which lane's group is leased next, so that lanes keep their shares at every moment.

Idea: turns are dealt to lanes by their shares, one group a turn, whether they have groups or not. This is the chairman
assignment problem, with its optimal solution. Of the lanes that are far enough behind, the one comes that can wait
least (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). After every turn, each lane's
turns differ from its share of all turns by at most 1 - 1/(2k - 2), with k lanes. That is less than one group.

A lane that has nothing, for longer than is waited for it, lends its turn to the lane that is furthest behind. It has
the turn back as soon as it has a group, before others that have borrowed. It lends at most one batch. A lane whose
groups are all discarded has nothing either, however many episodes of it become ready. Each model sees a lane by its own
episodes.

Invariant: what lanes owe adds up to 0. Without loans, each lane has had its turns and no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from msgspec import Struct

LANE_WAIT_S = 30.0


class Mix(Struct, frozen=True):
    """``shares`` are those of the lanes; none: any lane, the groups that were complete first. A lane with all of the
    share may have ``ahead`` groups open or ready, each of ``group_size`` episodes; None is any number. A lane with
    nothing for ``lane_wait_s`` seconds lends its turns."""

    shares: Mapping[str, float] = {}
    ahead: int | None = None
    group_size: int | None = None
    lane_wait_s: float = LANE_WAIT_S

    def room(self, lane: str, group_size: int) -> int | None:
        """The number of episodes of `lane` that may be open or ready; None: any number. `group_size` is the proxy's
        own."""
        if self.ahead is None:
            return None
        share = self.shares.get(lane, 0.0) if self.shares else 1.0
        groups = math.ceil(self.ahead * share - 1e-9)
        more = groups > 0 and sum(map(bool, self.shares.values())) > 2  # than its share may a batch deal it
        return (groups + more) * (self.group_size or group_size)


def weights(shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in the proportion of the shares, as the decimal numbers that they are written as; by name."""
    exact = {lane: Fraction(str(share)) for lane, share in sorted(shares.items()) if share > 0}
    scale = math.lcm(*(share.denominator for share in exact.values()))
    return {lane: int(share * scale) for lane, share in exact.items()}


@dataclass(slots=True)
class QueueCredit:
    """The outcome of the turns since the shares were set, for one model. Each lane was ``dealt`` so many, and so many
    groups of it were ``leased``. It is ``owed`` the turns that it has lent; below 0, it has borrowed them. ``ready_at``
    is when an episode of it was last ready anew, and ``discarded`` when a ready one was first and last discarded since
    any of it was leased; in Unix seconds."""

    dealt: dict[str, int] = field(default_factory=dict)
    owed: dict[str, int] = field(default_factory=dict)
    leased: dict[str, int] = field(default_factory=dict)
    ready_at: dict[str, float] = field(default_factory=dict)
    discarded: dict[str, tuple[float, float]] = field(default_factory=dict)

    def copy(self) -> QueueCredit:
        """The turns, to go on from."""
        return QueueCredit(dict(self.dealt), dict(self.owed), dict(self.leased))

    def since(self, lane: str, least: float) -> tuple[float, float]:
        """Since when nothing of `lane` became ready, and since when what did is discarded; not before `least`."""
        first, _ = self.discarded.get(lane, (math.inf, math.inf))
        return max(least, self.ready_at.get(lane, least)), max(least, first)

    def lends(self, lane: str, least: float, wait_s: float, at: float) -> bool:
        """Tell whether a lane that has no group at `at` is waited for no longer: it had nothing for `wait_s`, or only
        what was discarded. One discard among much that becomes ready says nothing."""
        quiet, first = self.since(lane, least)
        _, last = self.discarded.get(lane, (math.inf, math.inf))
        return at - quiet >= wait_s or at - first >= wait_s > at - last

    def discards(self, lane: str, at: float) -> None:
        """A ready episode of `lane` is discarded."""
        first, _ = self.discarded.get(lane, (at, at))
        self.discarded[lane] = first, at

    def restart(self) -> None:
        """Nobody could play for a while."""
        self.ready_at, self.discarded = {}, {}


class Turns:
    """The turns of one lease. They go on from a `credit`, which they change. `most` is how many turns a lane may
    have lent at once, and `lends` tells whether a lane that has no group is waited for no longer."""

    def __init__(
        self, shares: Mapping[str, float], credit: QueueCredit, most: int,
        lends: Callable[[str], bool] = lambda lane: False,
    ) -> None:
        self._weights, self._credit, self._most, self._lends = weights(shares), credit, most, lends
        self._whole = sum(self._weights.values())
        self._due = self._deal()

    def next(self, has: Callable[[str], bool]) -> str | None:
        """The lane whose group is taken next. `has` tells which lanes have a group. None if a lane is waited for, or if
        none has one."""
        lane, owed = self._due, self._credit.owed
        if owed.get(lane, 0) < 0:
            lenders = [other for other, number in owed.items() if number > 0 and has(other)]
            if lenders:
                return min(lenders, key=lambda other: (-owed[other], other))
        if has(lane):
            return lane
        if not self._lends(lane):
            return None
        others = [other for other in self._weights if other != lane and has(other)]
        return min(others, key=self._urgency) if others else None

    def take(self, lane: str) -> None:
        """The turn goes to a group of `lane`."""
        due, credit = self._due, self._credit
        credit.dealt[due] = credit.dealt.get(due, 0) + 1
        credit.leased[lane] = credit.leased.get(lane, 0) + 1
        if lane != due and credit.owed.get(due, 0) < self._most:
            for one, change in ((due, 1), (lane, -1)):
                credit.owed[one] = credit.owed.get(one, 0) + change
                if not credit.owed[one]:
                    del credit.owed[one]
        self._due = self._deal()

    def lacks(self) -> Collection[str]:
        """The lanes whose group would be taken next, if they had one."""
        return self._weights if self._lends(self._due) else (self._due,)

    def _deal(self) -> str:
        """The lane that is dealt the next turn."""
        dealt, slack = self._credit.dealt, 2 * len(self._weights) - 2
        if not slack:
            return next(iter(self._weights))
        number = sum(dealt.values()) + 1
        best, best_lane = (1, 0), ""
        for lane, weight in self._weights.items():
            behind = (weight * number - dealt.get(lane, 0) * self._whole) * slack
            if behind >= self._whole:
                soon, scale = (slack - 1) * self._whole - behind, weight * slack
                if soon * best[1] < best[0] * scale:
                    best, best_lane = (soon, scale), lane
        return best_lane

    def _urgency(self, lane: str) -> tuple[Fraction, str]:
        """The number of turns that a lane can still wait for its next group, by the groups that it has had."""
        had = self._credit.dealt.get(lane, 0) - self._credit.owed.get(lane, 0)
        return Fraction((had + 1) * self._whole, self._weights[lane]), lane
