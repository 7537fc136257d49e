"""Questions to an engine about an answer that it gave, asked before the answer's calls are recorded.

A question goes out as the agent's request did, to the same engine and with the same headers. The end of the answer
waits for it, each kind of question with its limit of time. If anything goes wrong no error is raised, because the
agent's answer does not depend on it.

- `score`: the logprobs of tokens that came without any (`core.protocol.rescoring`). Without them the call is lost.
- `is_cut`: whether an answer in doubt was cut (`core.protocol.ending`). Which tokens stop a model is learned from
  answers that ended, and asked once for each other token. What is told is kept as long as the model has the same
  engines, and none of them is found gone.
- `same_text`: the earlier call that a prompt repeats in other tokens (`core.trajectory.repair`).
- `sampling`: how the calls were sampled (`core.protocol.sampling`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from functools import cache, cached_property, partial

from ajet_proxy.core.protocol import ending
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.sampling import SHAPING, effective, plain
from ajet_proxy.core.trajectory.call import NOT_SCORED, Captured, Lost, Unscored
from ajet_proxy.core.trajectory.repair import Found, find_same_text
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.engine import FAILED, Engine
from ajet_proxy.io.engines.probe import SamplingProbe
from ajet_proxy.io.engines.upstream import EngineRequest, Standing, Upstream
from ajet_proxy.io.engines.vllm import behind
from ajet_proxy.io.runtime.metrics import Metrics

logger = logging.getLogger(__name__)

SCORE_S, STOP_S, TEXT_S = 60.0, 5.0, 10.0
"""For the logprobs of a choice, for whether the last tokens of an answer stop, and for the texts of its prompts."""
Sampled = Callable[[bool], str | None]
"""Tells how choices were sampled, given whether their logprobs were scored afterwards."""


class Facts:
    """Shared by all answers: what is known of the engines behind `upstream`. `enter` waits at a model's gate."""

    def __init__(
        self, upstream: Upstream, metrics: Metrics, enter: Callable[[str], AbstractAsyncContextManager[None]]
    ) -> None:
        self.upstream, self.metrics, self.enter = upstream, metrics, enter
        self.sampling = SamplingProbe(upstream)
        self.stops: set[tuple[str, int]] = set()
        """The models, each with a token at which an answer of theirs has stopped."""
        self._told: dict[str, tuple[Standing, dict[int, bool | None]]] = {}

    def told_of(self, model: str) -> dict[int, bool | None]:
        """The tokens that stop `model`, as far as the engines that serve it now have told."""
        standing = self.upstream.standing(model)
        known, tokens = self._told.get(model, ((), {}))
        if known != standing:
            _, tokens = self._told[model] = standing, {}
        return tokens


class Questions:
    """Questions about the answer to one `request`, which `exchange` reads. `asks` makes further requests in the name of
    its client."""

    def __init__(
        self, facts: Facts, request: EngineRequest, exchange: Exchange, asks: Callable[..., EngineRequest]
    ) -> None:
        self._facts, self._request, self._exchange, self._asks = facts, request, exchange, asks
        self._until: dict[str, float] = {}

    @property
    def _engine(self) -> Engine:
        return behind(self._facts.upstream, self._request)

    async def score(self, choice: Unscored) -> Captured | Lost:
        """`choice` with its logprobs, or as lost."""
        self._facts.metrics.inc("ajet_scored_calls_total")
        model = self._request.model or choice.model
        try:
            async with asyncio.timeout(SCORE_S):
                return await self._engine.score(choice, model, self._exchange.cache_salt)
        except FAILED as error:
            logger.warning("a call of model %s was not scored: %s", model, error)
            return Lost(choice.index, NOT_SCORED)

    def stopped(self, choice: Captured) -> None:
        """`choice` ended at its last token. That token stops the model, unless the request names what stopped it. A
        response does not say which of the request's stop strings did."""
        if not self._exchange.asked.fields.get("stop") and not ending.names_stop(choice, self._stop_ids):
            self._facts.stops.add((self._request.model or choice.model, choice.token_ids[-1]))

    async def is_cut(self, choice: Captured) -> bool:
        """Tell whether `choice`, which has tokens, was cut. Its finish reason leaves that in doubt."""
        if ending.names_stop(choice, self._stop_ids):
            return False
        model, last = self._request.model or choice.model, choice.token_ids[-1]
        stops = True if (model, last) in self._facts.stops else await self._stops(model, last)
        asked, limits = self._exchange.asked.fields, self._exchange.dialect.limits
        return ending.is_full(choice, limits, asked) if stops is None else not stops

    async def same_text(self, prompt: bytes, calls: Iterable[Packed], model: str) -> Found | None:
        """The earlier call that a prompt for `model` repeats in other tokens. If it cannot be found out, the calls stay
        apart."""
        search = find_same_text(prompt, calls)
        try:
            async with asyncio.timeout_at(self._by("texts", TEXT_S)):
                ids = next(search)
                while True:
                    ids = search.send(await self._engine.detokenize(model, ids))
        except StopIteration as ended:
            found: Found | None = ended.value
            return found
        except (*FAILED, ValueError) as error:
            logger.warning("whether a prompt of model %s repeats a call was not found out: %s", model, error)
            return None

    async def sampling(self) -> Sampled:
        """Tells how the calls were sampled. If the request names nothing that shapes that, it is known beforehand."""
        facts, model, exchange = self._facts, self._request.model, self._exchange
        known = facts.sampling.kept.get((model, facts.upstream.standing(model)))
        if known is None:
            asks = partial(self._asks, model=model, sticky=self._request.sticky)
            known = await facts.sampling.of(model, asks, partial(facts.enter, model))
        if SHAPING.isdisjoint(exchange.asked.fields):
            return partial(plain, exchange.dialect.ignores, known)
        fields = exchange.dialect.sampled_as(exchange.asked.fields)
        return cache(partial(effective, exchange.dialect.ignores, fields, known))

    @cached_property
    def _stop_ids(self) -> frozenset[int | None]:
        return ending.stop_ids(self._exchange.asked.fields)

    async def _stops(self, model: str, token: int) -> bool | None:
        """Tell whether `token` stops `model`, as its engine says; None if it does not say."""
        tokens, until = self._facts.told_of(model), self._by("stops", STOP_S)
        if token not in tokens and asyncio.get_running_loop().time() < until:
            tokens[token] = None
            with suppress(*FAILED):
                async with asyncio.timeout_at(until):
                    tokens[token] = await self._engine.stops(model, token)
        return tokens.get(token)

    def _by(self, kind: str, limit_s: float) -> float:
        """When the end of the answer has waited long enough for all questions of a `kind`, by the loop's clock."""
        return self._until.setdefault(kind, asyncio.get_running_loop().time() + limit_s)
