"""On-policy continuity: a turn's prompt is what its episode read and sampled before, as ids, wherever that is safe.

`core.continuity.memory` (for responses with `core.continuity.responses`) recognises the history and
`core.continuity.splice` makes the exact prompt; here the engine is asked for what they need (`io.engines.rendering`).
It renders the conversation. If that already begins with the history's own ids, the request goes out as it is. If not,
the engine renders it once more with a mark in place of the last answer, and the exact prompt goes along in
``kv_transfer_params``, which vLLM takes in place of its own rendering, for chats and for responses.

Nothing is taken on trust. Before an engine gets ids for the first time, one token is generated to see that it reads
the ids it is given. Before a kind of request (its tools and whatever else shapes a prompt) is continued for the first
time, the rendering must be seen to be what the engine reads on the request's own route. After each answer
the reported prompt must be the one that was sent, or the engine gets no more. Where the history holds reasoning that a
parser of the engine may look for in the prompt, one token shows whether it finds the same. Whatever fails, the request
goes out as it came, and the record says why.

Next: ajet_proxy/core/continuity/memory.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import suppress

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.continuity import responses as responding
from ajet_proxy.core.continuity.memory import (
    ENGINE,
    EXACT,
    FIELD,
    IGNORED,
    NOT_PROVEN,
    NOT_RENDERED,
    REASONING_PARSER,
    REFUSED,
    SAME,
    TOO_LONG,
    UNKNOWN_HISTORY,
    UNSUPPORTED,
    Known,
    Outline,
    ended,
    outline,
)
from ajet_proxy.core.continuity.splice import begins_with, joined
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.tokens import unpack_tokens
from ajet_proxy.core.trajectory.call import Captured, Origin
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.rendering import CHAT, ROUTES, Engine, Ids, NotRendered, OnChat
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream
from ajet_proxy.io.ledger_port.port import LedgerPort
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
"""For all that a turn asks the engine before it is sent; the engine is busy then, and the plain request is as good."""
RETRY_S = 300.0
"""An engine that could not do it is asked again after this long: it may have been replaced."""
OUTLINES = {CHAT: outline, responding.ROUTE: responding.outline}


class Continuity:
    """What all turns share: what is known of the engines."""

    def __init__(self, upstream: Upstream, *, ledger_port: LedgerPort, metrics: Metrics) -> None:
        self.upstream = upstream
        self.ledger_port = ledger_port
        self.metrics = metrics
        self.mark = f"quick onyx goblins {secrets.token_hex(8)} jump over lazy dwarves"
        """Words that no conversation can hold, because nobody is told them."""
        self._engines: dict[tuple[str, str, str], Engine] = {}

    def turn(self, exchange: Exchange, origin: Origin) -> Turn:
        """The turn that `exchange` is, of the calls in `origin`."""
        return Turn(self, exchange, origin)

    def engine(self, url: str, model: str, route: str) -> Engine:
        return self._engines.setdefault((url, model, route), Engine())


class Turn:
    """One request on its way to an engine, in the place of `Upstream`; and what is recorded of it."""

    def __init__(self, shared: Continuity, exchange: Exchange, origin: Origin) -> None:
        self._shared = shared
        self._exchange = exchange
        self._origin = origin
        self._asked: Outline | None = None
        self._word: str | None = None
        self._prompt: Ids | None = None
        self._engine = Engine()

    async def send(self, request: EngineRequest) -> aiohttp.ClientResponse:
        """The engine's answer to `request`, asked with the exact prompt where that is safe. What is sent after the
        first request goes out as it is."""
        route = request.target.partition("?")[0]
        if route not in ROUTES or route != self._exchange.target or self._word is not None:
            return await self._shared.upstream.send(request)
        self._word, prompt = await self._decide(request)
        answer = None
        if prompt is not None:
            answer = await self._send_exact(request, prompt)
        if answer is None:
            answer = await self._shared.upstream.send(request)
        self._shared.metrics.inc("ajet_continuity_total", outcome=self._word)
        return answer

    def finished(self, origin: Origin, captured: Captured) -> Origin:
        """`origin` with what there is to say of this turn; its answer can be continued from now on."""
        if self._prompt is not None and captured.prompt_token_ids != self._prompt:
            self._word, self._engine.takes_ids, self._engine.silent_until = IGNORED, False, float("inf")
            self._shared.metrics.inc("ajet_continuity_total", outcome=IGNORED)
            logger.warning("an engine read other ids than it was given: continuity is off for it")
        if self._asked is not None and (answer := self._exchange.answers[captured.index]) is not None:
            with suppress(RecursionError):  # nested too deeply to be known again, as tool calls may be
                ends, call = tuple(self._asked.ends(answer)), origin.calls[captured.index]
                how = ended(captured, self._asked.called(answer))
                self._shared.ledger_port.remember(ends, self._asked.sought.shape, call, how)
        altered = origin.altered if self._prompt is None else (*origin.altered, FIELD)
        return replace(origin, altered=altered, continuity=self._word)

    async def _send_exact(self, request: EngineRequest, prompt: Ids) -> aiohttp.ClientResponse | None:
        """The answer to `request` with `prompt`; None if the engine finds fault with it, which may be the prompt's."""
        body = self._exchange.body_with({FIELD: json.dumps({"prompt_token_ids": prompt}, separators=(",", ":"))})
        answer = await self._shared.upstream.send(replace(request, body=body))
        if answer.status in (400, 422):
            answer.close()
            self._word = REFUSED
            return None
        self._prompt = prompt
        return answer

    async def _decide(self, request: EngineRequest) -> tuple[str, Ids | None]:
        """The word for this turn, and the prompt if it is to be sent."""
        origin, shared = self._origin, self._shared
        if self._exchange.skip is None:
            fields, salt = self._exchange.asked.fields, self._exchange.cache_salt
            self._asked = OUTLINES[self._exchange.target](
                fields if salt is None else {**fields, "cache_salt": salt},
                episode=origin.episode, model=request.model, agent=origin.agent,
            )
        if self._asked is None:
            return UNSUPPORTED, None
        found = await shared.ledger_port.recall(self._asked.sought, origin.episode)
        if isinstance(found, str):
            return found, None
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self._exact(request, self._asked, *found)
        except (NotRendered, AjetError, aiohttp.ClientError, TimeoutError):
            return NOT_RENDERED, None

    async def _exact(
        self, request: EngineRequest, asked: Outline, known: Known, before: Packed
    ) -> tuple[str, Ids | None]:
        """The word and the prompt for a turn that goes on from `before`."""
        now = asyncio.get_running_loop().time()
        url = next(iter(self._shared.upstream.order(request.model, request.sticky)), "")
        engine = self._engine = self._shared.engine(url, request.model, self._exchange.target)
        if engine.silent_until > now:
            return ENGINE, None
        ask = ROUTES[self._exchange.target](self._shared.upstream, request, engine)
        history = unpack_tokens(before.text)
        rendered = await ask.whole(asked)
        if begins_with(rendered, history):
            return SAME, None
        if asked.signed and await ask.render(asked.unsigned()) != rendered:
            return UNKNOWN_HISTORY, None
        await self._get_ready(ask, request.model, history)
        if not engine.takes_ids:
            engine.silent_until = now + RETRY_S
            engine.takes_ids = None
            return ENGINE, None
        proven = await ask.proven(asked, before, history, rendered)
        if proven is None:
            return NOT_PROVEN, None
        if begins_with(proven, history):
            return SAME, None
        marked = await ask.with_answer(asked, self._shared.mark)
        prompt = joined(history=history, ended=known.ended, rendered=proven, marked=marked, mark=engine.mark)
        if isinstance(prompt, str):
            return prompt, None
        if engine.length is not None and len(prompt) + asked.room > engine.length:
            return TOO_LONG, None
        if asked.heeds_reasoning and not await ask.is_read_alike(asked, prompt):
            return REASONING_PARSER, None
        return EXACT, prompt

    async def _get_ready(self, ask: OnChat, model: str, history: Ids) -> None:
        """Find out what is not yet known of the engine."""
        engine = self._engine
        if not engine.mark:
            engine.mark = await ask.render({
                "model": model, "prompt": self._shared.mark, "add_special_tokens": False,
            })
        if engine.takes_ids is None:
            takes_ids = await ask.takes_ids(history[:1] * 3)
            if engine.takes_ids is None:  # no other turn has found it out meanwhile
                as_what = "exact ids" if takes_ids else "text alone: it takes no prompt ids"
                logger.info("%s of model %r is sent history as %s", self._exchange.target, model, as_what)
            engine.takes_ids = takes_ids
