"""Asks the engine that sampled a choice for the logprobs that it did not tell.

The question goes out as the agent's request did, to the same engine and with the same headers. Whatever goes wrong is a
call that is lost and never an error: the agent's answer does not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.protocol import rescoring as scoring
from ajet_proxy.core.trajectory.call import NOT_SCORED, Captured, Lost, Unscored
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""The end of the agent's answer waits for it."""


class Scorer:
    """Scores the choices of one `request`; `cache_salt` is that of its exchange."""

    def __init__(self, upstream: Upstream, request: EngineRequest, cache_salt: Any, metrics: Metrics) -> None:
        self._upstream = upstream
        self._request = request
        self._cache_salt = cache_salt
        self._metrics = metrics

    async def score(self, choice: Unscored) -> Captured | Lost:
        """`choice` with its logprobs."""
        self._metrics.inc("ajet_scored_calls_total")
        model = self._request.model or choice.model
        body = scoring.question(choice, model=model, salt=self._cache_salt)
        try:
            async with asyncio.timeout(LIMIT_S):
                answer = await self._upstream.send(replace(self._request, target=scoring.TARGET, body=body))
                try:
                    told = await answer.read()
                finally:
                    answer.close()
        except (AjetError, aiohttp.ClientError, TimeoutError) as error:
            logger.warning("a call of model %s was not scored: %s", model, error)
            return Lost(choice.index, NOT_SCORED)
        if answer.status != 200:
            logger.warning("a call of model %s was not scored: status %d, %.300r", model, answer.status, told)
        return scoring.answered(choice, told)
