"""Asks the engine that sampled a choice for the logprobs that it did not tell.

The question goes out as the agent's request did, to the same engine and with the same headers. If anything goes wrong
the call is lost, and no error is raised: the agent's answer does not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.protocol import rescoring as scoring
from ajet_proxy.core.trajectory.call import NOT_SCORED, Captured, Lost, Unscored
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream, told
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""The end of the agent's answer waits for it."""


async def score(
    choice: Unscored, upstream: Upstream, request: EngineRequest, salt: Any, metrics: Metrics
) -> Captured | Lost:
    """`choice`, an answer to `request`, with its logprobs, or as lost. `salt` is the cache salt of its exchange."""
    metrics.inc("ajet_scored_calls_total")
    model = request.model or choice.model
    body = scoring.question(choice, model=model, salt=salt)
    try:
        async with asyncio.timeout(LIMIT_S):
            status, answer = await told(upstream, replace(request, target=scoring.TARGET, body=body))
    except (AjetError, aiohttp.ClientError, TimeoutError) as error:
        logger.warning("a call of model %s was not scored: %s", model, error)
        return Lost(choice.index, NOT_SCORED)
    if status != 200:
        logger.warning("a call of model %s was not scored: status %d, %.300r", model, status, answer)
    return scoring.answered(choice, answer)
