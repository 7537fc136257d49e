"""The HTTP front: where an agent's request comes in. Everything outside ``/ajet/`` ends up here.

A request goes one of three ways. ``POST`` to a captured route is asked of the engine with ids and logprobs, and its
calls are recorded. Other engine routes that an agent may use are passed through as they are. All else is refused, the
engine's control routes above all, however their path is spelled.

Whatever the way: first the key and the name of the episode (`identity`), then a reward that rides on the request, then
the gate, which holds requests while weights change, then the engine. Nothing is decided here that the core can decide.

Next: ajet_proxy/core/identity/ladder.py
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from ajet_proxy.core.conversation.history import History, Mark, deferred, marks_of
from ajet_proxy.core.identity.headers import Headers, retry_keys
from ajet_proxy.core.identity.keys import Claims, Keys, holds_key
from ajet_proxy.core.identity.ladder import Identity, identify, key_of, split_path
from ajet_proxy.core.protocol.anthropic.messages import Messages, Passthrough
from ajet_proxy.core.protocol.anthropic.template import Template, depends_on_template, questions, template_of
from ajet_proxy.core.protocol.chat import Chat, wants_no_reasoning
from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.hidden_reasoning import trial, withholds
from ajet_proxy.core.protocol.request import Request
from ajet_proxy.core.protocol.responses import fetched, shown
from ajet_proxy.core.protocol.routes import CAPTURED, described, open_route
from ajet_proxy.core.protocol.usage import Tail
from ajet_proxy.core.trajectory.call import NO_CHAT_ROUTE, Captured, Origin, Outcome
from ajet_proxy.io.capture import relay
from ajet_proxy.io.capture.continuity import Continuity
from ajet_proxy.io.capture.recorder import Recorder
from ajet_proxy.io.capture.reward_header import Rewards
from ajet_proxy.io.engines.chat_route import Foreign
from ajet_proxy.io.engines.pool import Engines
from ajet_proxy.io.engines.probe import EngineProbe
from ajet_proxy.io.engines.rendering import Detokenizer
from ajet_proxy.io.engines.rescoring import Scorer
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream, as_written, request_headers
from ajet_proxy.io.http import body as body_of
from ajet_proxy.io.http.server import MAX_HEADER, PATIENCE_S
from ajet_proxy.io.ledger_port.cancellation import CallOff
from ajet_proxy.io.ledger_port.port import Begun, CallRequest, LedgerPort
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError, BadRequest, LoopDetected, NotFound, NotReady, TooLarge
from ajet_sdk.routes import KEY_PREFIX

logger = logging.getLogger(__name__)
LOOP = "an engine of this proxy leads back to it: give --upstream, and POST policy, the engines' own addresses"
MOST_MISSPELT = 100
"""So many header names that mean nothing are written to the log, each once."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Limits in seconds, bytes and messages; a `read_timeout` or `keep_alive` of 0 is none. ``upstream_key`` is the
    engines' own API key; ``pauses`` says that weights change while calls are in flight. ``daemon`` is its name, which
    no other one has."""

    daemon: str = "ajet_proxy"
    allow_routes: tuple[str, ...] = ()
    upstream_key: str | None = None
    pauses: bool = False
    connect_timeout: float = 10.0
    read_timeout: float = 0.0
    keep_alive: float = 15.0
    max_body: int = 64 << 20
    max_messages: int = 10_000
    max_header: int = MAX_HEADER
    max_choices: int = 1024
    client_timeout: float = PATIENCE_S
    continuity: bool = True


_STARTED = web.RequestKey("started", tuple[str, float])
_HEADERS = web.RequestKey("headers", Headers)
_CLAIMS = web.RequestKey("claims", Claims)


def headers_as_sent(http: web.Request) -> Headers:
    return Headers(as_written(http.raw_headers))


class HttpFront:
    """Handles every request that is not a control request; `headers` gives those of a request that count."""

    def __init__(
        self, *, ledger_port: LedgerPort, keys: Keys, engines: Engines, clock: Clock, metrics: Metrics,
        settings: FrontSettings, budget: MemoryBudget,
        headers: Callable[[web.Request], Headers] = headers_as_sent,
    ) -> None:
        self._ledger_port = ledger_port
        self._rewards = Rewards(ledger_port)
        self._budget = budget
        self._keys = keys
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._headers = headers
        self._upstream = Upstream(
            engines, clock=clock, metrics=metrics, connect_timeout=settings.connect_timeout,
            read_timeout=settings.read_timeout, max_header=settings.max_header,
        )
        self._foreign = Foreign(self._upstream, engines)
        self._templates = EngineProbe(self._upstream, engines, questions, template_of, otherwise=Template())
        self._quiet = EngineProbe(self._upstream, engines, trial, withholds, otherwise=True)
        self._misspelt: set[str] = set()
        self._tell_versions: set[str] = set()
        """The routes on which an engine has shown that it can say which weights sampled each token."""
        self._continuity = (
            Continuity(self._upstream, ledger_port=ledger_port, metrics=metrics) if settings.continuity else None
        )

    def add_routes(self, app: web.Application) -> None:
        """Register the front for all paths that no earlier route takes, and its connections for the app's lifetime."""
        app.cleanup_ctx.append(self._connections)
        app.on_response_prepare.append(relay.leave_out)
        app.on_response_prepare.append(body_of.close_unread)
        app.on_response_prepare.append(self._began)
        app.router.add_route("*", "/{path:.*}", self.handle, expect_handler=body_of.unasked)

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        await self._upstream.start()
        yield
        await self._upstream.close()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            dialect = self._dialect(http)
        except NotFound as error:
            self._metrics.inc("ajet_requests_total", route="refused", status=error.status)
            raise
        route = dialect.name if dialect is not None else "passthrough"
        http[_STARTED] = (route, started := perf_counter())
        status = 499  # the client went away, in nginx's words
        try:
            key = self._key(http)
            if key is None and _is_preflight(http):
                response = await self._permission(http)
            else:
                http[_CLAIMS] = self._keys.authenticate(key, self._clock.now())
                response = await (self._capture(http, dialect) if dialect is not None else self._pass(http))
            status = response.status
            return response
        except AjetError as error:
            status = error.status
            raise
        finally:
            self._metrics.inc("ajet_requests_total", route=route, status=status)
            self._metrics.observe("ajet_request_seconds", perf_counter() - started, route=route)

    async def _began(self, http: web.Request, _response: web.StreamResponse) -> None:
        if (known := http.get(_STARTED)) is not None:
            route, started = known
            self._metrics.observe("ajet_first_byte_seconds", perf_counter() - started, route=route)

    def _dialect(self, http: web.Request) -> Dialect | None:
        """The dialect to capture this request with, None if it may pass through; `NotFound` if neither."""
        _, written = split_path(http.rel_url.raw_path)
        if http.method == "POST" and written in CAPTURED:
            return CAPTURED[written]
        route = open_route(written, self._settings.allow_routes)
        if route is None:
            raise NotFound(f"no route {http.method} {described(written)}", code="unknown_route")
        return CAPTURED.get(route) if http.method == "POST" else None

    async def _capture(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Ask the engine on the agent's behalf, and record the calls that come of it."""
        body = await self._body(http)
        try:
            request = await self._read(http, body)
        except BadRequest:
            if dialect.target != dialect.path:
                await self._rewards.record(http, self._identify(http, None), body)
                raise
            return await self._pass(http, body)  # no call can come of it, and the engine says so in its own words
        identity = self._identify(http, request)
        if identity.reward is not None and identity.episode is not None:
            identity = await self._rewards.record(http, identity, body, call=True)
        request.check_size()
        dialect, asked = await self._carried(http, dialect, request)
        # Marks are needed where the answer ends; before that only if nothing names the episode.
        exact = self._settings.continuity
        history = deferred(dialect.target, asked.fields, identity.scope, exact=exact)
        sent = retry_keys(http.headers, dialect.path, body, scope=identity.scope if identity.episode is None else b"")
        if identity.reward is not None and identity.episode is None:
            identity = await self._rewards.record(http, identity, body, history(), sent, call=True)
        exchange = self._exchange(dialect, asked)
        known = history() if identity.episode is None else None
        wanted = CallRequest(identity, known, sent, request.model, exchange.choices, dialect.path)
        async with CallOff(http) as call_off, self._ledger_port.begin(wanted, call_off.now) as begun:
            suited = await self._suited(http, dialect, request.fields, begun)
            if suited is not dialect or begun.episode_model is not None:
                asked = asked if suited is dialect else suited.translate(request)
                exchange = self._exchange(suited, asked, begun.episode_model)
            if self._settings.pauses:
                exchange.under(begun.policy_version, begun.gate_since)
            origin = Origin(
                calls=begun.calls, episode=begun.episode, model=begun.model, agent=begun.agent,
                started_at=begun.started_at, policy_version=begun.policy_version,
                identified_by=identity.identified_by, altered=exchange.altered,
            )
            own = None if dialect.path == dialect.target else self._engine_request(
                http, dialect.path, request.with_fields(request.naming(begun.episode_model)), model=begun.model,
                sticky=begun.episode, identity=True,
            )
            return await self._recorded(http, exchange, origin, history, own, identity.claims.tenant)

    def _exchange(self, dialect: Dialect, asked: Request, model: str | None = None) -> Exchange:
        return Exchange(
            dialect, asked, model=model, versions=dialect.target in self._tell_versions,
            max_choices=self._settings.max_choices,
        )

    async def _recorded(
        self, http: web.Request, exchange: Exchange, origin: Origin, history: Callable[[], History | None],
        own: EngineRequest | None, tenant: str,
    ) -> web.StreamResponse:
        """Relay the answer to the begun calls of `origin`, and end them. `own` is the client's request on its own
        route, where the engine is asked on another. Of calls that are lost `tenant` has used what is known."""
        request = self._engine_request(
            http, exchange.target, exchange.upstream_body, model=origin.model, sticky=origin.episode, identity=True
        )
        turn = None if self._continuity is None else self._continuity.turn(exchange, origin, history)
        scorer = Scorer(self._upstream, request, exchange.cache_salt, self._metrics)
        recorder = Recorder(
            origin, scorer=scorer, texts=Detokenizer(self._upstream, request), ledger_port=self._ledger_port,
            marks=self._marks(history, exchange), finished=None if turn is None else turn.finished,
        )
        tail = Tail()
        try:
            response = await relay.captured(
                http, request, exchange, recorder, turn or self._upstream, own=own,
                keep_alive_s=self._settings.keep_alive, heard=tail.feed,
            )
        finally:
            sampled = sum(count for place, count in enumerate(exchange.sampled) if place in recorder.lost)
            if recorder.lost and (used := tail.tokens() or sampled):
                self._ledger_port.used(tenant, used)
        if exchange.skip == NO_CHAT_ROUTE:
            self._foreign.note(origin.model)
        if exchange.tells_versions:
            self._tell_versions.add(exchange.target)
        return response

    def _marks(
        self, history: Callable[[], History | None], exchange: Exchange
    ) -> Callable[[Outcome], tuple[Mark, ...]]:
        """Where a client's history ends after each choice, which is asked before the end of the answer is let go."""

        def marks(outcome: Outcome) -> tuple[Mark, ...]:
            if exchange.response_id is not None:
                self._ledger_port.keep(exchange.response_id, exchange.ask)
            captured = outcome if isinstance(outcome, Captured) else None
            return marks_of(history(), exchange.answers[outcome.index], captured)

        return marks

    async def _carried(self, http: web.Request, dialect: Dialect, request: Request) -> tuple[Dialect, Request]:
        """How to put `request` to its engines, and `request` as they are asked; `BadRequest` if it cannot be."""

        def look(path: str) -> EngineRequest:
            asking = self._engine_request(http, path, None, model=request.model, sticky="", identity=True)
            return replace(asking, method="GET")

        if dialect.target == dialect.path:
            return dialect, request
        if not self._foreign.knows(request.model):
            try:
                return dialect, dialect.translate(request)
            except BadRequest:
                async with self._ledger_port.enter(request.model):
                    if not await self._foreign.ask(dialect, request.model, look):
                        raise
        return Passthrough(dialect), request

    async def _suited(
        self, http: web.Request, dialect: Dialect, asked: Mapping[str, Any], begun: Begun
    ) -> Dialect:
        """`dialect` for the engines of the model, where they decide for themselves what it means to be `asked` so."""

        def ask(path: str, body: bytes) -> EngineRequest:
            return self._engine_request(http, path, body, model=begun.model, sticky=begun.episode, identity=True)

        if isinstance(dialect, Messages) and depends_on_template(asked):
            return Messages(await self._templates.of(begun.model, ask))
        if isinstance(dialect, Chat) and wants_no_reasoning(asked):
            return Chat(withholds=await self._quiet.of(begun.model, ask))
        return dialect

    async def _pass(self, http: web.Request, body: bytes | None = None) -> web.StreamResponse:
        """Pass a request on as it is; its `body`, if that is known to be no JSON object."""
        request: Request | None = None
        if body is None:
            body = await self._body(http)
            with contextlib.suppress(BadRequest):
                request = await self._read(http, body)
        names = request if http[_HEADERS].labels.reward is not None else None
        identity = await self._rewards.record(http, self._identify(http, names), body)
        model, response = "" if request is None else request.model, fetched(http.method, identity.path)
        ask = None if response is None else await self._ledger_port.kept(response)
        upstream_request = self._engine_request(
            http, identity.path, body or None, model=model, sticky=identity.episode or "", identity=ask is not None
        )
        if ask is not None:
            return await relay.retold(upstream_request, self._upstream, partial(shown, ask))
        if http.method != "POST":
            return await relay.passed(http, upstream_request, self._upstream)
        tenant, tail = identity.claims.tenant, Tail()
        await self._ledger_port.admit(identity)
        try:
            if not identity.path.startswith("/v1/"):
                return await relay.passed(http, upstream_request, self._upstream, tail.feed)
            async with CallOff(http) as call_off, self._ledger_port.enter(model, identity.episode or "", call_off.now):
                return await relay.passed(http, upstream_request, self._upstream, tail.feed)
        finally:
            self._ledger_port.used(tenant, tail.tokens())

    async def _permission(self, http: web.Request) -> web.StreamResponse:
        """Pass on what a browser asks before its page may ask anything. It sends no key with that, and no body: all
        that it gets to know is which pages the engine serves."""
        _, path = split_path(http.rel_url.raw_path)
        request = self._engine_request(http, path, None, model="", sticky="", identity=False)
        return await relay.passed(http, request, self._upstream)

    def _key(self, http: web.Request) -> str | None:
        """The caller's key, and note the headers that count: before the body is read, which costs memory."""
        if holds_key(http.rel_url.raw_query_string):  # which servers on the way write down
            raise BadRequest("a key must not be in the query: send 'Authorization: Bearer KEY'", code="key_in_query")
        http[_HEADERS] = headers = self._headers(http)
        if headers.came_through(self._settings.daemon):
            raise LoopDetected(LOOP, code="loop_detected")
        for name, meant in headers.misspelt.items():
            if name not in self._misspelt and len(self._misspelt) < MOST_MISSPELT:
                self._misspelt.add(name)
                logger.warning("a request has the header %r, which means nothing; was %s meant?", name[:80], meant)
        return key_of(http.rel_url.raw_path, headers)

    def _identify(self, http: web.Request, request: Request | None) -> Identity:
        return identify(
            path=http.rel_url.raw_path, headers=http[_HEADERS], body=request.fields if request is not None else None,
            claims=http[_CLAIMS],
        )

    def _engine_request(
        self, http: web.Request, path: str, body: bytes | None, *, model: str, sticky: str, identity: bool
    ) -> EngineRequest:
        query = http.rel_url.raw_query_string
        headers = request_headers(
            http[_HEADERS].sent.items(), is_ours=self._is_ours, upstream_key=self._settings.upstream_key,
            identity=identity, daemon=self._settings.daemon,
        )
        return EngineRequest(
            method=http.method, target=f"{path}?{query}" if query else path, headers=headers, body=body, model=model,
            sticky=sticky,
        )

    def _is_ours(self, key: str) -> bool:
        """Whether `key` is for this proxy, so that no engine may see it."""
        if key.startswith(KEY_PREFIX):
            return True
        try:
            self._keys.verify(key, self._clock.now())
        except AjetError:
            return False
        return True

    async def _read(self, http: web.Request, body: bytes) -> Request:
        """`body` as a JSON object, or `BadRequest`. A reward that rides on one which is `TooLarge` is kept."""
        try:
            return Request(body, self._settings.max_messages)
        except TooLarge:
            await self._rewards.record(http, self._identify(http, None), body)
            raise

    async def _body(self, http: web.Request) -> bytes:
        settings = self._settings
        try:
            return await body_of.read(
                http, max_body=settings.max_body, limit_s=settings.client_timeout, budget=self._budget
            )
        except (NotReady, ConnectionError, asyncio.CancelledError):
            self._ledger_port.unread(http[_CLAIMS].tenant)
            raise


def _is_preflight(http: web.Request) -> bool:
    """Whether a browser asks what a page of another site may ask."""
    return http.method == "OPTIONS" and "Origin" in http.headers and "Access-Control-Request-Method" in http.headers
