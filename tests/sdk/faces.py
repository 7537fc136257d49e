"""The two faces of the SDK behind one interface, so that each scenario is written once and run on both.

The blocking face is called through wrappers that only look asynchronous; it blocks the loop, which runs nothing else.
"""

from __future__ import annotations

import inspect
from typing import Any

import ajet_sdk
from ajet_sdk import aio


class Blocking:
    """`ajet_sdk` called as if it were `ajet_sdk.aio`."""

    name = "sync"

    async def reward(self, *args: Any, **more: Any) -> None:
        ajet_sdk.reward(*args, **more)

    async def abort(self, *args: Any, **more: Any) -> None:
        ajet_sdk.abort(*args, **more)

    def episode(self, *args: Any, **more: Any) -> BlockingEpisode:
        return BlockingEpisode(lambda: ajet_sdk.episode(*args, **more))

    async def run(self, agent: Any, *args: Any, **more: Any) -> Any:
        """`agent` is a coroutine function that never really waits."""

        def blocking(task: Any, episode: Any) -> Any:
            step = agent(task, BlockingEpisode.of(episode))
            try:
                step.send(None)
            except StopIteration as stop:
                return stop.value
            raise AssertionError("the agent waited")

        return ajet_sdk.run(blocking, *args, **more)


class BlockingEpisode:
    """An `ajet_sdk.Episode` whose methods look asynchronous."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._episode: Any = None

    @classmethod
    def of(cls, episode: Any) -> BlockingEpisode:
        out = cls(None)
        out._episode = episode
        return out

    def __await__(self) -> Any:
        self._episode = self._make()
        return self
        yield  # what makes this a generator, as await needs

    async def __aenter__(self) -> BlockingEpisode:
        if self._episode is None:
            self._episode = self._make()
        self._episode.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._episode.__exit__(*error)

    async def aclose(self) -> None:
        self._episode.close()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._episode, name)
        if not inspect.ismethod(found) or name == "env":
            return found

        async def call(*args: Any, **more: Any) -> Any:
            return found(*args, **more)

        return call


class Async:
    """`ajet_sdk.aio` as it is."""

    name = "aio"
    reward = staticmethod(aio.reward)
    abort = staticmethod(aio.abort)
    episode = staticmethod(aio.episode)
    run = staticmethod(aio.run)


FACES = [Blocking(), Async()]
