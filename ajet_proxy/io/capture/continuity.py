"""On-policy continuity: a turn's prompt is what its episode read and sampled before, as ids, wherever that is safe.

`core.continuity.memory` recognizes the history, and `core.continuity.splice` makes the exact prompt. This module asks
the engine for what they need (`io.engines.rendering`). The engine first renders the conversation. If that already
begins with the history's own ids, the request goes out as it is. Otherwise the engine renders it once more, with a
placeholder in place of the last answer. The exact prompt then goes along in ``kv_transfer_params``. vLLM takes it in
place of its own rendering, on each route of a dialect that `takes_ids`.

Nothing is taken on trust. Before an engine gets ids for the first time, one token is generated to see that it reads the
ids it is given. A kind of request is its tools and whatever else shapes a prompt. Before one is continued for the first
time, the rendering must be seen to be what the engine reads on the request's own route. After each answer the reported
prompt must be the one that was sent, or the engine gets no more ids. The history may hold reasoning that a parser of
the engine looks for in the prompt: then one token shows whether it finds the same. Whatever fails, the request goes out
as it came, and the record says why.

Next: ajet_proxy/core/continuity/memory.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.continuity.memory import FIELD, Known, Outcome, Outline, ended
from ajet_proxy.core.continuity.splice import begins_with, joined
from ajet_proxy.core.conversation.history import History
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.tokens import unpack_tokens
from ajet_proxy.core.trajectory.call import Captured, Origin
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.engine import Ids
from ajet_proxy.io.engines.rendering import NotRendered, Renderer, Renderings
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream
from ajet_proxy.io.engines.vllm import behind
from ajet_proxy.io.ledger_port.port import LedgerPort
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
"""For all that a turn asks the engine before it is sent; the engine is busy then, and the plain request is as good."""
RETRY_S = 300.0
"""An engine that could not do it is asked again after this long: it may have been replaced."""


@dataclass(frozen=True, slots=True)
class Continuity:
    """Shared by all requests: what is known of the engines, by address, model and route. ``placeholder`` holds words
    that no conversation can contain, because nobody is told them."""

    upstream: Upstream
    ledger_port: LedgerPort
    metrics: Metrics
    placeholder: str = field(
        default_factory=lambda: f"quick onyx goblins {secrets.token_hex(8)} jump over lazy dwarves"
    )
    engines: dict[tuple[str, str, str], Renderings] = field(default_factory=dict)


class ContinuedRequest:
    """Sends one request to an engine in the place of `Upstream`, and keeps what is recorded of it."""

    def __init__(self, shared: Continuity, exchange: Exchange, origin: Origin, history: History | None) -> None:
        """The request of `exchange`, with its `history`, for the calls in `origin`."""
        self._shared = shared
        self._exchange = exchange
        self._origin = origin
        self._history = history
        self._outline: Outline | None = None
        self._outcome: Outcome | None = None
        self._prompt: Ids | None = None
        self._engine = Renderings()

    async def send(self, request: EngineRequest) -> aiohttp.ClientResponse:
        """The engine's answer to `request`, asked with the exact prompt where that is safe. Requests after the first
        one go out as they are."""
        if self._outcome is not None:
            return await self._shared.upstream.send(request)
        self._outcome, prompt = await self._decide(request)
        answer = None if prompt is None else await self._send_exact(request, prompt)
        if answer is None:
            answer = await self._shared.upstream.send(request)
        self._shared.metrics.inc("ajet_continuity_total", outcome=self._outcome)
        return answer

    def finished(self, origin: Origin, captured: Captured) -> Origin:
        """`origin` with what is recorded of this request. From now on its answer can be continued."""
        if self._prompt is not None and captured.prompt_token_ids != self._prompt:
            self._outcome, self._engine.takes_ids, self._engine.silent_until = "ignored", False, float("inf")
            self._shared.metrics.inc("ajet_continuity_total", outcome="ignored")
            logger.warning("an engine read other ids than it was given: continuity is off for it")
        outline = self._outline
        if outline is not None and (answer := self._exchange.answers[captured.index]) is not None:
            with suppress(RecursionError):  # nested too deeply to be known again, as tool calls may be
                ends, call = tuple(outline.ends(answer)), origin.calls[captured.index]
                how = ended(captured, outline.called(answer))
                self._shared.ledger_port.remember(ends, outline.sought.shape, call, how)
        altered = origin.altered if self._prompt is None else (*origin.altered, FIELD)
        return replace(origin, altered=altered, continuity=self._outcome)

    async def _send_exact(self, request: EngineRequest, prompt: Ids) -> aiohttp.ClientResponse | None:
        """The answer to `request` with `prompt`; None if the engine refuses it, perhaps because of the prompt."""
        body = self._exchange.upstream_body(**{FIELD: json.dumps({"prompt_token_ids": prompt}, separators=(",", ":"))})
        answer = await self._shared.upstream.send(replace(request, body=body))
        if answer.status in (400, 422):
            answer.close()
            self._outcome = "refused"
            return None
        self._prompt = prompt
        return answer

    async def _decide(self, request: EngineRequest) -> tuple[Outcome, Ids | None]:
        """The outcome for this request, and the exact prompt if one will be sent."""
        outline = self._outline = self._outlined(request.model)
        if outline is None:
            return "unsupported", None
        found = await self._shared.ledger_port.recall(outline.sought, self._origin.episode)
        if isinstance(found, str):
            return found, None
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self._exact(request, outline, *found)
        except (NotRendered, AjetError, aiohttp.ClientError, TimeoutError):
            return "not_rendered", None

    def _outlined(self, model: str) -> Outline | None:
        if self._history is None or self._exchange.skip is not None:
            return None
        fields, salt = self._exchange.asked.fields, self._exchange.cache_salt
        asked = fields if salt is None else {**fields, "cache_salt": salt}
        origin = self._origin
        return self._exchange.dialect.outline(
            asked, self._history, episode=origin.episode, model=model, agent=origin.agent
        )

    async def _exact(
        self, request: EngineRequest, outline: Outline, known: Known, before: Packed
    ) -> tuple[Outcome, Ids | None]:
        """The outcome and the prompt for a request that continues the call `before`."""
        shared, route, now = self._shared, self._exchange.target, asyncio.get_running_loop().time()
        url = next(iter(shared.upstream.order(request.model, request.sticky)), "")
        engine = self._engine = shared.engines.setdefault((url, request.model, route), Renderings())
        if engine.silent_until > now:
            return "engine", None
        ask = Renderer(behind(shared.upstream, request), request.model, engine, route, outline)
        history = unpack_tokens(before.text)
        rendered = await ask.whole()
        if begins_with(rendered, history):
            return "same", None
        if (unsigned := outline.unsigned()) is not None and await ask.render(unsigned) != rendered:
            return "unknown_history", None
        await self._get_ready(ask, request.model, history)
        if not engine.takes_ids:
            engine.silent_until = now + RETRY_S
            engine.takes_ids = None
            return "engine", None
        proven = await ask.proven(before, history, rendered)
        if proven is None:
            return "not_proven", None
        if begins_with(proven, history):
            return "same", None
        prompt = joined(
            history=history, ended=known.ended, rendered=proven, marked=await ask.with_answer(shared.placeholder),
            placeholder=engine.placeholder,
        )
        if isinstance(prompt, str):
            return prompt, None
        if engine.length is not None and len(prompt) + outline.answer_tokens > engine.length:
            return "too_long", None
        if outline.heeds_reasoning and not await ask.is_read_alike(prompt):
            return "reasoning_parser", None
        return "exact", prompt

    async def _get_ready(self, ask: Renderer, model: str, history: Ids) -> None:
        """Find out what is not yet known of the engine."""
        engine = self._engine
        if not engine.placeholder:
            engine.placeholder = await ask.render({
                "model": model, "prompt": self._shared.placeholder, "add_special_tokens": False,
            })
        if engine.takes_ids is None:
            takes_ids = await ask.takes_ids(history[:1] * 3)
            if engine.takes_ids is None:  # no other request has found it out meanwhile
                as_what = "exact ids" if takes_ids else "text alone: it takes no prompt ids"
                logger.info("%s of model %r is sent history as %s", self._exchange.target, model, as_what)
            engine.takes_ids = takes_ids
