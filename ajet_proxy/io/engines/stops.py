"""Which tokens stop a model: learned from answers that ended, and asked where one is in doubt (`core.protocol.ending`).

The question goes out as the agent's request did, once for each token that an answer in doubt ended with. The end of
that answer waits for it, and no longer than `PATIENCE_S`. What an engine told is kept as long as the model has the same
engines, and none of them is found gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.protocol import ending
from ajet_proxy.core.trajectory.call import Captured
from ajet_proxy.io.engines.upstream import EngineRequest, Standing, Upstream, told
from ajet_sdk.errors import AjetError

PATIENCE_S = 5.0


class Stops:
    """Tells of whole choices whether they were cut."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.seen: set[tuple[str, int]] = set()
        """The models, each with a token at which an answer of theirs has stopped."""
        self._told: dict[str, tuple[Standing, dict[int, bool | None]]] = {}

    async def is_cut(self, choice: Captured, request: EngineRequest, asked: Mapping[str, Any]) -> bool:
        """Whether `choice` was cut, an answer of some tokens to `request`, whose fields are `asked`. Its finish reason
        leaves that in doubt."""
        if ending.names_stop(choice, asked):
            return False
        model, last = request.model or choice.model, choice.token_ids[-1]
        stops = True if (model, last) in self.seen else await self._stops(model, last, request)
        return ending.is_full(choice, request.target.partition("?")[0], asked) if stops is None else not stops

    async def _stops(self, model: str, token: int, request: EngineRequest) -> bool | None:
        """Whether `token` stops `model`, as its engine says; None if it does not say."""
        standing = self._upstream.standing(model)
        known, told_of = self._told.get(model, ((), {}))
        if known != standing:
            _, told_of = self._told[model] = standing, {}
        if token not in told_of:
            told_of[token] = None
            path, question = ending.question(model, token)
            with suppress(AjetError, aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    status, body = await told(self._upstream, replace(request, target=path, body=question))
                    told_of[token] = ending.answered(token, body) if status == 200 else None
        return told_of[token]
