"""What agents still play, and what of it is ready, by the pots that groups are made from.

Idea: episodes of one task form a group if they are of one lane and were played with one revision of the code. These
three are a pot. A pot is quiet while none of its episodes is open or sealed. A lease may wait for it for some time
after an episode was last opened in it. If it is quiet then, it has ended: nobody will bring another member.

`Pots` knows which have ended. `Load` knows how many episodes are open or ready in each lane, of the models that have
one mix in common. Where each model has its own, what one of them leaves lying counts for no other.

Invariant: a pot is kept exactly while it has episodes that are open, sealed or ready. So one that is not kept is quiet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ajet_proxy.core.ledger.episode import Episode
from ajet_sdk.routes import lane_of


class Pot(NamedTuple):
    """What groups are made from: ``revision`` is empty where no client names one."""

    lane: str
    task: str
    revision: str

    @classmethod
    def of(cls, episode: Episode) -> Pot:
        """The pot of an episode, whose task may still be unknown."""
        return cls(episode.lane, episode.named_task, episode.revision or "")

    @classmethod
    def of_task(cls, task: str) -> Pot:
        """The pot of a task that is played without a client."""
        return cls(lane_of(task), task, "")


@dataclass(slots=True)
class Gathering:
    """A pot with ``open`` episodes that are open or sealed, and ``ready`` shares. ``last`` is when an episode was last
    opened in it, in Unix seconds. If it is ``flushed``, nothing more is waited for."""

    open: int = 0
    ready: int = 0
    last: float = 0.0
    flushed: bool = False


@dataclass(slots=True)
class Pots:
    """The pots by their names."""

    gatherings: dict[Pot, Gathering] = field(default_factory=dict)
    _quiet: list[tuple[float, Pot]] = field(default_factory=list, init=False)
    """Those with something ready and nothing open, by the time at which an episode was last opened in them."""
    _flushed: set[Pot] = field(default_factory=set, init=False)

    def opened(self, pot: Pot, at: float) -> None:
        """An episode was opened, and is no evaluation; or one turns out to be of this pot."""
        gathering = self._leave(pot)
        gathering.open += 1
        gathering.last = max(gathering.last, at)
        self._enter(pot, gathering)

    def settled(self, pot: Pot) -> None:
        """An episode is no longer open or sealed, or is of another pot, or will not be trained."""
        gathering = self._leave(pot)
        gathering.open -= 1
        self._enter(pot, gathering)

    def came(self, pot: Pot) -> None:
        """A share is ready."""
        gathering = self._leave(pot)
        gathering.ready += 1
        self._enter(pot, gathering)

    def went(self, pot: Pot) -> None:
        """A share is ready no more. What is flushed ends with the last of them."""
        gathering = self._leave(pot)
        gathering.ready -= 1
        if gathering.flushed and not gathering.ready:
            gathering.flushed = False
            self._flushed.discard(pot)
        self._enter(pot, gathering)

    def flush(self, lane: str | None, task: str | None) -> None:
        """What is ready now of these pots (None: of all) is waited for no longer."""
        for pot in self.unended(lane, task):
            self.gatherings[pot].flushed = True
            self._flushed.add(pot)

    def unended(self, lane: str | None, task: str | None) -> list[Pot]:
        """Which of these pots (None: all) have something ready and are not flushed."""
        return [
            pot for pot, one in self.gatherings.items()
            if lane in (None, pot.lane) and task in (None, pot.task) and one.ready and not one.flushed
        ]

    def ended(self, before: float) -> set[Pot]:
        """The pots that are quiet and had no episode opened after `before`, and those that are flushed."""
        quiet = self._quiet[: bisect_right(self._quiet, before, key=lambda item: item[0])]
        return {pot for _, pot in quiet} | self._flushed

    def next_end(self, after: float) -> float | None:
        """The first time after `after` at which an episode was opened last in a pot that is quiet."""
        at = bisect_right(self._quiet, after, key=lambda item: item[0])
        return self._quiet[at][0] if at < len(self._quiet) else None

    def restart(self, at: float) -> None:
        """Nobody could open an episode during the stop, which ends now."""
        for gathering in self.gatherings.values():
            gathering.last = at
        self.arrange()

    def arrange(self) -> None:
        """Rebuild what follows from the gatherings."""
        self._flushed = {pot for pot, gathering in self.gatherings.items() if gathering.flushed}
        self._quiet = sorted((one.last, pot) for pot, one in self.gatherings.items() if one.ready and not one.open)

    def _leave(self, pot: Pot) -> Gathering:
        """The gathering of `pot`, which is about to change."""
        gathering = self.gatherings.setdefault(pot, Gathering())
        if gathering.ready and not gathering.open:
            del self._quiet[bisect_left(self._quiet, (gathering.last, pot))]
        return gathering

    def _enter(self, pot: Pot, gathering: Gathering) -> None:
        """It has changed."""
        if gathering.ready and not gathering.open:
            insort(self._quiet, (gathering.last, pot))
        elif not gathering.ready and not gathering.open:
            del self.gatherings[pot]


@dataclass(slots=True)
class Load:
    """What is open and ready of the models that have one mix, by lane and by pot, with groups of ``size``. In each
    lane so many episodes are ``playing`` (open or sealed), and so many are ``waiting`` with a ready share. Lanes
    without any are left out."""

    size: int = 1
    vain: Counter[str] = field(default_factory=Counter)
    """Of some lanes, how many episodes are not counted, because a trainer has waited for them in vain."""
    playing: Counter[str] = field(default_factory=Counter, init=False)
    waiting: Counter[str] = field(default_factory=Counter, init=False)
    _open: Counter[Pot] = field(default_factory=Counter, init=False)
    _waiting: Counter[Pot] = field(default_factory=Counter, init=False)
    _shares: Counter[str] = field(default_factory=Counter, init=False)
    """How many shares of an episode are ready, if any are."""
    _loose: Counter[str] = field(default_factory=Counter, init=False)
    """Of each lane, the ready episodes that no whole group has and that nobody is adding to."""

    def plays(self, pot: Pot, change: int) -> None:
        """So many episodes more are open or sealed."""
        self._change(pot, self._open, self.playing, change)

    def came(self, pot: Pot, episode: str) -> None:
        """A share of `episode` is ready."""
        _count(self._shares, episode, 1)
        if self._shares[episode] == 1:
            self._change(pot, self._waiting, self.waiting, 1)

    def went(self, pot: Pot, episode: str) -> None:
        """A share of `episode` is ready no more."""
        _count(self._shares, episode, -1)
        if not self._shares[episode]:
            self._change(pot, self._waiting, self.waiting, -1)

    def of(self, lane: str) -> int:
        """How many episodes of a lane are open, or ready for a group that is whole or may still become so. What is left
        of a task does not count: where it did, nobody could bring what it lacks."""
        return max(0, self.playing[lane] + self.waiting[lane] - self._loose[lane] - self.vain[lane])

    def wait_in_vain(self, lanes: Iterable[str]) -> None:
        """What there is now of these lanes is not enough for a trainer, and nobody brings more."""
        for lane in lanes:
            self.vain[lane] += self.of(lane)

    def lacking(self, pot: Pot) -> int:
        """How many episodes the group lacks that was begun in a pot; 0 if none is."""
        return -(self._open[pot] + self._waiting[pot]) % self.size

    def arrange(self, size: int) -> None:
        """Count by groups of `size`."""
        self.size, self._loose = size, Counter()
        for pot in self._waiting:
            _count(self._loose, pot.lane, self._left(pot))

    def _change(self, pot: Pot, pots: Counter[Pot], lanes: Counter[str], change: int) -> None:
        _count(self._loose, pot.lane, -self._left(pot))
        _count(pots, pot, change)
        _count(lanes, pot.lane, change)
        _count(self._loose, pot.lane, self._left(pot))

    def _left(self, pot: Pot) -> int:
        """How many ready episodes of a pot no whole group has, if nobody is adding to them."""
        return 0 if self._open[pot] else self._waiting[pot] % self.size


def _count(counter: Counter[Any], name: Any, change: int) -> None:
    counter[name] += change
    if not counter[name]:
        del counter[name]
