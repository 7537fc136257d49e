"""Runs an agent over tasks, several episodes of each, many at a time.

The rollouts of one task are begun together, so that groups complete early. An agent's failure is a result, never an
exception that would end the others: its episode is aborted with the reason, and the run goes on. Only the caller's own
mistakes (tasks that cannot be iterated or named) and an interrupt end the run, the latter after aborting what is open.

A source of jobs says what is played next (`schedule`, `data_set`). An episode that the proxy holds back for now is no
failure: it is asked for until it opens.

There is one core, and each face has `Hands` by which it calls what the caller gave: in the event loop, or in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ajet_sdk import routes
from ajet_sdk.client import LANE_FULL, NO_ENGINE, Client
from ajet_sdk.errors import BadRequest, Conflict, NotReady
from ajet_sdk.play.data_set import PlayedRollouts, no_room
from ajet_sdk.play.episode import STOP_DEADLINE_S, Episode, EpisodeLife, Outcome, new_episode_id
from ajet_sdk.play.membership import NAME_TAKEN, Membership
from ajet_sdk.play.options import RunOptions
from ajet_sdk.play.patience import Patience
from ajet_sdk.play.results import RunResult, RunResults
from ajet_sdk.play.revision import of_agent
from ajet_sdk.play.schedule import AT_ONCE, LATER, Job, Later, OnceRollouts, Room, Source, WantedRollouts
from ajet_sdk.rewards.blame import Interrupted, WorldFailed, of_the_world, reason_of, text_of, world_is_full
from ajet_sdk.rewards.sources import returned
from ajet_sdk.untrainable import untrainable_in

INTERRUPTED = "the run was interrupted"
WANTED_S = 1.0
"""It may take so long until it is seen that episodes are wanted. One that failed is wanted again, but not sooner."""
HOLD_S = 15.0
"""The proxy may hold an episode so long for which there is no room. That of a play is refused at once, while another
lane may have some."""

FULL = "room"
"""The name under which a full world is waited for."""

Agent = Callable[[Any, Episode], Awaitable[Any]]


class ProgramChanged(WorldFailed):
    """The program was ended because there is a newer one."""


def result_of(
    task: str, index: int, episode: EpisodeLife | None, error: BaseException | None, seconds: float
) -> RunResult:
    """The result of the `index`-th run at `task`; without an `episode`, none could be opened."""
    reason = reason_of(error) if error is not None else None
    if episode is None:
        return RunResult(task, index, None, "failed", None, reason, seconds)
    found, reward = episode.outcome or Outcome(), None
    infra = found.infra
    if episode.outcome is None:
        outcome, infra = "failed", error is not None and of_the_world(error, episode.infra)
        if isinstance(error, Interrupted):
            reason = f"{reason}, and the proxy did not say what becomes of this"
    elif found.aborted is not None:
        outcome, reason = "aborted", found.aborted
    elif found.awaits:
        outcome, reason = "sealed", "awaits a judgement"
    elif found.reward is None:
        outcome, reason = "aborted", reason or "sealed without a reward"
    else:
        outcome, reward = "rewarded", found.reward
        if found.discarded == "incomplete_call" and not found.lost:
            ended = f"{episode.program_failed}, " if episode.program_failed else ""
            reason = f"{ended}no call to a model: nothing to train"
        elif found.discarded is not None:
            reason = f"discarded by the proxy: {found.discarded}" + (f" ({found.lost})" if found.lost else "")
    return RunResult(
        task, index, episode.id, outcome, reward, reason, seconds, untrainable_in(found.lost), found.discarded, infra,
        agents=found.agents, conversations=episode.conversations, scoped=episode.scoped,
    )


class Hands:
    """Calls what the caller of a run gave: here in the event loop, for agents that are coroutine functions. Each
    worker has a pair of its own. `episode` is the kind of episode that the agent gets."""

    episode: type[EpisodeLife] = Episode

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def play(self, agent: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
        """Returns what the agent returned, and what it raised; what it raised may be raised, too."""
        answer = agent(*args)
        if not inspect.isawaitable(answer):
            raise BadRequest("the agent is not a coroutine function: use ajet_sdk.run", param="agent")
        return await answer, None

    async def rest(self, seconds: float) -> None:
        """Waits a little for what runs on though nobody waits for it."""

    def free(self) -> None:
        """No more is called."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A job that is being played. Without an `episode`, none could be opened."""

    job: Job
    number: int
    task: str
    started: float
    episode: EpisodeLife | None = None
    error: BaseException | None = None


