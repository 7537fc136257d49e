"""Runs agents that block: each worker of a run has a thread of its own in which it calls what the caller gave.

They are daemon threads, because an agent that hangs must not keep an interrupted program alive.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ajet_sdk.blocking import Client, nothing, wait
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.play.blocking import Episode
from ajet_sdk.play.options import RunOptions
from ajet_sdk.play.results import RunResults
from ajet_sdk.play.rollouts import Hands, Rollouts, member_of


class ThreadHands(Hands):
    """Calls one function after the other in one thread, which begins with the first and ends with its worker."""

    episode = Episode

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        value, error = await self.play(function, *args)
        if error is not None:
            raise error
        return value

    async def play(self, agent: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
        if self._thread is None:
            thread = threading.Thread(target=self._work, daemon=True)
            start(thread)
            self._thread = thread
        loop = asyncio.get_running_loop()
        self._running = loop.create_future()
        self._calls.put((loop, self._running, agent, args))
        outcome: tuple[Any, BaseException | None] = await asyncio.shield(self._running)
        return outcome

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            loop, running, function, args = asked
            try:
                outcome: tuple[Any, BaseException | None] = function(*args), None
            except BaseException as error:
                outcome = None, error
            loop.call_soon_threadsafe(running.set_result, outcome)
            del asked, running, function, args, outcome  # so that nothing of them lives as long as the thread

    async def rest(self, seconds: float) -> None:
        if self._running is not None:
            await asyncio.wait([self._running], timeout=seconds)

    def free(self) -> None:
        self._calls.put(None)


def start(thread: threading.Thread) -> None:
    """Starts `thread`; `BadRequest` if this process can have no more threads, `AjetError` if it ends."""
    try:
        thread.start()
    except RuntimeError as error:
        if not threading.main_thread().is_alive():
            raise AjetError("the main thread has ended, and no thread begins after it: have it wait") from None
        raise BadRequest(f"parallel is too much for this machine: {error}", param="parallel") from None


def carried_out(rollouts: Rollouts, options: RunOptions, stop: Callable[[], None] = nothing) -> RunResults:
    """The results of a run. On an interrupt it says so, and calls `stop`, before what is open is aborted."""

    def interrupted() -> None:
        still_open = rollouts.interrupt()
        options.say(f"interrupted: {'aborting the open episodes' if still_open else 'no episode was open'}")
        stop()

    return wait(rollouts.run(), interrupted)


def run(
    agent: Callable[[Any, Episode], Any], tasks: Iterable[Any], repeat: int = 8, parallel: int = 32, **options: Any
) -> RunResults:
    """Runs ``agent(task, episode)`` `repeat` times for each task, up to `parallel` at once, each in its own thread. See
    `ajet_sdk.aio.run` for what becomes of an episode; `options` are the fields of `ajet_sdk.play.options.RunOptions`.
    """
    if inspect.iscoroutinefunction(agent):
        raise BadRequest("the agent is a coroutine function: run it by ajet_sdk.aio.run", param="agent")
    how = RunOptions(repeat=repeat, parallel=parallel, **options)
    with Client(how.proxy_url, how.api_key, deadline=how.deadline) as client:
        member = member_of(client.core, agent, how)
        return carried_out(Rollouts(client.core, agent, tasks, how, member, hands=ThreadHands), how)
