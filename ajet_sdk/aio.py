"""The async twin of `ajet_sdk`: the same operations (see `ajet_sdk.operations`), carried out with asyncio.

::

    await aio.reward(1.0)
    async with aio.episode(task="gsm8k/17") as ep:
        AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
        await ep.reward(1.0)
    results = await aio.run(agent, tasks)       # async agent(task, episode) -> reward

Cancelling is what KeyboardInterrupt is to the blocking face: open episodes are aborted on the way out.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from typing import Any, Concatenate

from ajet_sdk import routes
from ajet_sdk.client import ClientBase, no_reply
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.operations import DEADLINE_S, NoReply, Reply, Send, Sleep, T, Talk, Target, request
from ajet_sdk.play import episode as episodes
from ajet_sdk.play.data_set import PlayedRollouts
from ajet_sdk.play.episode import EpisodeLife, Opened, P, opening, shown_as
from ajet_sdk.play.membership import OPENINGS, MembershipLife, is_gone, membership, own_name
from ajet_sdk.play.results import RunResult, RunResults
from ajet_sdk.play.revision import of_agent, told
from ajet_sdk.play.rollouts import RETRIES, WANTED_S, Begun, How, RolloutsPlan, name_of, result_of
from ajet_sdk.play.schedule import LATER, Later, Rollout, Turn


class Client(ClientBase):
    """The async `ajet_sdk.Client`; it belongs to the event loop that first uses it."""

    async def drive(self, talk: Talk[T]) -> T:
        """Carries an operation out to its end."""
        outcome: Reply | NoReply | None = None
        while True:
            try:
                effect = talk.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            outcome = await self._perform(effect)

    async def ask(self, name: str, body: Any = None, *, id: str | None = None, **query: Any) -> Reply:
        """The acknowledged answer of the route called `name`; see `ajet_sdk.Client.ask`."""
        return await self.drive(request(self.target, name, body, id=id, query=query))

    async def _perform(self, effect: Send | Sleep) -> Reply | NoReply | None:
        import httpx

        if isinstance(effect, Sleep):
            await asyncio.sleep(effect.seconds)
            return None
        try:
            answer = await self._connections(httpx.AsyncClient).request(**effect._asdict())
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
            return no_reply(self.target, error)
        return Reply(answer.status_code, answer.headers, answer.content)

    async def aclose(self) -> None:
        """Lets go of the connections; used again, the client makes new ones."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _awaited(
    operation: Callable[Concatenate[Any, P], Talk[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of `Episode` that carries out an operation of `EpisodeLife`."""

    async def method(self: Episode, /, *args: P.args, **more: P.kwargs) -> T:
        return await self._client.drive(operation(self, *args, **more))

    return shown_as(operation, method)


class Episode(EpisodeLife):
    """The async `ajet_sdk.Episode`; make it with `episode`."""

    _client: Client
    reward = _awaited(EpisodeLife._reward)
    seal = _awaited(EpisodeLife._seal)
    abort = _awaited(EpisodeLife._abort)
    heartbeat = _awaited(EpisodeLife._heartbeat)
    record = _awaited(EpisodeLife._record)

    async def aclose(self) -> None:
        """Lets go of the connections; the episode itself stays as it is."""
        if self._owns_client:
            await self._client.aclose()

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            await self._client.drive(self._leave(error))
        finally:
            await self.aclose()


class Opening:
    """An episode about to be opened: ``await`` it, or enter it with ``async with``."""

    def __init__(self, client: Client, body: routes.OpenEpisode) -> None:
        self._client, self._body = client, body

    def __await__(self) -> Generator[Any, None, Episode]:
        return self._open().__await__()

    async def _open(self) -> Episode:
        client = self._client
        try:
            opened = await client.drive(opening(client.target, self._body))
        except BaseException:
            await client.aclose()
            raise
        return Episode(client, opened, owns_client=True)

    async def __aenter__(self) -> Episode:
        self._episode = await self._open()
        return self._episode

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._episode.__aexit__(kind, error, trace)


def episode(
    task: str | None = None,
    *,
    model: str | None = None,
    agent: str | None = None,
    eval: bool = False,
    metadata: Mapping[str, Any] | None = None,
    idle_timeout: float | None = None,
    wall_timeout: float | None = None,
    members: Mapping[str, str] | None = None,
    teachers: Mapping[str, str] | None = None,
    client: str | None = None,
    revision: str | None = None,
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> Opening:
    """See `ajet_sdk.episode`; the answer is for ``await`` or ``async with``."""
    body = routes.OpenEpisode(
        task, model, agent, eval, metadata or {}, idle_timeout, wall_timeout, members, client=client, revision=revision,
        teachers=teachers,
    )
    return Opening(Client(proxy_url, api_key, deadline=deadline), body)


def _once(operation: Callable[Concatenate[Target, P], Talk[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The function that carries out an operation of this process's episode over connections of its own."""

    async def function(*args: P.args, **more: P.kwargs) -> T:
        async with Client() as client:
            return await client.drive(operation(client.target, *args, **more))

    return shown_as(operation, function, skipped=1)


reward, abort = _once(episodes.reward_own), _once(episodes.abort_own)

class Membership(MembershipLife):
    """The async `Membership`. A task of the event loop beats, so an agent that blocks the loop for
    longer than the client's time makes it be gone."""

    _client: Client

    def __init__(self, *args: Any, owns_client: bool = False) -> None:
        super().__init__(*args)
        self._owns_client = owns_client
        self._lock = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def join(self) -> str:
        """See `ajet_sdk.play.membership.Membership`."""
        tries, known = self._tries, self.id
        if known is not None:
            return known
        async with self._lock:
            if self.id is None:
                with self._trying(tries):
                    self.id = await self._client.drive(self._join())
            if self._beating is None:
                self._beating = asyncio.ensure_future(self._beat_on())
            return self.id

    async def open(self, body: routes.OpenEpisode) -> Opened:
        """Opens an episode that this client plays."""
        tries = 0
        while True:
            known, tries = await self.join(), tries + 1
            try:
                return await self._client.drive(self._opening(known, body))
            except AjetError as error:
                if not is_gone(error) or tries == OPENINGS:
                    raise
                self._lost(known)

    async def beat(self) -> None:
        """Says that this client is there, and joins again if it is gone."""
        known = await self.join()
        try:
            await self._client.drive(self._beat(known))
        except AjetError as error:
            if not is_gone(error):
                raise
            self._lost(known)
            await self.join()

    async def leave(self) -> None:
        """Leaves: what it has open is discarded."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self._client.drive(self._leave())
        if self._owns_client:
            await self._client.aclose()

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self.beat_s)
            with self._beaten():
                await self.beat()

    async def __aenter__(self) -> Membership:
        if self._owns_client:
            await self.join()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()


def join(
    name: str | None = None, *, lane: str | None = None, revision: str | None = None, ttl_s: float = 30.0,
    replace_older: bool = False, proxy_url: str | None = None, api_key: str | None = None, deadline: float = DEADLINE_S,
) -> Membership:
    """See `ajet_sdk.join`; the answer is for ``async with``."""
    body = routes.Join(name or own_name("python"), revision, lane, ttl_s, replaces_older=replace_older)
    return Membership(Client(proxy_url, api_key, deadline=deadline), body, owns_client=True)


Agent = Callable[[Any, Episode], Awaitable[Any]]


async def run(
    agent: Agent,
    tasks: Iterable[Any],
    repeat: int = 8,
    parallel: int = 32,
    *,
    name: Callable[[Any], str] = name_of,
    model: str | None = None,
    agent_name: str | None = None,
    members: Mapping[str, str] | None = None,
    teachers: Mapping[str, str] | None = None,
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
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> RunResults:
    """See `ajet_sdk.run`; the agent is a coroutine function, and `parallel` of them run at once in this event loop."""
    body = routes.OpenEpisode(None, model, agent_name, eval, members=members, teachers=teachers)
    code = of_agent(agent)
    async with Client(proxy_url, api_key, deadline=deadline) as client:
        own = membership(
            client, Membership, program=code.name, name=client_name, lane=lane, replace_older=replace_older,
            revision=told(code() if revision is None else revision, code),
        )
        how = How(wanted, play, epochs, retries, infra, lane, own)
        async with own:
            return await Rollouts(client, agent, tasks, repeat, parallel, body, name, on_result, how).run()


class Rollouts(RolloutsPlan):
    """One run over tasks; `ajet_sdk.play.rollouts.Rollouts` with asyncio's tasks in place of threads."""

    _client: Client

    def __init__(self, *plan: Any) -> None:
        super().__init__(*plan)
        self._turn = asyncio.Lock()

    async def run(self) -> RunResults:
        if isinstance(self.source, PlayedRollouts):
            self._how.on_progress(await self._client.drive(self.source.begin(self._client.target)))
        if self._joins_first:
            await self._how.member.join()
        await self._run()
        if isinstance(self.source, PlayedRollouts):
            self._how.on_progress(await self._client.drive(self.source.finish(self._client.target)))
        return self.results

    async def _run(self) -> None:
        workers = [asyncio.ensure_future(self._work()) for _ in range(self._parallel)]
        try:
            ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
        finally:
            self._stopped = True
            for worker in workers:
                if not getattr(worker, "cancelling", int)():  # a second one would interrupt what the first one aborts
                    worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        # each in a task of its own, so that an agent that cancels the task it runs in ends nothing else
        while (begun := await asyncio.ensure_future(self._roll_out())) is not None:
            if begun is LATER:
                await asyncio.sleep(WANTED_S)
            elif not isinstance(begun, Later):
                await self._tell(*begun)

    async def _tell(self, begun: Begun, error: BaseException | None) -> None:
        """See `ajet_sdk.play.rollouts.Rollouts`."""
        seconds = time.monotonic() - begun.started
        result = result_of(begun.turn.rollout, begun.task, begun.episode, error, seconds)
        result = self._done[begun.number] = self._ended(begun.turn, result, error)
        if self._on_result is not None:
            self._on_result(result)
        if self._how.wanted and not result.ok:
            await asyncio.sleep(WANTED_S)

    async def _roll_out(self) -> tuple[Begun, BaseException | None] | Later | None:
        """The next rollout to its end, with what ended it."""
        async with self._turn:
            turn = await self._client.drive(self._take())
            if not isinstance(turn, Turn):
                return turn
            number = next(self._numbers)
            begun = await self._begun(turn, number) if self.source.serial and not turn.waits else None
        begun = begun or await self._begun(turn, number)
        if not isinstance(begun, Begun):
            return begun
        error = begun.error if begun.episode is None else await self._play(turn.rollout, begun.episode)
        return begun, error

    async def _begun(self, turn: Turn, number: int) -> Begun | Later:
        """See `ajet_sdk.play.rollouts.Rollouts`."""
        started, body = time.monotonic(), self._opening(turn)
        try:
            opened = await self._opened(body)
        except BaseException as caught:
            error = self._theirs(caught)
            later = self._comes_later(turn, body, error, started)
            return later or Begun(turn, number, body.task or "", started, error=error)
        self._has_begun(turn, body, opened)
        episode = Episode(self._client, opened)
        episode.infra = self._how.infra
        return Begun(turn, number, body.task or "", started, episode)

    async def _opened(self, body: routes.OpenEpisode) -> Opened:
        if self._how.member is None:
            return await self._client.drive(opening(self._client.target, body))
        opened: Opened = await self._how.member.open(body)
        return opened

    async def _play(self, rollout: Rollout, found: Episode) -> BaseException | None:
        try:
            async with found:
                answer = self._agent(rollout.task, found)
                if not inspect.isawaitable(answer):
                    raise BadRequest("the agent is not a coroutine function: use ajet_sdk.run", param="agent")
                value = await answer
                if value is not None:
                    await self._client.drive(found.returned(value))
        except BaseException as caught:
            return self._theirs(caught)
        return None

    def _theirs(self, caught: BaseException) -> BaseException:
        """What an agent raised; what ends this run is raised again. A CancelledError may be either."""
        if isinstance(caught, (KeyboardInterrupt, GeneratorExit, *([asyncio.CancelledError] if self._stopped else []))):
            raise caught
        return caught
