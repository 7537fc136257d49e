"""Runs an agent over tasks, several episodes of each, many at a time.

The rollouts of one task are begun together, so that groups complete early. An agent's failure is a result, never an
exception that would end the others: its episode is aborted with the reason, and the run goes on. Only the caller's own
mistakes (tasks that cannot be iterated or named) and an interrupt end the run, the latter after aborting what is open.

A source of turns says what is played next (`schedule`, `data_set`). An episode that the proxy holds back for now is no
failure: it is asked for until it opens.

Workers are daemon threads, because an agent that hangs must not keep an interrupted program alive. Each says itself
that it has ended: an interrupted `Thread.join` takes a running thread for dead (CPython issue 90882, until 3.13).
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ajet_sdk import routes
from ajet_sdk.client import Client
from ajet_sdk.errors import AjetError, BadRequest, Conflict, NotReady, ProxyUnreachable
from ajet_sdk.operations import DEADLINE_S, LANE_FULL, NO_ENGINE, Talk
from ajet_sdk.play.data_set import PlayedRollouts, Progress, no_room, play_over
from ajet_sdk.play.episode import (
    STOP_DEADLINE_S,
    Episode,
    EpisodeLife,
    Opened,
    aborting,
    new_episode_id,
    opening,
    place_taken,
    reason_of,
)
from ajet_sdk.play.membership import Membership, membership, name_taken
from ajet_sdk.play.patience import Patience
from ajet_sdk.play.results import RunResult, RunResults
from ajet_sdk.play.revision import of_agent, told
from ajet_sdk.play.schedule import AT_ONCE, LATER, Later, OnceRollouts, Rollout, Source, Turn, WantedRollouts
from ajet_sdk.play.tasks import Line
from ajet_sdk.rewards.blame import WorldFailed, of_the_world
from ajet_sdk.untrainable import untrainable_in

Agent = Callable[[Any, Episode], Any]
INTERRUPTED = "the run was interrupted"
WANTED_S = 1.0
"""How long it may take until it is seen that episodes are wanted. One that failed is wanted again, but not sooner."""
HOLD_S = 15.0
"""How long the proxy may hold an episode for which there is no room. That of a play is refused at once, while another
lane may have some."""
HEARD_S = 1.0
"""A signal that comes as a wait begins, or to another thread, wakes no wait: it is heard when that ends."""


RETRIES = 2
"""How often a rollout is played again that the world failed."""


class ProgramChanged(WorldFailed):
    """The program was ended because there is a newer one."""


LOG = logging.getLogger("ajet")


def never_held() -> bool:
    """Something may begin at any time."""
    return False


@dataclass(frozen=True, slots=True)
class How:
    """How a run goes through its tasks; what `run` says of its arguments. `held` tells whether nothing may begin just
    now; it may raise what is to end the run. `member` is the membership of the client that plays. `on_progress` is told
    how far a play is, at its beginning and its end. `say` is told in words what the run waits for."""

    wanted: bool = False
    play: str | None = None
    epochs: int = 1
    retries: int = RETRIES
    infra: tuple[type[BaseException], ...] = ()
    lane: str | None = None
    member: Any = None
    held: Callable[[], bool] = never_held
    on_progress: Callable[[Progress], None] = lambda progress: None
    say: Callable[[str], None] = LOG.warning

    def __post_init__(self) -> None:
        if self.play is None and self.epochs != 1:
            raise BadRequest("epochs belong to a play: name it with play=", param="epochs")
        if self.play is not None and self.wanted:
            raise BadRequest("what a trainer wants is no play: leave one of them out", param="play")
        for what, value, least in (("epochs", self.epochs, 1), ("retries", self.retries, 0)):
            if value < least:
                raise BadRequest(f"{what} must be at least {least}, not {value}", param=what)


def name_of(task: Any) -> str:
    """What the proxy calls a task: a string or integer itself, the ``task`` or ``id`` of a mapping, or what a line of a
    file is called."""
    if isinstance(task, Line):
        return task.name
    if isinstance(task, Mapping):
        task = task.get("task", task.get("id"))
    if isinstance(task, (str, int)) and not isinstance(task, bool) and str(task):
        return str(task)
    raise BadRequest(
        "a task must be a string, an integer, or a mapping with one of them under 'task' or 'id'; pass name= to say "
        f"what {repr(task)[:80]} is called",
        param="tasks",
    )


def said_by(task: Any) -> str:
    """Everything that makes a task the one that it is, as far as JSON can say it."""
    return task.json if isinstance(task, Line) else json.dumps(task, sort_keys=True, default=repr)


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
        if settled.discarded == "incomplete_call" and not lost:
            ended = f"{episode.program_failed}, " if episode is not None and episode.program_failed else ""
            reason = f"{ended}no call to a model: nothing to train"
        elif settled.discarded is not None:
            reason = f"discarded by the proxy: {settled.discarded}" + (f" ({lost})" if lost else "")
    infra = settled is not None and settled.infra
    if settled is None and episode is not None and error is not None:
        infra = of_the_world(error, episode.infra)
    return RunResult(
        task, rollout.index, episode.id if episode else None, outcome, reward, reason, seconds, untrainable_in(lost),
        None if settled is None else settled.discarded, infra,
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

    With `How.wanted`, only evaluation episodes that a trainer wants are played, and the run has no end. With `How.play`
    what is missing of that play is played. Episodes are then opened one after the other: each asks for its place.
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
        how: How = How(),
    ) -> None:
        if how.wanted and not body.eval:
            raise BadRequest("only evaluations are wanted: set eval too", param="wanted")
        for what, value in (("repeat", repeat), ("parallel", parallel)):
            if value < 1:
                raise BadRequest(f"{what} must be at least 1, not {value}", param=what)
        if isinstance(tasks, Collection) and not isinstance(tasks, str):
            for task in tasks:
                name(task)
            most = len(tasks) * repeat * how.epochs
            parallel = parallel if how.wanted else max(1, min(parallel, most))
        self.source = source_of(tasks, repeat, body, name, how)
        self._client, self._agent, self._body, self._name, self._on_result = client, agent, body, name, on_result
        self._how, self._parallel = how, parallel
        self._numbers = count()
        self._done: dict[int, RunResult] = {}
        self._stopped = False
        self._fault: BaseException | None = None
        self._quiet_until = 0.0
        self._forgiven = False
        self._patience = Patience(how.say)

    def forgive(self) -> None:
        """The program is another one from now on. May be called by any thread."""
        self._forgiven, self._quiet_until = True, 0.0

    def _take(self) -> Talk[Turn | Later | None]:
        """The next turn, unless the run is over. After a look that found nothing, the next one waits."""
        now = time.monotonic()
        if self._stopped or self._fault is not None:
            return None
        if now < self._quiet_until or self._how.held():
            return LATER
        if self._forgiven:
            self._forgiven = False
            self.source.forgive()
        taken = yield from self.source.take(self._client.target)
        if taken is LATER:
            self._quiet_until = now + WANTED_S
            self._patience.waits(None, self.source.waits_for(), now)
        return taken

    def _opening(self, turn: Turn) -> routes.OpenEpisode:
        """The request that opens the episode of `turn`, by the id by which it was asked for before."""
        paced = not self._body.eval or self._body.members or self._body.teachers
        hold_s = None if not paced else HOLD_S if turn.play is None or turn.waits else 0.0
        return replace(
            self._body, task=self._name(turn.rollout.task), model=turn.model or self._body.model, place=turn.place,
            play=turn.play, id=turn.episode or new_episode_id(), hold_s=hold_s,
        )

    def _has_begun(self, turn: Turn, body: routes.OpenEpisode, opened: Opened) -> None:
        """An episode is open for `turn`."""
        self._patience.ends(self._lane(body), None)
        self.source.opened(turn, opened)

    def _lane(self, body: routes.OpenEpisode) -> str:
        return self._how.lane or routes.lane_of(body.task or "")

    def _comes_later(
        self, turn: Turn, body: routes.OpenEpisode, caught: BaseException, started: float
    ) -> Later | None:
        """When an episode that could not be opened will be asked for again, if it will. Raises what ends the run.
        `started` is when it was asked for."""
        if name_taken(caught):
            raise caught
        if isinstance(caught, NotReady) and caught.code == LANE_FULL:
            self.source.put_back(replace(turn, episode=body.id), full=True)
            if turn.play is None:
                self._patience.waits(lane := self._lane(body), no_room([lane]), started)
            elif turn.waits:
                self._patience.waits(None, self.source.waits_for(), started)
            else:
                return AT_ONCE  # another lane may have room
            return LATER
        held = isinstance(caught, NotReady)
        if isinstance(caught, NotReady) and caught.code == NO_ENGINE:
            self._patience.waits(self._lane(body), caught.message, started)
        taken = place_taken(caught) or (turn.play is not None and (isinstance(caught, Conflict) or play_over(caught)))
        if turn.play is not None and not held and not taken:
            raise caught
        if not (held or taken):
            return None
        self.source.put_back(turn)
        return LATER

    def _ended(self, turn: Turn, result: RunResult, error: BaseException | None) -> RunResult:
        """`result`, and whether it is played again."""
        changed = isinstance(error, ProgramChanged)
        again = self.source.ended(turn, result, time.monotonic(), changed=changed) and not self._stopped
        if again:
            self._quiet_until = 0.0
        return replace(result, again=True) if again else result

    @property
    def _joins_first(self) -> bool:
        """Whether this client joins before it knows that there is anything to open. A dead client of its name may have
        open what is waited for, until this one takes its place."""
        return self._how.member is not None and not isinstance(self.source, OnceRollouts)

    @property
    def results(self) -> RunResults:
        """What is done so far, in the order in which it was begun."""
        return RunResults(tuple(self._done[number] for number in sorted(self._done)))


def source_of(
    tasks: Iterable[Any], repeat: int, body: routes.OpenEpisode, name: Callable[[Any], str], how: How
) -> Source:
    """Where the turns of a run come from."""
    if how.wanted:
        learn = [body.model] if body.model else list((body.members or {}).values())
        return WantedRollouts(tasks, repeat, learn, never=list((body.teachers or {}).values()))
    if how.play is None:
        return OnceRollouts(tasks, repeat, how.retries)
    return PlayedRollouts(
        tasks, repeat, how.retries, play=how.play, epochs=how.epochs, name=name, said=said_by, lane=how.lane,
        paced=not body.eval,
    )


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that is being played. Without an `episode`, none could be opened."""

    turn: Turn
    number: int
    task: str
    started: float
    episode: Any = None
    error: BaseException | None = None


