"""Freezing engines while weights change: vLLM's ``/pause?mode=keep`` and ``/resume``.

Calls in flight stop between two tokens and go on after `resume`; their clients notice nothing but time. The routes
exist when vLLM runs with ``VLLM_SERVER_DEV_MODE=1``; an engine without them is an error that says so, and the gate
then stays closed until the trainer drains or opens it. An engine that died while it was frozen does not keep the
others from going on.
"""

from __future__ import annotations

import asyncio

import aiohttp

from ajet_sdk.errors import EngineError


class EngineControl:
    """Speaks to the engines' control routes; `key` is the engines' own API key."""

    def __init__(self, *, key: str | None = None, limit_s: float = 60.0) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=limit_s)

    async def pause(self, urls: tuple[str, ...]) -> None:
        """Freeze every engine; `EngineError` if one did not."""
        for error in await self._all(urls, "/pause?mode=keep"):
            raise error

    async def resume(self, urls: tuple[str, ...]) -> list[str]:
        """Let every engine go on; what is wrong with those that did not. `EngineError` if none did."""
        errors = await self._all(urls, "/resume")
        if errors and len(errors) == len(urls):
            raise errors[0]
        return [error.message for error in errors]

    async def _all(self, urls: tuple[str, ...], route: str) -> list[EngineError]:
        async with aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as session:
            answers = await asyncio.gather(*(self._post(session, url, route) for url in urls), return_exceptions=True)
        errors = [answer for answer in answers if answer is not None]
        for error in errors:
            if not isinstance(error, EngineError):
                raise error
        return [error for error in errors if isinstance(error, EngineError)]

    async def _post(self, session: aiohttp.ClientSession, url: str, route: str) -> None:
        try:
            async with session.post(url + route) as answer:
                if answer.status == 404:
                    raise EngineError(
                        f"engine {url} has no {route.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1, "
                        "or use gate_mode drain", code="engine_cannot_pause",
                    )
                if answer.status >= 400:
                    raise EngineError(f"engine {url} answered {answer.status} to {route}", code="engine_cannot_pause")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"engine {url} cannot be reached: {error}", code="engine_unreachable") from error
