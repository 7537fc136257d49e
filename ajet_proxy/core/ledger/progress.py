"""Episodes that agents still play, and those that are ready, by the group keys that groups are made from.

Idea: episodes of one task form a group if they are of one lane and were played with one revision of the code. These
three are a group key. A group key is quiet while none of its episodes is open or sealed. A lease may wait for it for
some time after an episode was last opened in it. If it is quiet then, it has ended: nobody will bring another member.

`Progress` knows which have ended. `OpenCounts` knows how many episodes are open or ready for a model in each lane.

Invariant: a group key is kept exactly while it has episodes that are open, sealed or ready. So one that is not kept is
quiet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ajet_proxy.core.ledger.events import EpisodeOpened
from ajet_sdk.routes import lane_of


class GroupKey(NamedTuple):
    """The names that groups are made from. ``revision`` is empty where no client names one."""

    lane: str
    task: str
    revision: str

    @classmethod
    def of(cls, opening: EpisodeOpened) -> GroupKey:
        """The group key of an episode, whose task may still be unknown. Its lane is as its client gave it, else what
        its task's name has before its first ``/``."""
        task = opening.task or ""
        return cls(lane_of(task) if opening.lane is None else opening.lane, task, opening.revision or "")


@dataclass(slots=True)
class GroupProgress:
    """A group key with ``open`` episodes that are open or sealed, and ``ready`` shares. ``last`` is when an episode was
    last opened in it, in Unix seconds. If it is ``flushed``, nothing more is waited for."""

    open: int = 0
    ready: int = 0
    last: float = 0.0
    flushed: bool = False


@dataclass(slots=True)
class Progress:
    """The group keys by their names."""

    by_key: dict[GroupKey, GroupProgress] = field(default_factory=dict)

    def change(self, group_key: GroupKey, *, open: int = 0, ready: int = 0, at: float = 0.0) -> None:
        """So many episodes more are open or sealed and are no evaluation, one of which was opened `at` this time; and
        so many shares more are ready. What is flushed ends with the last of these."""
        known = self.by_key.setdefault(group_key, GroupProgress())
        known.open, known.ready, known.last = known.open + open, known.ready + ready, max(known.last, at)
        known.flushed = known.flushed and known.ready > 0
        if not known.open and not known.ready:
            del self.by_key[group_key]

    def flush(self, lane: str | None, task: str | None) -> None:
        """Wait no longer for others of what is ready now of these group keys (None: of all)."""
        for group_key in self.unended(lane, task):
            self.by_key[group_key].flushed = True

    def unended(self, lane: str | None, task: str | None) -> list[GroupKey]:
        """Which of these group keys (None: all) have something ready and are not flushed."""
        return [
            group_key for group_key, one in self.by_key.items()
            if lane in (None, group_key.lane) and task in (None, group_key.task) and one.ready and not one.flushed
        ]

    def ended(self, before: float) -> set[GroupKey]:
        """The group keys that are quiet and had no episode opened after `before`, and those that are flushed."""
        return {
            group_key for group_key, one in self.by_key.items() if one.flushed or (not one.open and one.last <= before)
        }

    def next_end(self, after: float) -> float | None:
        """The first time after `after` at which an episode was opened last in a group key that is quiet."""
        return min((one.last for one in self.by_key.values() if not one.open and one.last > after), default=None)

    def restart(self, at: float) -> None:
        """Nobody could open an episode during the stop, which ends now."""
        for known in self.by_key.values():
            known.last = at

    def derive(self) -> None:
        """A snapshot makes a plain tuple of a group key."""
        self.by_key = {GroupKey(*group_key): known for group_key, known in self.by_key.items()}


@dataclass(slots=True)
class OpenCounts:
    """Counts of the episodes that are open and ready for one model, by lane and by group key, with groups of ``size``.
    In each lane so many episodes are ``playing`` (open or sealed, and not ``silent``), and so many are ``waiting``
    (ready). Lanes without any are left out."""

    size: int = 1
    ignored: Counter[str] = field(default_factory=Counter)
    """Of some lanes, how many ready episodes are not counted until something is leased: a trainer wants more."""
    silent: set[str] = field(default_factory=set)
    """The open episodes of which nothing was heard since a trainer has waited for them and got nothing."""
    playing: Counter[str] = field(default_factory=Counter, init=False)
    waiting: Counter[str] = field(default_factory=Counter, init=False)
    _open: Counter[GroupKey] = field(default_factory=Counter, init=False)
    _waiting: Counter[GroupKey] = field(default_factory=Counter, init=False)
    _loose: Counter[str] = field(default_factory=Counter, init=False)
    """Of each lane, the ready episodes that no whole group has and that nobody is adding to."""

    def plays(self, group_key: GroupKey, change: int) -> None:
        """So many episodes more are open or sealed."""
        self._change(group_key, self._open, self.playing, change)

    def waits(self, group_key: GroupKey, change: int) -> None:
        """So many shares more are ready."""
        self._change(group_key, self._waiting, self.waiting, change)

    def of(self, lane: str) -> int:
        """The number of episodes of a lane that are open, or ready for a group that is whole or may still become so.
        What is left of a task does not count: where it did, nobody could bring what it lacks."""
        return max(0, self.playing[lane] + self.waiting[lane] - self._loose[lane] - self.ignored[lane])

    def ignore(self, lanes: Iterable[str]) -> None:
        """Do not count what is ready now of these lanes: a trainer wants more, and nobody brings it."""
        for lane in lanes:
            self.ignored[lane] += self.of(lane)

    def lacking(self, group_key: GroupKey) -> int:
        """The number of episodes that the group lacks that was begun in a group key; 0 if none is."""
        return -(self._open[group_key] + self._waiting[group_key]) % self.size

    def arrange(self, size: int) -> None:
        """Count by groups of `size`."""
        self.size, self._loose = size, Counter()
        for group_key in self._waiting:
            _count(self._loose, group_key.lane, self._left(group_key))

    def _change(self, group_key: GroupKey, progress: Counter[GroupKey], lanes: Counter[str], change: int) -> None:
        _count(self._loose, group_key.lane, -self._left(group_key))
        _count(progress, group_key, change)
        _count(lanes, group_key.lane, change)
        _count(self._loose, group_key.lane, self._left(group_key))

    def _left(self, group_key: GroupKey) -> int:
        """The number of ready episodes of a group key that no whole group has, if nobody is adding to them."""
        return 0 if self._open[group_key] else self._waiting[group_key] % self.size


def _count(counter: Counter[Any], name: Any, change: int) -> None:
    counter[name] += change
    if not counter[name]:
        del counter[name]