class Rollouts(RolloutsPlan):
    """One run over tasks by threads; `on_stop` is called on an interrupt."""

    _client: Client

    def __init__(self, *plan: Any, on_stop: Callable[[], None] | None = None) -> None:
        super().__init__(*plan)
        if inspect.iscoroutinefunction(self._agent):
            raise BadRequest("the agent is a coroutine function: run it by ajet_sdk.aio.run", param="agent")
        self._on_stop = on_stop
        self._workers: list[tuple[threading.Thread, threading.Event]] = []
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._open: dict[str, Begun] = {}
        """What has begun and was not told of yet."""

    def run(self) -> RunResults:
        """Runs to the end; an exception in this thread, such as KeyboardInterrupt, stops the run first."""
        try:
            if isinstance(self.source, PlayedRollouts):
                self._how.on_progress(self._client.drive(self.source.begin(self._client.target)))
            if self._joins_first:
                self._how.member.join()
            for _ in range(self._parallel):
                self._begin()
            for _, ended in self._workers:
                while not ended.wait(HEARD_S):
                    pass
        except BaseException as error:
            self.stop(say=isinstance(error, KeyboardInterrupt))
            raise
        if self._fault is not None:
            raise self._fault
        if isinstance(self.source, PlayedRollouts):
            self._how.on_progress(self._client.drive(self.source.finish(self._client.target)))
        return self.results

    def stop(self, *, say: bool = False) -> None:
        """Begins no more, aborts what is open, and waits a little for the workers to notice."""
        with self._lock:
            self._stopped = True
            still_open = [begun.episode for begun in self._open.values() if begun.episode.outcome is None]
        if say:
            self._how.say(f"interrupted: {'aborting the open episodes' if still_open else 'no episode was open'}")
        if self._on_stop is not None:
            self._on_stop()
        until = time.monotonic() + STOP_DEADLINE_S
        target, aborted = replace(self._client.target, deadline=STOP_DEADLINE_S), set()
        for episode in still_open:
            if episode.outcome is not None:
                continue
            try:
                self._client.drive(aborting(target, episode.id, INTERRUPTED))
                aborted.add(episode.id)
            except (ProxyUnreachable, NotReady):
                break  # one wait for a proxy that is away is enough: its timeouts will end the others
            except AjetError:
                continue
        for thread, ended in self._workers:
            if thread.ident is not None:
                ended.wait(max(0.0, until - time.monotonic()))
        self._tell_of_what_is_left(aborted)

    def _tell_of_what_is_left(self, aborted: Collection[str]) -> None:
        """Tells of what has begun and has not ended. The proxy has acknowledged that some of it is `aborted`."""
        with self._lock:
            left = list(self._open.values())
        for begun in left:
            known = begun.episode.id in aborted
            error = Conflict(INTERRUPTED if known else f"{INTERRUPTED}, and the proxy did not say what becomes of this")
            seconds = time.monotonic() - begun.started
            result = result_of(begun.turn.rollout, begun.task, begun.episode, error, seconds)
            self._keep(begun, replace(result, outcome="aborted") if known and result.outcome == "failed" else result)

    def _keep(self, begun: Begun, result: RunResult) -> None:
        """Tells of a result, unless that of `begun` was told already."""
        with self._lock:
            if begun.episode is not None and self._open.pop(begun.episode.id, None) is None:
                return
            self._done[begun.number] = result
        if self._on_result is not None:
            self._on_result(result)

    def _begin(self) -> None:
        ended = threading.Event()
        thread = threading.Thread(target=self._work, args=(ended,), daemon=True)
        self._workers.append((thread, ended))
        start(thread)

    def _work(self, ended: threading.Event) -> None:
        try:
            while (begun := self._roll_out()) is not None:
                if begun is LATER:
                    time.sleep(WANTED_S)
                elif isinstance(begun, Begun):
                    self._tell(begun)
        except BaseException as error:  # the caller's own: a task without a name, a callback that raised
            self._fault = error
        finally:
            ended.set()

    def _tell(self, begun: Begun) -> None:
        """Has the agent play what has begun, and tells what came of it."""
        error = begun.error
        if begun.episode is not None:
            error = self._play(begun.turn.rollout, begun.episode)
        seconds = time.monotonic() - begun.started
        result = result_of(begun.turn.rollout, begun.task, begun.episode, error, seconds)
        with self._lock:
            result = self._ended(begun.turn, result, error)
        self._keep(begun, result)
        if self._how.wanted and not result.ok:
            time.sleep(WANTED_S)

    def _roll_out(self) -> Begun | Later | None:
        """The next rollout, begun; None if there is none. If another thread must not open an episode before this one
        has, it waits for its turn."""
        with self._turn:
            turn = self._client.drive(self._take())
            if not isinstance(turn, Turn):
                return turn
            number = next(self._numbers)
            if self.source.serial and not turn.waits:
                return self._begun(turn, number)
        return self._begun(turn, number)

    def _begun(self, turn: Turn, number: int) -> Begun | Later:
        """`turn` with its episode, or what prevents that, or when it will be asked for again."""
        started, body = time.monotonic(), self._opening(turn)
        try:
            opened = self._opened(body)
        except KeyboardInterrupt:
            raise
        except BaseException as caught:
            later = self._comes_later(turn, body, caught, started)
            return later or Begun(turn, number, body.task or "", started, error=caught)
        self._has_begun(turn, body, opened)
        episode = Episode(self._client, opened)
        episode.infra = self._how.infra
        begun = Begun(turn, number, body.task or "", started, episode)
        with self._lock:
            self._open[episode.id] = begun
        return begun

    def _opened(self, body: routes.OpenEpisode) -> Opened:
        if self._how.member is None:
            return self._client.drive(opening(self._client.target, body))
        opened: Opened = self._how.member.open(body)
        return opened

    def _play(self, rollout: Rollout, episode: Episode) -> BaseException | None:
        """Has the agent play an open episode, and settles it. Returns what the agent raised."""
        try:
            with episode:
                if self._stopped:
                    episode.abort(INTERRUPTED)
                else:
                    value = self._agent(rollout.task, episode)
                    if value is not None:
                        self._client.drive(episode.returned(value))
        except KeyboardInterrupt:
            raise
        except BaseException as caught:  # as SystemExit is, or what an event loop of the agent's own was cancelled with
            return caught
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
    members: Mapping[str, str] | None = None, teachers: Mapping[str, str] | None = None,
    eval: bool = False,
    wanted: bool = False,
    play: str | None = None,
    epochs: int = 1,
    retries: int = RETRIES,
    infra: tuple[type[BaseException], ...] = (),
    on_result: Callable[[RunResult], None] | None = None,
    client_name: str | None = None,
    lane: str | None = None,
    revision: str | None = None,
    replace_older: bool = False,
    proxy_url: str | None = None, api_key: str | None = None, deadline: float = DEADLINE_S,
) -> RunResults:
    """Runs ``agent(task, episode)`` `repeat` times for each task, up to `parallel` at once, each in its own thread.

    What the agent returns is the episode's final reward. None means that it rewarded or aborted the episode itself; one
    that it left without a reward is aborted. Whatever the agent raises aborts its episode and is recorded in the
    results. `name` turns a task into its name; `on_result` is called as each rollout ends, by the thread that ran it. A
    list in which a task has no name is refused before any task is begun. KeyboardInterrupt aborts the open episodes and
    is raised again. `model`, `members` and `teachers` are those of `ajet_sdk.episode`.

    With `wanted` (and `eval`), only the evaluation episodes are played that a trainer wants, and this ends by an
    interrupt alone. Each evaluation goes through the tasks from the first on. Programs that share one go through them
    together, if all have the same tasks and the same `repeat`.

    If an attempt at the model went unanswered, the world failed, and not the agent, whatever it returns or raises. So
    say an exception of one of the classes `infra`, a client's error of connection or server, a proxy that cannot be
    reached, and ``abort(cause="infra")``. Such a rollout is played again, up to `retries` times, and each attempt has a
    result of its own. A final reward that was given stands.

    With `play`, a name of your own, the tasks are a data set that is played `epochs` times. The proxy knows what is
    missing of it, so a run that is killed goes on where it was. Whatever discards an episode, its rollout is played
    again, `retries` times by this run and again by the next one.

    This process is a client of the proxy while it runs, under `client_name` or a name of its own. If it dies, what it
    has open is discarded. Another one of its name ends it with a `Conflict`. `lane` is the kind of its tasks; unset,
    it follows from their names. `revision` names the code of agent and reward; unset, that is a digest of the file of
    `agent`. With `replace_older`, what waits in the lane and was played under another revision is discarded.
    """
    body = routes.OpenEpisode(None, model, agent_name, eval, members=members, teachers=teachers)
    code = of_agent(agent)
    with Client(proxy_url, api_key, deadline=deadline) as client:
        own = membership(
            client, Membership, program=code.name, name=client_name, lane=lane, replace_older=replace_older,
            revision=told(code() if revision is None else revision, code),
        )
        how = How(wanted, play, epochs, retries, infra, lane, own)
        with own:
            return Rollouts(client, agent, tasks, repeat, parallel, body, name, on_result, how).run()
