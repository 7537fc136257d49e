"""Pausing engines while weights change. Calls in flight go on after it.

A gate of an engine that cannot be paused stays closed until the trainer drains or opens it. An engine that died, or
whose host is gone, does not keep the others from being paused and going on.

An engine is told to go on until it says that it does, for `WAKE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ajet_proxy.io.engines.engine import Engine
from ajet_proxy.io.engines.vllm import UNREACHABLE, Refused, over, session
from ajet_sdk.errors import EngineError

logger = logging.getLogger(__name__)

WAKE_S, PAUSE_S = 6.0, 0.2
"""For how long an engine is told to go on, and the pause before it is told again, which doubles."""


class EngineControl:
    """Pauses engines, and lets them go on; `key` is the engines' own API key."""

    def __init__(self, *, key: str | None = None, limit_s: float = 60.0) -> None:
        self._key, self._limit_s = key, limit_s

    async def pause(self, urls: tuple[str, ...]) -> None:
        """Pause every engine; `EngineError` if one did not, or if none could be reached. One of several that cannot be
        reached is passed over, since it answers no call of ours either."""
        errors = await self._all(urls, lambda engine: engine.pause())
        for error in errors:
            if error.code != UNREACHABLE or len(errors) == len(urls):
                raise error
            logger.warning("weights change without it: %s", error.message)

    async def resume(self, urls: tuple[str, ...], version: int | None) -> list[str]:
        """Let every engine go on, and tell it the `version` of its weights, so that it can say which of them sampled a
        token. None tells it nothing, since it has weights of several models. Returns what is wrong with those that did
        not go on; `EngineError` if none did."""

        async def wake(engine: Engine) -> None:
            try:
                if version is not None:
                    await engine.name_version(version)
            except EngineError as error:
                logger.info("an engine does not know its version, so time tells its calls apart: %s", error.message)
            await self._wake(engine)

        errors = await self._all(urls, wake)
        if errors and len(errors) == len(urls):
            raise errors[0]
        return [error.message for error in errors]

    async def _wake(self, engine: Engine) -> None:
        """Tell an engine to go on until it does. `EngineError` if it does not."""
        loop = asyncio.get_running_loop()
        give_up, pause = loop.time() + WAKE_S, PAUSE_S
        while True:
            try:
                return await engine.resume()
            except Refused:
                raise
            except EngineError:
                if loop.time() + pause > give_up:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    async def _all(self, urls: tuple[str, ...], tell: Callable[[Engine], Awaitable[None]]) -> list[EngineError]:
        async with session(self._key, self._limit_s) as asking:
            answers = await asyncio.gather(*(tell(over(asking, url)) for url in urls), return_exceptions=True)
        errors = [answer for answer in answers if answer is not None]
        for error in errors:
            if not isinstance(error, EngineError):
                raise error
        return [error for error in errors if isinstance(error, EngineError)]
