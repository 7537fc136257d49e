"""Runs an agent over tasks, several episodes of each, many at a time.

The rollouts of one task are begun together, so that groups complete early. An agent's failure is a result, never an
exception that would end the others: its episode is aborted with the reason, and the run goes on. Only the caller's own
mistakes (tasks that cannot be iterated or named) and an interrupt end the run, the latter after aborting what is open.

Workers are daemon threads, because an agent that hangs must not keep an interrupted program alive. Each says itself
that it has ended: an interrupted `Thread.join` takes a running thread for dead (CPython issue 90882, until 3.13).
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ajet_sdk import routes
from ajet_sdk.client import Client
from ajet_sdk.clients import Membership, membership, name_taken
from ajet_sdk.episodes import Episode, EpisodeLife, Opened, aborting, opening, place_taken, reason_of, wanting
from ajet_sdk.errors import AjetError, BadRequest, NotReady, ProxyUnreachable
from ajet_sdk.operations import DEADLINE_S
from ajet_sdk.results import RunResult, RunResults
from ajet_sdk.revision import of_agent, told
from ajet_sdk.untold import told as untold

Agent = Callable[[Any, Episode], Any]
INTERRUPTED = "the run was interrupted"
STOP_DEADLINE_S = 5.0
WANTED_S = 1.0
"""How long it may take until it is seen that episodes are wanted. One that failed is wanted again, but not sooner."""
HEARD_S = 1.0
"""A signal that comes as a wait begins, or to another thread, wakes no wait: it is heard when that ends."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The `index`-th run at `task`; `number` counts all of the run from 0."""

    number: int
    task: Any
    index: int


def rollouts_at(tasks: Iterable[Any], repeat: int) -> Iterator[Rollout]:
    """Every task `repeat` times, task by task; `tasks` may be endless."""
    if isinstance(tasks, str):
        raise BadRequest(f"tasks must be a list of tasks, not one text: [{tasks[:80]!r}]", param="tasks")
    each = (task for task in tasks for _ in range(repeat))
    for number, task in enumerate(each):
        yield Rollout(number, task, number % repeat)


class WantedRollouts:
    """The tasks of evaluations. A place in one always has the same task, in any program and at any attempt."""

    def __init__(self, tasks: Iterable[Any], repeat: int) -> None:
        self._all, self._repeat = tuple(rollouts_at(tasks, repeat)), repeat
        if not self._all:
            raise BadRequest("there is no task to play", param="tasks")
        self._number = 0

    def at(self, place: int) -> Rollout:
        """The rollout at a place of an evaluation; behind the last task comes the first one again."""
        around, place = divmod(place, len(self._all))
        once = self._all[place]
        self._number += 1
        return Rollout(self._number - 1, once.task, once.index + around * self._repeat)


def name_of(task: Any) -> str:
    """What the proxy calls a task: a string or integer itself, or the ``task`` or ``id`` of a mapping."""
    if isinstance(task, Mapping):
        task = task.get("task", task.get("id"))
    if isinstance(task, (str, int)) and not isinstance(task, bool) and str(task):
        return str(task)
    raise BadRequest(
        "a task must be a string, an integer, or a mapping with one of them under 'task' or 'id'; pass name= to say "
        f"what {repr(task)[:80]} is called",
        param="tasks",
    )


def result_of(
    rollout: Rollout, task: str, episode: EpisodeLife | None, error: BaseException | None, seconds: float
) -> RunResult:
    """What came of a rollout; without an `episode`, none could be opened."""
    reason = reason_of(error) if error is not None else None
    settled = episode.outcome if episode is not None else None
    lost = settled.lost if settled is not None else None
    if settled is None:
        outcome, reward = "failed", None
    elif settled.aborted is not None:
        outcome, reward, reason = "aborted", None, settled.aborted
    elif settled.reward is None:
        outcome, reward, reason = "aborted", None, reason or "sealed without a reward"
    else:
        outcome, reward = "rewarded", settled.reward
        if settled.discarded is not None:
            reason = f"discarded by the proxy: {settled.discarded}" + (f" ({lost})" if lost else "")
    return RunResult(
        task, rollout.index, episode.id if episode else None, outcome, reward, reason, seconds, untold(lost),
        None if settled is None else settled.discarded,
    )


