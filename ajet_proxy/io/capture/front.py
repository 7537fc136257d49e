"""The HTTP front: where an agent's request comes in. Everything outside ``/ajet/`` ends up here.

A request goes one of three ways. ``POST`` to a captured route is asked of the engine with ids and logprobs, and its
calls are recorded. Other engine routes that an agent may use are passed through as they are. All else is refused, the
engine's control routes above all, however their path is spelled.

The order is always the same: the key and the name of the episode (`identity`), a reward that the request brings, the
gate, the engine. Only a ``POST`` under ``/v1`` waits at the gate, which holds requests while weights change. Nothing is
decided here that the core can decide.

Next: ajet_proxy/core/identity/ladder.py
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import unquote, urlsplit

from aiohttp import web

from ajet_proxy.core.identity.headers import Headers, meant
from ajet_proxy.core.identity.keys import Keys, holds_key
from ajet_proxy.core.identity.ladder import Identity, key_of, split_path
from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.responses.dialect import fetched, shown
from ajet_proxy.core.protocol.routes import CAPTURED, RENAMED, described, open_route
from ajet_proxy.core.protocol.usage import Tail
from ajet_proxy.io.capture import relay
from ajet_proxy.io.capture.models import listed, model_named
from ajet_proxy.io.capture.pipeline import Caller, Pipeline, Received
from ajet_proxy.io.engines.upstream import Engines, Forwarding, Upstream, as_written
from ajet_proxy.io.http import body as body_of
from ajet_proxy.io.http.aiohttp_internals import MAX_HEADER, PATIENCE_S, Runner
from ajet_proxy.io.http.errors import error_middleware, http_logger, refuse_foreign_pages, without_websocket
from ajet_proxy.io.ledger_port.cancellation import CallOff
from ajet_proxy.io.ledger_port.port import LedgerPort, fails, is_ours
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.settings import Config
from ajet_sdk.bodies import KEY_PREFIX
from ajet_sdk.errors import AjetError, BadRequest, LoopDetected, NotFound, NotReady, TooLarge

logger = logging.getLogger(__name__)
BACKLOG = 4096
LOOP = "an engine of this proxy leads back to it: give --upstream, and POST policy, the engines' own addresses"
MAX_MESSAGES = 10_000
MOST_MISSPELT = 100
"""So many header names that mean nothing are written to the log, each once."""


_STARTED = web.RequestKey("started", tuple[str, float])


def headers_as_sent(http: web.Request) -> Headers:
    return Headers(as_written(http.raw_headers))


class HttpFront:
    """Handles every request that is not a control request. `daemon` is the daemon's name, which no other one has;
    `headers` reads those headers of a request that count."""

    def __init__(
        self, config: Config, daemon: str, *, ledger_port: LedgerPort, keys: Keys, engines: Engines, clock: Clock,
        metrics: Metrics, budget: MemoryBudget,
        headers: Callable[[web.Request], Headers] = headers_as_sent,
    ) -> None:
        self._ledger_port = ledger_port
        self._engines = engines
        self._budget = budget
        self._keys = keys
        self._clock = clock
        self._metrics = metrics
        self._config = config
        self._daemon = daemon
        self._headers = headers
        self._upstream = Upstream(engines, clock=clock, metrics=metrics, read_timeout=config.read_timeout)
        self._forwarding = Forwarding(daemon=daemon, upstream_key=config.upstream_key, is_ours=self._is_ours)
        self._pipeline = Pipeline(
            config, ledger_port=ledger_port, upstream=self._upstream, engines=engines, forwarding=self._forwarding,
            metrics=metrics,
        )
        self._misspelt: set[str] = set()

    def add_routes(self, app: web.Application) -> None:
        """Register the front for all paths that no earlier route takes, and its connections for the app's lifetime."""
        app.cleanup_ctx.append(self._upstream.connected)
        app.on_shutdown.append(self._pipeline.close)
        app.on_response_prepare.append(relay.leave_out)
        app.on_response_prepare.append(body_of.close_unread)
        app.on_response_prepare.append(self._began)
        app.router.add_route("*", "/{path:.*}", self.handle, expect_handler=body_of.unasked)

    async def handle(self, http: web.Request) -> web.StreamResponse:
        if (refused := without_websocket(http)) is not None:
            self._metrics.inc("ajet_requests_total", route="refused", status=refused.status)
            return refused
        try:
            dialect = self._dialect(http)
        except NotFound as error:
            self._metrics.inc("ajet_requests_total", route="refused", status=error.status)
            raise
        route = dialect.name if dialect is not None else "passthrough"
        http[_STARTED] = (route, started := perf_counter())
        status = 499  # the client went away, in nginx's words
        try:
            headers = self._headers(http)
            key = self._key(http, headers)
            if key is None and _is_preflight(http):
                response = await self._permission(http, headers)
            else:
                claims = self._keys.authenticate(key, self._clock.now())
                caller = Caller(http, headers, claims, self._config.body_names == "auto")
                response = await (self._pass(caller) if dialect is None else self._capture(caller, dialect))
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
        """The dialect to capture this request with; None if it may pass through. Raises `NotFound` if neither."""
        _, written = split_path(http.rel_url.raw_path)
        if http.method == "POST" and written in CAPTURED:
            return CAPTURED[written]
        route = open_route(written, self._config.allow_route)
        if route is None:
            raise NotFound(f"no route {http.method} {described(written)}", code="unknown_route")
        return CAPTURED.get(route) if http.method == "POST" else None

    async def _capture(self, caller: Caller, dialect: Dialect) -> web.StreamResponse:
        body = None
        try:
            sent = await self._body(caller)
            try:
                body = await self._read(caller, sent)
            except BadRequest:
                if dialect.target != dialect.path:
                    await self._rewarded(caller, sent, None)
                    raise
                return await self._pass_body(caller, sent, None)  # no call can come of it; the engine says so itself
            identified = await self._pipeline.identify(Received(caller, dialect, sent, body))
        except Exception as error:
            with contextlib.suppress(AjetError):
                await self._taken_back(caller, body)
            if not isinstance(error, AjetError) or is_ours(error):
                self._note_unserved(getattr(error, "code", "internal_error"), caller, body)
            raise
        return await self._pipeline.capture(identified)

    async def _taken_back(self, caller: Caller, body: JsonBody | None) -> None:
        """Withdraw the chat that a request names which says so, and becomes no call."""
        if caller.headers.labels.traffic is False:
            identity = caller.identify(None if body is None else body.fields)
            if identity.episode is not None:
                await self._ledger_port.withdraw(identity)

    def _note_unserved(self, code: str, caller: Caller, body: JsonBody | None) -> None:
        """Note a request to a captured route that cannot become calls, with the `code` of an error of ours. `body` is
        what it asks, if that was read."""
        with contextlib.suppress(AjetError):  # which is its own fault
            identity = caller.identify(None if body is None else body.fields)
            self._ledger_port.unserved(identity, "" if body is None else body.model, code)

    async def _pass(self, caller: Caller) -> web.StreamResponse:
        sent, body = await self._body(caller), None
        with contextlib.suppress(BadRequest):
            body = await self._read(caller, sent)
        return await self._pass_body(caller, sent, body)

    async def _pass_body(self, caller: Caller, sent: bytes, request: JsonBody | None) -> web.StreamResponse:
        """Pass on a request that is not captured; `request` is what was `sent`, if that is a JSON object. If the
        engine or we fail at it, it counts as an attempt at the model that went unanswered: its agent may end of it."""
        failed = ""
        try:
            response = await self._send_on(caller, sent, request)
            failed = f"status {response.status}" if fails(response.status) else ""
            return response
        except AjetError as error:
            failed = (error.code or f"status {error.status}") if is_ours(error) else ""
            raise
        finally:
            if failed:
                self._note_unserved(failed, caller, None)

    async def _send_on(self, caller: Caller, sent: bytes, request: JsonBody | None) -> web.StreamResponse:
        await self._taken_back(caller, request)
        http, body = caller.http, sent
        fields = request.fields if request is not None and caller.headers.labels.reward is not None else None
        identity = await self._rewarded(caller, sent, fields)
        model, response = "" if request is None else request.model, fetched(http.method, identity.path)
        ask = None if response is None else await self._ledger_port.kept(response)
        path = unquote(identity.path)  # which is how the engine reads it
        about, given = model_named(http.method, identity.path), None
        if about or (request is not None and path.rstrip("/") in RENAMED):
            given = await self._ledger_port.model_for(identity, about or model)
            body = body if request is None or about else request.with_fields(request.naming(given))
            model = given or about or model
        upstream_request = self._forwarding.request(
            http, caller.headers, identity.path, body or None, model=model, sticky=identity.episode or "",
            identity=ask is not None,
        )
        engines = self._engines.all()
        if about is not None and (given or len(engines) > 1) and (
            listing := await listed(engines, self._upstream, upstream_request, model)
        ):
            return listing
        if ask is not None:
            return await relay.stored(upstream_request, self._upstream, partial(shown, ask))
        if http.method != "POST":
            return await relay.passed(http, upstream_request, self._upstream)
        tenant, tail = identity.claims.tenant, Tail()
        await self._ledger_port.admit(identity)
        try:
            if not path.startswith("/v1/"):
                return await relay.passed(http, upstream_request, self._upstream, tail.feed)
            async with CallOff(http) as call_off, self._ledger_port.enter(model, identity.episode or "", call_off.now):
                return await relay.passed(http, upstream_request, self._upstream, tail.feed)
        finally:
            self._ledger_port.used(tenant, tail.tokens())

    async def _permission(self, http: web.Request, headers: Headers) -> web.StreamResponse:
        """Pass on a browser's preflight, which asks what its page may ask. It carries no key and no body. Its answer
        tells only which pages the engine serves."""
        _, path = split_path(http.rel_url.raw_path)
        request = self._forwarding.request(http, headers, path, None, identity=False)
        return await relay.passed(http, request, self._upstream)

    def _key(self, http: web.Request, headers: Headers) -> str | None:
        """The caller's key. It is found before the body is read, because a body costs memory."""
        url = http.rel_url
        if holds_key(url.raw_query_string):  # which servers on the way write down
            raise BadRequest("a key must not be in the query: send 'Authorization: Bearer KEY'", code="key_in_query")
        if headers.came_through(self._daemon):
            raise LoopDetected(LOOP, code="loop_detected")
        for name in headers.misspelt:
            if name not in self._misspelt and len(self._misspelt) < MOST_MISSPELT:
                self._misspelt.add(name)
                logger.warning("a request has the header %r, which means nothing; was %s meant?", name, meant(name))
        return key_of(url.raw_path, headers)

    def _is_ours(self, key: str) -> bool:
        """Tell whether `key` is meant for this proxy: no engine may see such a key."""
        if key.startswith(KEY_PREFIX):
            return True
        try:
            self._keys.verify(key, self._clock.now())
        except AjetError:
            return False
        return True

    async def _read(self, caller: Caller, sent: bytes) -> JsonBody:
        """The body as a JSON object, or `BadRequest`. If it is `TooLarge`, the request's reward is still recorded."""
        try:
            return JsonBody(sent, MAX_MESSAGES)
        except TooLarge:
            await self._rewarded(caller, sent, None)
            raise

    async def _rewarded(self, caller: Caller, sent: bytes, fields: Mapping[str, Any] | None) -> Identity:
        """Record the reward of a request, and return whose it is. `fields` are those of its body, if they count."""
        return await self._pipeline.reward(caller, caller.identify(fields), sent)

    async def _body(self, caller: Caller) -> bytes:
        try:
            return await body_of.read(
                caller.http, max_body=self._config.max_body, limit_s=PATIENCE_S, budget=self._budget
            )
        except (NotReady, ConnectionError, asyncio.CancelledError):
            self._ledger_port.unread(caller.claims.tenant)
            raise


def _is_preflight(http: web.Request) -> bool:
    """Tell whether a browser asks here what a page of another site may ask."""
    return http.method == "OPTIONS" and "Origin" in http.headers and "Access-Control-Request-Method" in http.headers


def application(config: Config, keys: Keys, *around: Any) -> web.Application:
    """An application without routes; `around` are middlewares around all others."""
    guards = [refuse_foreign_pages(_own_names(config))] if keys.is_open else []
    return web.Application(middlewares=[*around, error_middleware, *guards])


def runner(config: Config, served: web.Application) -> Runner:
    """The server of an application, with the limits of `config`. aiohttp waits twice for the shutdown's time: for the
    handlers, and again after it has cut off the bodies of their requests."""
    return Runner(
        served, handler_cancellation=True, access_log=None, shutdown_timeout=config.drain_s / 2,
        max_line_size=MAX_HEADER, max_field_size=MAX_HEADER, keepalive_timeout=300.0, logger=http_logger,
    )


def _own_names(config: Config) -> tuple[str, ...] | None:
    """The names by which callers may call us besides our address. None is any name: a trusted front answers for its
    names."""
    if config.trusted_front:
        return None
    name = urlsplit(config.public_url or "").hostname
    return () if name is None else (name,)
