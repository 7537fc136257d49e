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
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ajet_sdk import routes
from ajet_sdk.client import connected, no_reply
from ajet_sdk.episodes import EpisodeLife, Opened, aborting, current_episode, opening, rewarding
from ajet_sdk.errors import BadRequest
from ajet_sdk.operations import DEADLINE_S, NoReply, Patience, Reply, Send, Sleep, T, Talk, Target, exchange
from ajet_sdk.results import RunResult, RunResults
from ajet_sdk.rollouts import Attempt, attempts_at, check_counts, check_names, name_of, result_of, workers_for

if TYPE_CHECKING:
    import httpx


class Client:
    """The async `ajet_sdk.Client`; it belongs to the event loop that first uses it."""

    def __init__(
        self,
        proxy_url: str | None = None,
        api_key: str | None = None,
        *,
        deadline: float = DEADLINE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.target = Target.resolve(proxy_url, api_key)
        self.patience = Patience(deadline)
        self._transport = transport
        self._http: httpx.AsyncClient | None = None

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
        return await self.drive(exchange(self.target, name, body, patience=self.patience, id=id, query=query))

    async def _perform(self, effect: Send | Sleep) -> Reply | NoReply | None:
        import httpx

        if isinstance(effect, Sleep):
            await asyncio.sleep(effect.seconds)
            return None
        if self._http is None:
            self._http = connected(httpx.AsyncClient, self.target, self._transport)
        try:
            answer = await self._http.request(
                effect.method, effect.url, headers=effect.headers, content=effect.content, timeout=effect.timeout
            )
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Episode(EpisodeLife):
    """The async `ajet_sdk.Episode`; make it with `episode`."""

    def __init__(self, client: Client, opened: Opened, *, owns_client: bool = False) -> None:
        super().__init__(opened, client.target, client.patience)
        self._client = client
        self._owns_client = owns_client

    async def reward(
        self,
        value: float,
        *,
        call: str | None = None,
        agent: str | None = None,
        final: bool = True,
        note: str | None = None,
    ) -> None:
        """Gives a finite reward, to the whole episode or to one `call` or `agent` of it; a `final` one seals it."""
        await self._client.drive(self._reward(value, call, agent, final, note))

    async def seal(self) -> None:
        """Says that no more calls or rewards will come."""
        await self._client.drive(self._seal())

    async def abort(self, reason: str | None = None) -> None:
        """Gives the episode up: none of it is trained."""
        await self._client.drive(self._abort(reason))

    async def heartbeat(self) -> None:
        """Says that the agent is alive though it calls no model, so that the episode does not idle out."""
        await self._client.drive(self._heartbeat())

    async def record(self, *, tokens: bool = False) -> dict[str, Any]:
        """The episode as the proxy has it, with its calls; with `tokens`, also their ids and logprobs."""
        return await self._client.drive(self._record(tokens))

    async def aclose(self) -> None:
        """Lets go of the connections; the episode itself stays as it is."""
        if self._owns_client:
            await self._client.aclose()

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._client.drive(self._leave(error))
        finally:
            await self.aclose()


class Opening:
    """An episode about to be opened: ``await`` it, or enter it with ``async with``."""

    def __init__(self, client: Client, body: routes.OpenEpisode) -> None:
        self._client = client
        self._body = body
        self._episode: Episode | None = None

    def __await__(self) -> Generator[Any, None, Episode]:
        return self._open().__await__()

    async def _open(self) -> Episode:
        client = self._client
        try:
            opened = await client.drive(opening(client.target, self._body, client.patience))
        except BaseException:
            await client.aclose()
            raise
        return Episode(client, opened, owns_client=True)

    async def __aenter__(self) -> Episode:
        self._episode = await self._open()
        return self._episode

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._episode is not None:
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
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> Opening:
    """See `ajet_sdk.episode`; the answer is for ``await`` or ``async with``."""
    body = routes.OpenEpisode(task, model, agent, eval, metadata or {}, idle_timeout, wall_timeout, members)
    return Opening(Client(proxy_url, api_key, deadline=deadline), body)


async def reward(
    value: float,
    *,
    call: str | None = None,
    agent: str | None = None,
    final: bool = True,
    note: str | None = None,
    episode: str | None = None,
    deadline: float = DEADLINE_S,
) -> None:
    """See `ajet_sdk.reward`."""
    found = current_episode(episode)
    async with Client(deadline=deadline) as client:
        await client.drive(
            rewarding(
                client.target, found, value, call=call, agent=agent, final=final, note=note, patience=client.patience
            )
        )


async def abort(reason: str | None = None, *, episode: str | None = None, deadline: float = DEADLINE_S) -> None:
    """See `ajet_sdk.abort`."""
    found = current_episode(episode)
    async with Client(deadline=deadline) as client:
        await client.drive(aborting(client.target, found, reason, client.patience))


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
    eval: bool = False,
    on_result: Callable[[RunResult], None] | None = None,
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> RunResults:
    """See `ajet_sdk.run`; the agent is a coroutine function, and `parallel` of them run at once in this event loop."""
    check_counts(repeat, parallel)
    check_names(tasks, name)

    def opened_for(task: Any) -> routes.OpenEpisode:
        return routes.OpenEpisode(task=name(task), model=model, agent=agent_name, eval=eval)

    async with Client(proxy_url, api_key, deadline=deadline) as client:
        rollouts = _Rollouts(client, agent, attempts_at(tasks, repeat), opened_for, on_result)
        return await rollouts.run(workers_for(tasks, repeat, parallel))


class _Rollouts:
    """One run of `agent` at the `attempts`; `ajet_sdk.rollouts.Rollouts` with tasks in place of threads."""

    def __init__(
        self, client: Client, agent: Agent, attempts: Iterator[Attempt],
        opened_for: Callable[[Any], routes.OpenEpisode], on_result: Callable[[RunResult], None] | None,
    ) -> None:
        self._client, self._agent, self._attempts, self._opened_for = client, agent, attempts, opened_for
        self._on_result = on_result
        self._done: dict[int, RunResult] = {}
        self._stopped = False

    async def run(self, parallel: int) -> RunResults:
        workers = [asyncio.ensure_future(self._work()) for _ in range(parallel)]
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
        return RunResults(tuple(self._done[number] for number in sorted(self._done)))

    async def _work(self) -> None:
        for attempt in self._attempts:
            if self._stopped:
                return
            # a task of its own, so that an agent that cancels the task it runs in ends nothing else
            result = self._done[attempt.number] = await asyncio.ensure_future(self._attempt(attempt))
            if self._on_result is not None:
                self._on_result(result)

    async def _attempt(self, attempt: Attempt) -> RunResult:
        started, body = time.monotonic(), self._opened_for(attempt.task)
        found: Episode | None = None
        error: BaseException | None = None
        try:
            client = self._client
            found = Episode(client, await client.drive(opening(client.target, body, client.patience)))
            async with found:
                answer = self._agent(attempt.task, found)
                if not inspect.isawaitable(answer):
                    raise BadRequest("the agent is no coroutine function: run it by ajet_sdk.run", param="agent")
                value = await answer
                if value is not None:
                    await found.reward(value)
        except BaseException as caught:
            ours = (KeyboardInterrupt, GeneratorExit, *([asyncio.CancelledError] if self._stopped else []))
            if isinstance(caught, ours):
                raise
            error = caught  # a CancelledError too: the agent made it
        return result_of(attempt, body.task or "", found, error, time.monotonic() - started)
