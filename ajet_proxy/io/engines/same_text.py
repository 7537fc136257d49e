"""Asks the engine for the text of tokens, to find out which earlier call a prompt says again in other tokens.

Only for ``merge_policy = "repair"``, and only for a prompt that goes on from no earlier call token for token: each
question is a ``POST /detokenize`` to the engine that answered. Whatever goes wrong, nothing is found and the calls stay
apart; the agent's answer does not depend on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.repair import Found, find_same_text
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

TARGET = "/detokenize"
LIMIT_S = 10.0
"""For all questions about one prompt: its answer waits for them."""


class SameText:
    """What the engine that answers `request` makes of tokens."""

    def __init__(self, upstream: Upstream, request: EngineRequest) -> None:
        self._upstream = upstream
        self._request = request

    async def find(self, prompt: Sequence[int], calls: Iterable[Packed], *, model: str) -> Found | None:
        """`core.trajectory.repair.find_same_text`, asked of the engine under the name `model`."""
        search = find_same_text(pack_tokens(prompt), calls)
        try:
            async with asyncio.timeout(LIMIT_S):
                ids = next(search)
                while True:
                    ids = search.send(await self._text(ids, model))
        except StopIteration as ended:
            found: Found | None = ended.value
            return found
        except (AjetError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("whether a prompt of model %s repeats a call was not found out: %s", model, error)
            return None

    async def _text(self, ids: Sequence[int], model: str) -> str:
        body = json.dumps({"model": model, "tokens": ids}).encode()
        answer = await self._upstream.send(replace(self._request, method="POST", target=TARGET, body=body))
        try:
            told = json.loads(await answer.read())
        finally:
            answer.close()
        text = told.get("prompt") if isinstance(told, dict) else None
        if answer.status != 200 or not isinstance(text, str):
            raise ValueError(f"{TARGET} answered {answer.status} without a text")
        return text
