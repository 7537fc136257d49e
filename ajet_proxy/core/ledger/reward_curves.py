"""Rewards over the whole run and by task, as an owner wants to see them: a fold that never grows.

Idea: every rewarded episode gets a number when it is settled. A curve is a row of points, each the sum of `width`
neighbors. When there are `MAX_POINTS`, neighbors are joined and `width` doubles, so that a curve always spans the whole
run. Of tasks, those that were rewarded last are kept.

Invariant: a curve's points add up to all rewards counted in it. A reward that corrects an earlier one changes the point
that holds its episode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

MAX_POINTS = 256
MAX_TASKS = 1000
RECENT = 8
"""So many of a task's latest rewards are shown apart from all of them."""


@dataclass(slots=True)
class Point:
    """Some neighboring episodes: how many, their rewards added up, when, and under which policy versions."""

    count: int
    total: float
    first_at: float
    last_at: float
    oldest: int
    newest: int

    def join(self, other: Point) -> None:
        """Take in the point after this one."""
        self.count += other.count
        self.total += other.total
        self.last_at = other.last_at
        self.oldest, self.newest = min(self.oldest, other.oldest), max(self.newest, other.newest)

    def to_json(self) -> dict[str, Any]:
        return {
            "episodes": self.count, "mean": self.total / self.count, "from": self.first_at, "to": self.last_at,
            "policy_versions": [self.oldest, self.newest],
        }


@dataclass(slots=True)
class Curve:
    """Rewards in the order in which their episodes were settled."""

    points: list[Point] = field(default_factory=list)
    width: int = 1
    count: int = 0

    def add(self, reward: float, at: float, version: int) -> int:
        """Count one more; returns its number."""
        point = Point(1, reward, at, at, version, version)
        if self.points and self.points[-1].count < self.width:
            self.points[-1].join(point)
        else:
            if len(self.points) == MAX_POINTS:
                self._halve()
            self.points.append(point)
        self.count += 1
        return self.count - 1

    def correct(self, number: int, difference: float) -> None:
        self.points[number // self.width].total += difference

    def _halve(self) -> None:
        for left, right in zip(self.points[::2], self.points[1::2], strict=True):
            left.join(right)
        del self.points[1::2]
        self.width *= 2


@dataclass(slots=True)
class TaskRewards:
    """One task's rewards: the sum of all, and the latest ones by episode."""

    count: int = 0
    total: float = 0.0
    last_at: float = 0.0
    recent: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def to_json(self, task: str) -> dict[str, Any]:
        recent = [reward for _, reward in self.recent]
        return {
            "task": task, "episodes": self.count, "mean": self.total / self.count,
            "recent_mean": sum(recent) / len(recent), "recent": recent, "at": self.last_at,
        }


class RewardCurves:
    """Training and evaluation have a curve each, and each task belongs to one of the two."""

    def __init__(self) -> None:
        self.curves = {"train": Curve(), "eval": Curve()}
        self._tasks: dict[tuple[str, str], TaskRewards] = {}

    def add(self, kind: str, episode: str, task: str, reward: float, *, at: float, version: int) -> int:
        """Count a settled episode; returns the number to correct it by."""
        known = self._tasks.pop((kind, task), None) or TaskRewards()
        self._tasks[kind, task] = known
        if len(self._tasks) > MAX_TASKS:
            del self._tasks[next(iter(self._tasks))]
        known.count += 1
        known.total += reward
        known.last_at = at
        known.recent.append((episode, reward))
        return self.curves[kind].add(reward, at, version)

    def correct(self, kind: str, number: int, episode: str, task: str, reward: float, before: float) -> None:
        """The reward of a counted episode is now another than `before`."""
        self.curves[kind].correct(number, reward - before)
        known = self._tasks.get((kind, task))
        if known is not None:
            known.total += reward - before
            known.recent = deque(
                ((name, reward if name == episode else value) for name, value in known.recent), maxlen=RECENT
            )

    def tasks(self, limit: int) -> Iterator[dict[str, Any]]:
        """The `limit` tasks that were rewarded last, the latest first."""
        for (kind, task), known in islice(reversed(self._tasks.items()), limit):
            yield known.to_json(task) | {"eval": kind == "eval"}

    def recent_mean(self, kind: str, episodes: int) -> float | None:
        """The mean reward of the latest points with at least `episodes` episodes together; None without points."""
        count, total = 0, 0.0
        for point in reversed(self.curves[kind].points):
            count, total = count + point.count, total + point.total
            if count >= episodes:
                break
        return total / count if count else None
