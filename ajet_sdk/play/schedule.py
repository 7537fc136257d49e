"""The schedule of a run: a source of rollouts is asked for a job, and hears how each one ended; and how many may play.

The caller asks for one at a time. Where `serial`, an episode is opened before the next job is asked for, unless it
`waits`.

A rollout that the world failed, and not the policy, is played again, but not at once: what failed it may pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from ajet_sdk.client import Client
from ajet_sdk.errors import BadRequest
from ajet_sdk.play.episode import wanting
from ajet_sdk.play.results import RunResult

AGAIN_S, MOST_S = 1.0, 60.0
"""The pause before a rollout is played again: at first, and at most. It grows fourfold."""
FULL_S = 1800.0
"""A run begins no more once its world has been full for so long while nothing of the run played."""
OVER = f"the world has been full for {FULL_S / 60:g} minutes in which nothing of this run played: no more begins"


def pause_after(failures: int) -> float:
    """The pause after so many earlier failures, of which chance takes up to half: what failed together comes apart."""
    return min(MOST_S, AGAIN_S * 4.0 ** min(failures, 8)) * (1.0 - 0.5 * Client.chance())


@dataclass(frozen=True, slots=True)
class Rollout:
    """The `index`-th run at `task`; `number` counts all of the run from 0."""

    number: int
    task: Any
    index: int


@dataclass(frozen=True, slots=True)
class Job:
    """A rollout to play now: for `model`, at a `place` of an evaluation or of a `play`, after so many `failures` of
    this run. `episode` is the id by which it was asked for before, without success. If it `waits`, its lane is known
    to be full."""

    rollout: Rollout
    model: str | None = None
    place: int | None = None
    play: str | None = None
    failures: int = 0
    episode: str | None = None
    waits: bool = False


class Later(Enum):
    """There is nothing to play now, and there may be later, or at once."""

    LATER = "later"
    AT_ONCE = "at once"


LATER, AT_ONCE = Later.LATER, Later.AT_ONCE


Call = Callable[..., Awaitable[Any]]
"""Calls a function that the caller of the run gave, where such functions are called."""


class Source:
    """A source that gives each job out once."""

    serial: ClassVar[bool] = True

    async def take(self, client: Client, call: Call) -> Job | Later | None:
        """The next job; None at the end."""
        raise NotImplementedError

    def put_back(self, job: Job, *, full: bool = False) -> None:
        """No episode could be opened for `job` yet; where its lane is `full`, others come first."""

    def waits_for(self) -> str | None:
        """The reason why the last job that was asked for comes later, if that is nothing of this run's own."""
        return None

    def opened(self, job: Job) -> None:
        """`job` is being played."""

    def ended(self, job: Job, result: RunResult, now: float, *, changed: bool) -> bool:
        """`job` came to `result`; returns True if it is played again. `changed` says that this was no attempt: its
        program has changed, or the world had no place for it."""
        return False

    def forgive(self) -> None:
        """The program is another one now: what failed may be played again."""


def rollouts_at(tasks: Iterable[Any], repeat: int) -> Iterator[Rollout]:
    """Every task `repeat` times, task by task; `tasks` may be endless."""
    if isinstance(tasks, str):
        raise BadRequest(f"tasks must be a list of tasks, not one text: [{tasks[:80]!r}]", param="tasks")
    each = (task for task in tasks for _ in range(repeat))
    for number, task in enumerate(each):
        yield Rollout(number, task, number % repeat)


class OnceRollouts(Source):
    """Every task so many times, and again what the world failed."""

    serial = False

    def __init__(self, tasks: Iterable[Any], repeat: int, retries: int) -> None:
        self._rollouts, self._retries = rollouts_at(tasks, repeat), retries
        self._again: list[tuple[float, Job]] = []

    async def take(self, client: Client, call: Call) -> Job | Later | None:
        due = next((item for item in self._again if item[0] <= client.clock()), None)
        if due is not None:
            self._again.remove(due)
            return due[1]
        one = await call(next, self._rollouts, None)
        if one is not None:
            return Job(one)
        return LATER if self._again else None

    def put_back(self, job: Job, *, full: bool = False) -> None:
        self._again.append((0.0, job))

    def ended(self, job: Job, result: RunResult, now: float, *, changed: bool) -> bool:
        again = result.infra and result.episode is not None and (changed or job.failures < self._retries)
        if again:
            failures = job.failures + (not changed)
            due = now if changed else now + pause_after(job.failures)
            self._again.append((due, replace(job, failures=failures, episode=None)))
        return again

    def forgive(self) -> None:
        self._again = [(0.0, replace(job, failures=0)) for _, job in self._again]


class WantedRollouts(Source):
    """The tasks of evaluations that a trainer wants, without end. A place in one always has the same task, in any
    program and at any attempt. The proxy knows which are open."""

    def __init__(
        self, tasks: Iterable[Any], repeat: int, models: Collection[str], never: Collection[str] = ()
    ) -> None:
        """`models` are those whose evaluations are played; without any, all are but `never`."""
        self._all, self._repeat, self._models = tuple(rollouts_at(tasks, repeat)), repeat, models
        self._never = never
        if not self._all:
            raise BadRequest("there is no task to play", param="tasks")

    async def take(self, client: Client, call: Call) -> Job | Later | None:
        found = await wanting(client, self._models, self._never)
        if found is None:
            return LATER
        model, place = found
        around, here = divmod(place, len(self._all))  # behind the last task comes the first one again
        once = self._all[here]
        return Job(replace(once, index=once.index + around * self._repeat), model, place)


class Room:
    """The number of episodes of a run that the world has room for, as far as it has said that it is full (`Busy`): as
    many as played when it was full. From then on another one begins when one of them ends. Now and then one more finds
    out if there is room by now, after pauses that grow.

    It counts what is `playing`. Once the world has been full for too long, `over` says so.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.playing, self.over = 0, ""
        self._most: int | None = None
        self._pauses = self._alone = 0
        self._again = self._since = 0.0

    def begins(self) -> bool:
        """Counts one more as playing, if it may begin now."""
        if self._most is not None and self.playing >= self._most:
            if (now := self._clock()) < self._again:
                return False
            self._wait(now)
        self.playing += 1
        return True

    def left(self) -> None:
        """One has not begun after all."""
        self.playing -= 1

    def ended(self, *, full: bool) -> None:
        """One has ended; if the world was `full`, it has not played."""
        self.left()
        now, alone = self._clock(), not self.playing
        if not full:
            self._alone = 0
            if self._most is not None and self.playing >= self._most:
                self._most, self._pauses = self.playing + 1, 0
            return
        self._most = self.playing
        if alone:  # a place that was just left may be free in a moment
            self._since = self._since if self._alone else now
            self._again, self._alone = now + pause_after(self._alone), self._alone + 1
            self.over = OVER if now - self._since >= FULL_S else ""
        elif now >= self._again:
            self._wait(now)

    def _wait(self, now: float) -> None:
        self._again, self._pauses = now + pause_after(self._pauses), self._pauses + 1
