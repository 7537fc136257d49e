"""Freezing engines while weights change: vLLM's ``/pause?mode=keep`` and ``/resume``.

Calls in flight stop between two tokens and go on after `resume`; their clients notice nothing but time. The routes
exist when vLLM runs with ``VLLM_SERVER_DEV_MODE=1``. An engine without them is an error that says so. The gate then
stays closed until the trainer drains or opens it. An engine that died, or whose host is gone, does not keep the others
from being frozen and going on.

Each request has a connection of its own: a server may close one after an error without a word, and what is sent over it
next is lost. An engine is told to go on until it says that it does, for `WAKE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from ajet_sdk.errors import EngineError

logger = logging.getLogger(__name__)

FREEZE = "/pause?mode=keep&clear_cache=false"
"""What is computed for the calls in flight stays: vLLM would otherwise compute it all again before they go on."""

UNREACHABLE = "engine_unreachable"
WAKE_S, PAUSE_S = 6.0, 0.2
"""For how long an engine is told to go on, and the pause before it is told again, which doubles."""


class _Final(EngineError):
    """What no other attempt would change: a refusal, or nobody who listens."""


class EngineControl:
    """Speaks to the engines' control routes; `key` is the engines' own API key."""

    def __init__(self, *, key: str | None = None, limit_s: float = 60.0) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=limit_s)

    async def pause(self, urls: tuple[str, ...]) -> None:
        """Freeze every engine; `EngineError` if one did not, or if none could be reached. One of several that cannot be
        reached is passed over, since it answers no call of ours either."""

        async def freeze(session: aiohttp.ClientSession, url: str) -> None:
            await self._post(session, url + FREEZE)

        errors = await self._all(urls, freeze)
        for error in errors:
            if error.code != UNREACHABLE or len(errors) == len(urls):
                raise error
            logger.warning("weights change without it: %s", error.message)

    async def resume(self, urls: tuple[str, ...], version: int | None) -> list[str]:
        """Let every engine go on, and tell it the `version` of its weights, so that it can say which of them sampled a
        token. None tells it nothing, since it has weights of several models. Returns what is wrong with those that did
        not go on; `EngineError` if none did."""

        async def wake(session: aiohttp.ClientSession, url: str) -> None:
            try:
                if version is not None:
                    await self._post(session, url + "/update_weight_version", {"new_version": str(version)})
            except EngineError as error:
                logger.info("an engine does not know its version, so time tells its calls apart: %s", error.message)
            await self._wake(session, url)

        errors = await self._all(urls, wake)
        if errors and len(errors) == len(urls):
            raise errors[0]
        return [error.message for error in errors]

    async def _wake(self, session: aiohttp.ClientSession, url: str) -> None:
        """Tell an engine to go on until it does. `EngineError` if it does not."""
        loop = asyncio.get_running_loop()
        give_up, pause = loop.time() + WAKE_S, PAUSE_S
        while True:
            try:
                await self._post(session, url + "/resume")
                if not await self._frozen(session, url):
                    return
                fault = EngineError(f"engine {url} stays frozen: start it again", code="engine_cannot_pause")
            except _Final:
                raise
            except EngineError as error:
                fault = error
            if loop.time() + pause > give_up:
                raise fault
            await asyncio.sleep(pause)
            pause *= 2

    async def _frozen(self, session: aiohttp.ClientSession, url: str) -> bool:
        """Whether the engine says that it is frozen. One that does not tell is taken by its word that it goes on."""
        try:
            async with session.get(url + "/is_paused", allow_redirects=False) as answer:
                told = await answer.json(content_type=None) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return True
        return isinstance(told, dict) and told.get("is_paused") is True

    async def _all(
        self, urls: tuple[str, ...], tell: Callable[[aiohttp.ClientSession, str], Awaitable[None]]
    ) -> list[EngineError]:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector) as session:
            answers = await asyncio.gather(*(tell(session, url) for url in urls), return_exceptions=True)
        errors = [answer for answer in answers if answer is not None]
        for error in errors:
            if not isinstance(error, EngineError):
                raise error
        return [error for error in errors if isinstance(error, EngineError)]

    async def _post(self, session: aiohttp.ClientSession, url: str, body: Mapping[str, str] | None = None) -> None:
        try:
            async with session.post(url, json=body, allow_redirects=False) as answer:
                if answer.status == 404:
                    raise _Final(
                        f"engine has no {url.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1, "
                        "or use gate_mode drain", code="engine_cannot_pause",
                    )
                if answer.status >= 300:
                    kind = EngineError if answer.status >= 500 else _Final
                    raise kind(f"engine answered {answer.status} to {url}", code="engine_cannot_pause")
        except (aiohttp.ClientError, TimeoutError) as error:
            said = f"engine {url} cannot be reached: {str(error) or 'no answer in time'}"
            if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
                raise _Final(said, code=UNREACHABLE) from error
            raise EngineError(said, code=UNREACHABLE) from error
