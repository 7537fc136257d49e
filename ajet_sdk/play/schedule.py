"""The schedule of a run: a source of rollouts is asked for a job, and hears how each one ended.

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
