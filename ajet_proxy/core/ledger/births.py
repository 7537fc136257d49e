"""Which weights sampled a token, where one number may have stood for several.

Idea: a version is made again after a crash, and another run of the model begins at version 0. So the number alone does
not count. The versions of a model lie on *branches*. A branch belongs to a run, and goes on from one version of an
earlier branch of that run. A trainer that starts again begins a branch, and so does a version below the highest one:
what came behind it is lost. A version on a branch is one birth of its number. A call keeps between which branches it
was sampled.

How far a lost birth is from now is counted by way of the version from which both go on: back to there, and on from
there. So it is never 0. A token of a lost birth is told as the version of the latest branch that is as far away, which
may be below 0. Whatever compares versions is right by that.

Invariant: branches stand in the order in which they began to serve, and only the last one grows. So what sampled a
call, and how old that was for a lease, is told the same for ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from ajet_proxy.core.ledger.transcript import CallEntry
from ajet_proxy.core.trajectory.timeline import Timeline, Turn


@dataclass(slots=True)
class Branch:
    """Versions of one run; None: of none, while one has begun and announced nothing yet. It serves from the event that
    was number `since` of those that may change a version. It goes on from version `point` of the branch `parent`.
    ``top`` is its highest version."""

    run: str | None = ""
    since: int = 0
    parent: int | None = None
    point: int = 0
    top: int = 0


@dataclass(slots=True)
class Births:
    """The versions of one model. ``run`` has it now; it is "" as long as none has said its name. With `anew`, what is
    announced next begins a branch."""

    run: str = ""
    branches: list[Branch] = field(default_factory=lambda: [Branch()])
    anew: bool = False

    @property
    def last(self) -> int:
        return len(self.branches) - 1

    @property
    def announced(self) -> bool:
        """Tell whether the run that has the model has said which version serves."""
        return self.branches[-1].run == self.run

    def begin(self, run: str, since: int) -> None:
        """`run` has the model from now on, or its trainer has started again. What was sampled before any run belongs to
        the first one."""
        if not self.run:
            for branch in self.branches:
                branch.run = run
        elif run != self.run and self.branches[-1].run is not None:
            self.branches.append(Branch(None, since))
        self.run, self.anew = run, True

    def continues(self, version: int) -> bool:
        """Tell whether `version` is on the last branch, or goes on from its end."""
        return self.announced and not self.anew and version >= self.branches[-1].top

    def serves(self, version: int, since: int) -> bool:
        """`version` serves from now on. Returns whether that begins a branch."""
        if self.continues(version):
            self.branches[-1].top = version
            return False
        parent = next((at for at in range(self.last, -1, -1) if self.branches[at].run == self.run), None)
        point = 0 if parent is None else min(version, self.branches[parent].top)
        self.branches.append(Branch(self.run, since, parent, point, version))
        self.anew = False
        return True

    def sampled(self, turn: Turn, asked: int, *, shut: bool) -> tuple[tuple[int, int], bool]:
        """Between which branches a call was sampled that ends now, and whether it is ahead. It was asked when so many
        events had been that may change a version. Its gate is `shut` now, or not. An engine that was frozen goes on
        before its gate opens, and may tell a version before it is announced."""
        first = max(0, bisect_right(self.branches, asked, key=lambda branch: branch.since) - 1)
        ahead = "cache_salt" in turn.altered and (shut or first < self.last)
        if first == self.last and turn.policy_versions:
            seen = max(version for version, _ in turn.policy_versions) + ahead
            self.branches[-1].top = max(self.branches[-1].top, seen)
        return (first, self.last), ahead

    def own(self, calls: Iterable[CallEntry]) -> bool:
        """Tell whether the run that has the model sampled all of these."""
        spans = {call.branches for call in calls}
        return all(self.branches[at].run == self.run for first, last in spans for at in range(first, last + 1))

    def oldest(self, calls: Iterable[CallEntry]) -> int:
        """The oldest version that sampled any of these, as it is told now; there must be one."""
        told = _Told(self.branches, self.last)
        return min(
            told.version(call, version) for call in calls if call.turn is not None
            for version, _ in call.turn.policy_versions
        )

    def told(self, timelines: Iterable[Timeline], calls: Mapping[str, CallEntry], branch: int) -> tuple[Timeline, ...]:
        """`timelines` with their versions as they are told to who is on `branch`. `calls` are those of this model."""
        told = _Told(self.branches, branch)
        return tuple(
            Timeline(one.tokens, tuple(told.turn(turn, calls.get(turn.call)) for turn in one.turns), one.broken_by)
            for one in timelines
        )


class _Told:
    """The numbers of versions, as they are told to a run on the branch `tip`."""

    def __init__(self, branches: list[Branch], tip: int) -> None:
        way, at, most = dict[int, int | None](), tip, None
        while at is not None:
            way[at] = most
            most = branches[at].point if most is None else min(most, branches[at].point)
            at = branches[at].parent  # type: ignore[assignment]
        self._shared: list[int | None] = []
        """For each branch, up to which of its versions the tip goes on from it; None: all of them. For one beside the
        tip's way it is the version from which both go on."""
        for number, branch in enumerate(branches):
            above = None if branch.parent is None else self._shared[branch.parent]
            beside = branch.point if above is None else min(branch.point, above)
            self._shared.append(way.get(number, beside))

    def version(self, call: CallEntry, version: int) -> int:
        """The version of a token of `call`, the oldest that it may be."""
        first, last = call.branches
        further = (version, version + 1) if call.ahead else (version,)
        return min(self._of(at, one) for at in range(first, last + 1) for one in further)

    def turn(self, turn: Turn, call: CallEntry | None) -> Turn:
        if call is None:
            return turn
        told = tuple((self.version(call, version), count) for version, count in turn.policy_versions)
        return turn if told == turn.policy_versions else replace(turn, policy_versions=told)

    def _of(self, branch: int, version: int) -> int:
        shared = self._shared[branch]
        return version if shared is None or version <= shared else 2 * shared - version