class Rollouts:
    """One run of `agent` over `tasks`. The caller's mistakes are raised here, before anything has begun. One of them is
    a task without a name, if `tasks` can be gone through twice.

    It joins as `member`. `held` tells if nothing may begin just now; it may raise what is to end the run. What is
    `graded` is sealed by no reward of its own.
    """

    def __init__(
        self,
        client: Client,
        agent: Callable[..., Any],
        tasks: Iterable[Any],
        options: RunOptions,
        member: Membership,
        *,
        hands: Callable[[], Hands] = Hands,
        held: Callable[[], bool] = lambda: False,
        graded: bool = False,
    ) -> None:
        self._parallel = options.parallel
        if isinstance(tasks, Collection) and not isinstance(tasks, str):
            for task in tasks:
                options.name(task)
            most = len(tasks) * options.repeat * options.epochs
            self._parallel = options.parallel if options.wanted else max(1, min(options.parallel, most))
        self.source = source_of(tasks, options)
        self._client, self._agent, self._options, self._member = client, agent, options, member
        self._hands, self._held, self._graded = hands, held, graded
        self._numbers = count()
        self._opening = asyncio.Lock()
        self._patience = Patience()
        self._done: dict[int, RunResult] = {}
        self._open = 0
        self._stopped = False
        self._fault: BaseException | None = None
        self._quiet_until = 0.0
        self._forgiven = False
        self._room = Room(client.clock)

    @property
    def results(self) -> RunResults:
        """The results so far, in the order in which their rollouts were begun."""
        return RunResults(tuple(self._done[number] for number in sorted(self._done)))

    def forgive(self) -> None:
        """The program is another one from now on. May be called by any thread."""
        self._forgiven, self._quiet_until = True, 0.0

    def interrupt(self) -> bool:
        """Begins no more, and returns True if anything is open. May be called by any thread."""
        self._stopped = True
        return bool(self._open)

    async def run(self) -> RunResults:
        """Runs to the end. If it is cancelled, it aborts what is open, and has a result for that too."""
        hands = self._hands()
        try:
            if isinstance(self.source, PlayedRollouts):
                await hands.call(self._options.on_progress, await self.source.begin(self._client))
            if not isinstance(self.source, OnceRollouts):
                await self._member.join()  # a dead client of its name may have open what is waited for
            await self._play_all()
            if isinstance(self.source, PlayedRollouts):
                await hands.call(self._options.on_progress, await self.source.finish(self._client))
        finally:
            hands.free()
            await self._member.leave()
        return self.results

    async def _play_all(self) -> None:
        workers = [asyncio.ensure_future(self._work()) for _ in range(self._parallel)]
        try:
            await asyncio.wait(workers)
        finally:
            self._stopped = True
            left = [worker for worker in workers if not worker.done()]
            for worker in left:
                if not getattr(worker, "cancelling", int)():  # a second one would interrupt what the first one aborts
                    worker.cancel()
            if left:
                await asyncio.wait(left, timeout=2 * STOP_DEADLINE_S)
                for worker in left:
                    worker.cancel()
                await asyncio.gather(*left, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    async def _work(self) -> None:
        hands = self._hands()
        try:
            # each in a task of its own, so that an agent that cancels the task it runs in ends nothing else
            while (begun := await asyncio.ensure_future(self._roll_out(hands))) is not None:
                if begun is LATER:
                    await asyncio.sleep(WANTED_S)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the caller's own: a task without a name, a callback that raised
            known, self._fault = self._fault, self._fault or error
            if known is None and self._open:
                ends = f"{text_of(error)}: no more begins, and the run ends with its {self._open} open episodes"
                with suppress(Exception):  # the fault itself is raised at the end
                    try:
                        await hands.call(self._options.say, ends)
                    except BadRequest:  # there may be no thread for it
                        self._options.say(ends)
        finally:
            hands.free()

    async def _roll_out(self, hands: Hands) -> Begun | Later | None:
        """Plays the next rollout to its end; None if there is none. If another one must not be opened before this one
        is, that waits for its turn."""
        async with self._opening:
            job = await self._take(hands)
            if not isinstance(job, Job):
                return job
            number = next(self._numbers)
            begun = await self._begun(hands, job, number) if self.source.serial and not job.waits else None
        begun = begun or await self._begun(hands, job, number)
        if isinstance(begun, Begun):
            error = begun.error if begun.episode is None else await self._play(hands, begun.job, begun.episode)
            await self._end(hands, begun, error)
        else:
            self._room.left()
        return begun

    async def _take(self, hands: Hands) -> Job | Later | None:
        """The next job, unless the run is over. After a look that found nothing, the next one waits."""
        now = time.monotonic()
        if self._stopped or self._fault is not None or self._room.over:
            return None
        if self._member.fault is not None:
            raise self._member.fault
        if now < self._quiet_until or self._held():
            return LATER
        if self._forgiven:
            self._forgiven = False
            self.source.forgive()
        if not self._room.begins():
            full = f"the world says that it is full, with {self._open} episodes of this run in it"
            await self._wait_for(hands, FULL, full, now)
            return LATER
        taken = await self.source.take(self._client, hands.call)
        if not isinstance(taken, Job):
            self._room.left()
        if taken is LATER:
            self._quiet_until = now + WANTED_S
            await self._wait_for(hands, None, self.source.waits_for(), now)
        return taken

    async def _wait_for(self, hands: Hands, name: str | None, why: str | None, since: float) -> None:
        """Says what is waited for, if that takes long."""
        if (line := self._patience.waits(name, why, since)) is not None:
            await hands.call(self._options.say, line)

    async def _begun(self, hands: Hands, job: Job, number: int) -> Begun | Later:
        """`job` with its episode, or what prevents that, or when it will be asked for again."""
        started, options = time.monotonic(), self._options
        task = await hands.call(options.name, job.rollout.task)
        hold_s = None if not options.paced else HOLD_S if job.play is None or job.waits else 0.0
        body = options.opening(
            task=task, model=job.model or options.model, place=job.place, play=job.play,
            id=job.episode or new_episode_id(), hold_s=hold_s, graded=self._graded,
        )  # fmt: skip
        try:
            opened = await self._member.open(body)
        except BaseException as caught:
            error = self._theirs(caught)
            later = await self._later(hands, job, body, error, started)
            return later or Begun(job, number, task, started, error=error)
        self._patience.ends(options.lane_of(task), None)
        self.source.opened(job)
        self._open += 1
        episode = hands.episode(self._client, opened)
        episode.infra = options.infra
        return Begun(job, number, task, started, episode)

    async def _later(
        self, hands: Hands, job: Job, body: routes.OpenEpisode, caught: BaseException, started: float
    ) -> Later | None:
        """Decides if an episode that could not be opened will be asked for again, and when. Raises what ends the run.
        `started` is when it was asked for."""
        code, lane = getattr(caught, "code", None), self._options.lane_of(body.task or "")
        if code == NAME_TAKEN:
            raise caught
        if code == LANE_FULL:
            self.source.put_back(replace(job, episode=body.id), full=True)
            if job.play is None:
                await self._wait_for(hands, lane, no_room([lane]), started)
            elif job.waits:
                await self._wait_for(hands, None, self.source.waits_for(), started)
            else:
                return AT_ONCE  # another lane may have room
            return LATER
        if code == NO_ENGINE:
            await self._wait_for(hands, lane, str(caught), started)
        lost_in_play = job.play is not None and (isinstance(caught, Conflict) or code == "unknown_play")
        if isinstance(caught, NotReady) or code == "place_taken" or lost_in_play:
            self.source.put_back(job)
            return LATER
        if job.play is not None:
            raise caught
        return None

    async def _play(self, hands: Hands, job: Job, episode: EpisodeLife) -> BaseException | None:
        """Has the agent play an open episode, and settles it. Returns what the agent raised."""
        error: BaseException | None = None
        try:
            if self._stopped:
                raise Interrupted(INTERRUPTED)
            value, error = await hands.play(self._agent, job.rollout.task, episode)
            if value is not None:
                earned = await hands.call(returned, value)
                await episode.settle(lambda _: earned)
        except GeneratorExit:
            raise
        except BaseException as caught:  # as SystemExit is, or what an event loop of the agent's own was cancelled with
            error = caught
        if self._stopped and error is not None:
            error = Interrupted(INTERRUPTED)
        leaving = asyncio.ensure_future(episode.leave(error))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            ended, _ = await asyncio.wait([leaving], timeout=STOP_DEADLINE_S)
            error = (leaving.exception() or error) if ended else Interrupted(INTERRUPTED)
            leaving.cancel()
        except BaseException as caught:
            error = caught
        return error and self._theirs(error)

    async def _end(self, hands: Hands, begun: Begun, error: BaseException | None) -> None:
        lasted = time.monotonic() - begun.started
        result = result_of(begun.task, begun.job.rollout.index, begun.episode, error, lasted)
        full, changed = result.infra and world_is_full(error), isinstance(error, ProgramChanged)
        again = self.source.ended(begun.job, result, time.monotonic(), changed=changed or full)
        self._room.ended(full=full)
        if not full:
            self._patience.ends(FULL)
        elif self._room.over:
            await hands.call(self._options.say, self._room.over)
        if again and not self._stopped and not self._room.over:
            self._quiet_until, result = 0.0, replace(result, again=True)
        self._done[begun.number] = result
        self._open -= begun.episode is not None
        if self._options.on_result is not None:
            free = self._hands() if self._stopped else hands  # an agent that is interrupted may hold its own for ever
            try:
                await free.call(self._options.on_result, result)
            finally:
                if free is not hands:
                    free.free()
        if self._stopped:
            await hands.rest(STOP_DEADLINE_S)
        elif self._options.wanted and not result.ok:
            await asyncio.sleep(WANTED_S)

    def _theirs(self, caught: BaseException) -> BaseException:
        """An exception of the agent; one that ends this run is raised again. A CancelledError may be either."""
        if isinstance(caught, (KeyboardInterrupt, GeneratorExit, *([asyncio.CancelledError] if self._stopped else []))):
            raise caught
        return caught


def member_of(client: Client, agent: Callable[..., Any], options: RunOptions) -> Membership:
    """The client that runs an agent function. Its code is that of the function's file, as it is now."""
    code = of_agent(agent)
    revision = code() if options.revision is None else options.revision
    return Membership(client.target, options.joining(code.name), lambda: revision, options.say)


def source_of(tasks: Iterable[Any], options: RunOptions) -> Source:
    if options.wanted:
        learn = [options.model] if options.model else list((options.members or {}).values())
        return WantedRollouts(tasks, options.repeat, learn, never=list((options.teachers or {}).values()))
    if options.play is None:
        return OnceRollouts(tasks, options.repeat, options.retries)
    return PlayedRollouts(tasks, options)


async def run(agent: Agent, tasks: Iterable[Any], repeat: int = 8, parallel: int = 32, **options: Any) -> RunResults:
    """Runs ``agent(task, episode)`` `repeat` times for each task, up to `parallel` at once; `options` are the fields of
    `ajet_sdk.play.options.RunOptions`.

    What the agent returns is the episode's final reward, or a pair of that and a note. None means that it rewarded or
    aborted the episode itself; one that it left without a reward is aborted, unless it is to be `judged`. Whatever the
    agent raises aborts its episode and is recorded in the results. A list in which a task has no name is refused before
    any task is begun.

    If an attempt at the model went unanswered, the world failed, and not the agent, whatever it returns or raises. So
    say an exception of one of the classes `infra`, a client's error of connection or server, a proxy that cannot be
    reached, and ``abort(cause="infra")``. A final reward that was given stands.

    An interrupt, or a task that is cancelled, aborts the open episodes first.
    """
    how = RunOptions(repeat=repeat, parallel=parallel, **options)
    async with Client(how.proxy_url, how.api_key, deadline=how.deadline) as client:
        return await Rollouts(client, agent, tasks, how, member_of(client, agent, how)).run()