def start(thread: threading.Thread) -> None:
    """Starts `thread`; `BadRequest` if this process can have no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise BadRequest(f"parallel is too much for this machine: {error}", param="parallel") from None


class RolloutsPlan:
    """What both kinds of `Rollouts` know: what to run, and what came of it.

    `body` opens the episodes, each with its task's `name`. The caller's mistakes are raised here, before anything has
    begun. One of them is a task without a name, if `tasks` can be gone through twice.

    With `wanted`, only evaluation episodes that a trainer wants are played, and the run has no end. Episodes are then
    opened one after the other: each asks whether one more is wanted, and which place in the evaluation it has.

    `member` is the membership of the client that plays them, if they are to have one.
    """

    def __init__(
        self,
        client: Any,
        agent: Callable[..., Any],
        tasks: Iterable[Any],
        repeat: int,
        parallel: int,
        body: routes.OpenEpisode,
        name: Callable[[Any], str],
        on_result: Callable[[RunResult], None] | None,
        wanted: bool = False,
        member: Any = None,
    ) -> None:
        if wanted and not body.eval:
            raise BadRequest("only evaluations are wanted: set eval too", param="wanted")
        for what, value in (("repeat", repeat), ("parallel", parallel)):
            if value < 1:
                raise BadRequest(f"{what} must be at least 1, not {value}", param=what)
        if isinstance(tasks, Collection) and not isinstance(tasks, str):
            for task in tasks:
                name(task)
            parallel = parallel if wanted else max(1, min(parallel, len(tasks) * repeat))
        self._wanted = WantedRollouts(tasks, repeat) if wanted else None
        self._client, self._agent, self._body, self._name, self._on_result = client, agent, body, name, on_result
        self._rollouts: Iterator[Rollout] = iter(()) if wanted else rollouts_at(tasks, repeat)
        self._parallel, self._member = parallel, member
        self._done: dict[int, RunResult] = {}
        self._stopped = False

    def _at(self, place: int | None) -> Rollout | None:
        """The next rollout: the one at a `place`, where only wanted ones are played."""
        return next(self._rollouts, None) if self._wanted is None or place is None else self._wanted.at(place)

    @property
    def results(self) -> RunResults:
        """What is done so far, in the order in which it was begun."""
        return RunResults(tuple(self._done[number] for number in sorted(self._done)))


class Rollouts(RolloutsPlan):
    """One run over tasks by threads; `on_stop` is called on an interrupt."""

    _client: Client
    _member: Membership | None

    def __init__(self, *plan: Any, on_stop: Callable[[], None] | None = None) -> None:
        super().__init__(*plan)
        if inspect.iscoroutinefunction(self._agent):
            raise BadRequest("the agent is a coroutine function: run it by ajet_sdk.aio.run", param="agent")
        self._on_stop = on_stop
        self._workers: list[tuple[threading.Thread, threading.Event]] = []
        self._lock = threading.Lock()
        self._turn = nullcontext() if self._wanted is None else threading.Lock()
        self._open: dict[str, Episode] = {}
        self._fault: BaseException | None = None

    def run(self) -> RunResults:
        """Runs to the end; an exception in this thread, such as KeyboardInterrupt, stops the run first."""
        try:
            for _ in range(self._parallel):
                self._begin()
            for _, ended in self._workers:
                while not ended.wait(HEARD_S):
                    pass
        except BaseException:
            self.stop()
            raise
        if self._fault is not None:
            raise self._fault
        return self.results

    def stop(self) -> None:
        """Begins no more, aborts what is open, and waits a little for the workers to notice."""
        with self._lock:
            self._stopped = True
            still_open = list(self._open.values())
        if self._on_stop is not None:
            self._on_stop()
        target = replace(self._client.target, deadline=STOP_DEADLINE_S)
        for episode in still_open:
            if episode.outcome is not None:
                continue
            try:
                self._client.drive(aborting(target, episode.id, INTERRUPTED))
            except (ProxyUnreachable, NotReady):
                break  # one wait for a proxy that is away is enough: its timeouts will end the others
            except AjetError:
                continue
        until = time.monotonic() + STOP_DEADLINE_S
        for thread, ended in self._workers:
            if thread.ident is not None:
                ended.wait(max(0.0, until - time.monotonic()))

    def _begin(self) -> None:
        ended = threading.Event()
        thread = threading.Thread(target=self._work, args=(ended,), daemon=True)
        self._workers.append((thread, ended))
        start(thread)

    def _next(self, place: int | None) -> Rollout | None:
        with self._lock:
            if self._stopped or self._fault is not None:
                return None
            try:
                return self._at(place)
            except Exception as error:
                self._fault = error
                return None

    def _work(self, ended: threading.Event) -> None:
        try:
            while (one := self._roll_out()) is not None:
                number, result = one
                with self._lock:
                    self._done[number] = result
                if self._on_result is not None:
                    self._on_result(result)
                if self._wanted is not None and not result.ok:
                    time.sleep(WANTED_S)
        except BaseException as error:  # the caller's own: a task without a name, a callback that raised
            self._fault = error
        finally:
            ended.set()

    def _await_wanted(self) -> tuple[str | None, int | None]:
        """The model of the next episode. Where only wanted ones are played, waits for one, and tells its place; the run
        may stop before."""
        model = self._body.model
        while self._wanted is not None and not self._stopped and self._fault is None:
            if (found := self._client.drive(wanting(self._client.target, model))) is not None:
                return found
            time.sleep(WANTED_S)
        return model, None

    def _roll_out(self) -> tuple[int, RunResult] | None:
        """The next rollout to its end, and its number; None if there is none. If another thread must not open an
        episode before this one has, it waits for its turn."""
        client, episode, error = self._client, None, None
        with self._turn:
            while True:
                model, place = self._await_wanted()
                if (rollout := self._next(place)) is None:
                    return None
                started = time.monotonic()
                body = replace(self._body, task=self._name(rollout.task), model=model, place=place)
                try:
                    episode = Episode(client, self._opened(body))
                    with self._lock:
                        self._open[episode.id] = episode
                except KeyboardInterrupt:
                    raise
                except BaseException as caught:
                    if name_taken(caught):
                        raise
                    if place_taken(caught):
                        continue
                    error = caught
                break
        if episode is not None:
            error = self._play(rollout, episode)
        return rollout.number, result_of(rollout, body.task or "", episode, error, time.monotonic() - started)

    def _opened(self, body: routes.OpenEpisode) -> Opened:
        if self._member is None:
            return self._client.drive(opening(self._client.target, body))
        return self._member.open(body)

    def _play(self, rollout: Rollout, episode: Episode) -> BaseException | None:
        """Has the agent play an open episode, and settles it. Returns what the agent raised."""
        try:
            with episode:
                if self._stopped:
                    episode.abort(INTERRUPTED)
                else:
                    value = self._agent(rollout.task, episode)
                    if value is not None:
                        episode.reward(value)
        except KeyboardInterrupt:
            raise
        except BaseException as caught:  # as SystemExit is, or what an event loop of the agent's own was cancelled with
            return caught
        finally:
            with self._lock:
                self._open.pop(episode.id, None)
        return None


def run(
    agent: Agent,
    tasks: Iterable[Any],
    repeat: int = 8,
    parallel: int = 32,
    *,
    name: Callable[[Any], str] = name_of,
    model: str | None = None,
    agent_name: str | None = None,
    eval: bool = False,
    wanted: bool = False,
    on_result: Callable[[RunResult], None] | None = None,
    client_name: str | None = None,
    lane: str | None = None,
    revision: str | None = None,
    replace_older: bool = False,
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> RunResults:
    """Runs ``agent(task, episode)`` `repeat` times for each task, up to `parallel` at once, each in its own thread.

    What the agent returns is the episode's final reward. None means that it rewarded or aborted the episode itself; one
    that it left without a reward is aborted. Whatever the agent raises aborts its episode and is recorded in the
    results. `name` turns a task into its name; `on_result` is called as each rollout ends, by the thread that ran it. A
    list in which a task has no name is refused before any task is begun. KeyboardInterrupt aborts the open episodes and
    is raised again.

    With `wanted` (and `eval`), only the evaluation episodes are played that a trainer wants, and this ends by an
    interrupt alone. Each evaluation goes through the tasks from the first on. Programs that share one go through them
    together, if all have the same tasks and the same `repeat`.

    This process is a client of the proxy while it runs, under `client_name` or a name of its own. If it dies, what it
    has open is discarded. Another one of its name ends it with a `Conflict`. `lane` is the kind of its tasks; unset,
    it follows from their names. `revision` names the code of agent and reward; unset, that is a digest of the file of
    `agent`. With `replace_older`, what waits in the lane and was played under another revision is discarded.
    """
    body, code = routes.OpenEpisode(None, model, agent_name, eval), of_agent(agent)
    with Client(proxy_url, api_key, deadline=deadline) as client:
        own = membership(
            client, Membership, program=code.name, name=client_name, lane=lane, replace_older=replace_older,
            revision=told(revision, code),
        )
        with own:
            return Rollouts(client, agent, tasks, repeat, parallel, body, name, on_result, wanted, own).run()
