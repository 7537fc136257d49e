"""A captured request from step to step. `Pipeline.identify` and `Pipeline.capture` are the table of contents.

What a step finds is a value that it hands to the next one:

- `Received`: the request as it was read (`io.capture.front`).
- `Identified`: whose episode it is (`core.identity.ladder`), and what the engine's route is asked. A reward that the
  request brings is on record.
- `Begun`: the request has passed the gate, and its calls have begun in the ledger (`io.ledger_port`).
- `Prepared`: the exchange is built, once. Its prompt is the sampled ids where its history is the same text.
- `Relay`: the request is sent, and the engine's answer begins (`io.capture.relay`). The client gets what comes, until
  it is known what became of the calls. These are put on disk (`io.capture.recorder`), and the client gets the end.

Invariant: whatever ends a request early, each of its calls ends in the ledger, as lost with a reason.

Next: ajet_proxy/core/protocol/exchange.py
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from time import monotonic
from typing import Any, Final

from aiohttp import ClientResponse, web
from msgspec import Struct
from msgspec.structs import replace

from ajet_proxy.core.conversation.history import History
from ajet_proxy.core.conversation.said import Said
from ajet_proxy.core.identity.headers import Headers, retries, retry_key, retry_keys
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.identity.ladder import Identity, identify
from ajet_proxy.core.protocol.dialect import Ask, Dialect
from ajet_proxy.core.protocol.exchange import Exchange, question
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.usage import Tail
from ajet_proxy.core.trajectory.call import (
    DISCONNECTED,
    ENGINE_ERROR,
    ENGINE_SILENT,
    NO_CHAT_ROUTE,
    NOT_WRITTEN,
    Origin,
)
from ajet_proxy.io.capture.continuity import ContinuedRequest, Continuity
from ajet_proxy.io.capture.recorder import Recorder
from ajet_proxy.io.capture.relay import Relay, Sender, relaying, why_gone
from ajet_proxy.io.engines.probe import ChatRoutes, DialectProbe
from ajet_proxy.io.engines.questions import Facts, Questions
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Forwarding, Upstream
from ajet_proxy.io.http.audit import SUBJECT
from ajet_proxy.io.ledger_port.cancellation import CallOff
from ajet_proxy.io.ledger_port.port import Begun, CallRequest, Gone, LedgerPort
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.settings import Config
from ajet_sdk.errors import BadRequest

MAX_CHOICES = 1024
"""Each choice of a request is a call."""
NO_ROUTE: Final = (404, 405, 501)
"""An engine that does not have a route says so."""
REFUSED: Final = (400, 403, 422)
"""An engine that does not take a field, or not from everybody, says so."""
PASSED_BY: Final = Ask(skip=NO_CHAT_ROUTE)
"""An engine without a chat route is asked what the client asked, on the client's own route."""


class Caller(Struct, frozen=True):
    """Who asks: the request as it came, those of its headers that count, and what its key may do. ``body_names`` is
    true if names in bodies count."""

    http: web.Request
    headers: Headers
    claims: Claims
    body_names: bool

    def identify(self, body: Mapping[str, Any] | None) -> Identity:
        """The identity of the request, by its path, key and headers, and by the fields of its `body` if they are known
        and names in bodies count."""
        body = body if self.body_names else None
        return identify(path=self.http.rel_url.raw_path, headers=self.headers, body=body, claims=self.claims)


class Received(Struct, frozen=True):
    """A client's request to a captured route, with its body as it was sent and as it was read."""

    caller: Caller
    dialect: Dialect
    sent: bytes
    body: JsonBody


class Identified(Struct, frozen=True):
    """A request whose episode is known, as far as anything names it. ``asked`` is its body as the engine's route takes
    it, and ``ask`` says what the engine is asked for besides. ``said`` is compared with earlier and later requests.
    ``retry`` is what it is known by when it is sent again."""

    received: Received
    identity: Identity
    asked: JsonBody
    ask: Ask
    history: History | None
    said: Said
    retry: Mapping[str, Any]


class Prepared(Struct, frozen=True):
    """Calls whose request can be sent. ``body`` is the client's own. ``began`` is when they did, by the monotonic
    clock. ``tail`` is the end of an answer that is not captured, which tells how many tokens it took."""

    caller: Caller
    body: JsonBody
    begun: Begun
    began: float
    exchange: Exchange
    request: EngineRequest
    sender: Sender
    recorder: Recorder
    tail: Tail


class Pipeline:
    """The steps of all captured requests, and all that they share."""

    def __init__(
        self, config: Config, *, ledger_port: LedgerPort, upstream: Upstream, engines: Engines,
        forwarding: Forwarding, metrics: Metrics,
    ) -> None:
        self._ledger_port = ledger_port
        self._upstream = upstream
        self._forwarding = forwarding
        self._keep_alive_s = config.keep_alive_s
        self._pauses = config.gate_mode == "pause"
        self._continuity = Continuity(upstream, ledger_port, metrics) if config.continuity == "auto" else None
        self._chat_routes = ChatRoutes(upstream, engines)
        self._dialects = DialectProbe(upstream)
        self._facts = Facts(upstream, metrics, ledger_port.enter)
        self.close = self._facts.sampling.close
        self._tell_versions: set[str] = set()
        """The routes on which an engine has shown that it can say which weights sampled each token."""

    async def capture(self, identified: Identified) -> web.StreamResponse:
        """Ask the engine on the agent's behalf, and record the calls that come of it."""
        http = identified.received.caller.http
        async with CallOff(http) as call_off, self._begin(identified, call_off) as begun:
            prepared = await self._prepare(identified, begun)
            try:
                with await self._send(prepared) as answer:
                    await answer.relay()
                    await prepared.recorder.record()
                    return await answer.release()
            except BaseException as error:
                prepared.recorder.lose(self._why_lost(prepared, error))
                raise
            finally:
                self._account(prepared)

    async def identify(self, received: Received) -> Identified:
        """Find whose request it is and what the engine's route is asked; `BadRequest` if it cannot be asked that."""
        caller, dialect, body = received.caller, received.dialect, received.body
        identity = caller.identify(body.fields)
        rewards = identity.labels.reward is not None
        is_sure = identity.episode is not None and not (identity.may_be_shared and identity.claims.lanes)
        if rewards and is_sure:
            identity = await self.reward(caller, identity, received.sent, call=True)
        body.check_size(dialect.entries)
        asked, history, ask = await self._carried(received), None, PASSED_BY
        if asked is not None:
            history = dialect.history(asked.fields, identity.scope, exact=self._continuity is not None)
        scope = identity.scope if _unstated(identity) else b""
        retry = retry_keys(caller.http.headers, dialect.path, received.sent, scope=scope)
        if rewards and not is_sure:
            identity = await self.reward(caller, identity, received.sent, history, retry, call=True)
        if asked is not None:
            ask = question(dialect, asked, MAX_CHOICES)
        asked = asked or body
        said = Said(history, {name: body.fields.get(name) for name in dialect.words}, identity.scope)
        return Identified(received, identity, asked, ask, history, said, retry)

    async def reward(
        self, caller: Caller, identity: Identity, body: bytes, history: History | None = None,
        sent: Mapping[str, Any] | None = None, *, call: bool = False,
    ) -> Identity:
        """Record the reward of a request, if it brings one. Returns `identity` with the episode that it stands for.

        `call` says that the request makes a call; `history` and `sent` find the episode where nothing names it. A
        request that makes no call rewards what its name last stood for. One that makes a call rewards the episode which
        the call goes to. A final reward is the exception: it can only be meant for what is there already.

        A request with the same `body` is known to be sent again by an equal ``Idempotency-Key`` or a count of retries.
        It gives the same reward. With a key, it is refused for another value.
        """
        http, labels, reward = caller.http, identity.labels, identity.labels.reward
        if identity.episode is not None or sent:
            open_still = call and reward is not None and not reward.final
            looking = replace(identity, labels=replace(labels, reward=None)) if open_still else identity
            identity = replace(await self._ledger_port.find(looking, history, sent or {}), labels=labels)
        if reward is not None:
            if identity.episode is not None:
                http[SUBJECT] = identity.episode
            key = retry_key(http.headers)
            said = key or repr((http.method, identity.path, labels.agent, reward))
            digest = hashlib.sha256(said.encode("utf-8", "surrogatepass") + body).hexdigest()
            await self._ledger_port.reward(identity, f"rew-{digest[:32]}", None if key else retries(http.headers) > 0)
        return identity

    async def _carried(self, received: Received) -> JsonBody | None:
        """The request's body as the engine's route takes it; None if the engine does not have that route."""
        dialect, model = received.dialect, received.body.model

        def look(path: str) -> EngineRequest:
            return replace(self._asks(received.caller)(path, None, model=model, sticky=""), method="GET")

        if dialect.path == dialect.target:
            return received.body
        if self._chat_routes.lack(model):
            return None
        try:
            return dialect.translate(received.body)
        except BadRequest:
            async with self._ledger_port.enter(model):
                if not await self._chat_routes.look(dialect, model, look):
                    raise
            return None

    def _begin(self, identified: Identified, call_off: CallOff) -> AbstractAsyncContextManager[Begun]:
        identity, said, received = identified.identity, identified.said, identified.received
        dialect = received.dialect
        request = CallRequest(
            identity, identified.history if _unstated(identity) else None, identified.retry, received.body.model,
            identified.ask.choices, dialect.path, said.key,
            said.prompt if identity.labels.task is None else "",
            dialect.is_first(received.body.fields), dialect.is_probe(identified.asked.fields),
        )
        return self._ledger_port.begin(request, call_off.now)

    async def _prepare(self, identified: Identified, begun: Begun) -> Prepared:
        received, began = identified.received, monotonic()
        caller, dialect, asked = received.caller, received.dialect, identified.asked
        ask, history, asks = identified.ask, identified.history, self._asks(caller)
        if ask is not PASSED_BY and (doubt := dialect.doubt(received.body.fields)) is not None:
            asks_model = partial(asks, model=begun.model, sticky=begun.episode)
            try:
                dialect = await self._dialects.settled(dialect, doubt, begun.model, asks_model)
            except asyncio.CancelledError:
                reason = self._why_gone(caller, begun, began)
                self._ledger_port.lose([Gone(begun.episode, call, reason) for call in begun.calls])
                raise
            asked = dialect.translate(received.body)
            ask = question(dialect, asked, MAX_CHOICES)
            history = dialect.history(asked.fields, identified.identity.scope, exact=self._continuity is not None)
        exchange = Exchange(
            dialect, asked, ask=ask, model=begun.episode_model, versions=dialect.target in self._tell_versions
        )
        if self._pauses and ask is not PASSED_BY:
            exchange.under(begun.policy_version, begun.gate_since)
        origin = Origin(
            calls=begun.calls, episode=begun.episode, model=begun.model, agent=begun.agent,
            started_at=begun.started_at, policy_version=begun.policy_version,
            identified_by=begun.identified_by, altered=exchange.altered,
        )
        request = asks(exchange.target, exchange.upstream_body(), model=begun.model, sticky=begun.episode)
        recorder = Recorder(
            origin, exchange, Questions(self._facts, request, exchange, asks), ledger_port=self._ledger_port,
            history=identified.history, begins=identified.said.begins_with(begun.open),
        )
        sender: Sender = self._upstream
        if self._continuity is not None and dialect.takes_ids:
            sender = continued = ContinuedRequest(self._continuity, exchange, origin, history)
            recorder.finished = continued.finished
        return Prepared(caller, received.body, begun, began, exchange, request, sender, recorder, Tail())

    async def _send(self, prepared: Prepared) -> Relay:
        exchange, request, dialect = prepared.exchange, prepared.request, prepared.exchange.dialect
        answer = None if exchange.ask is PASSED_BY else await prepared.sender.send(request)
        if answer is not None and answer.status in REFUSED and exchange.retreat():
            answer.close()
            answer = await prepared.sender.send(replace(request, body=exchange.upstream_body()))
        elif answer is None or (answer.status in NO_ROUTE and dialect.path != dialect.target):
            answer, request = await self._pass_by(prepared, answer)
        return relaying(
            prepared.caller.http, answer, request, prepared.recorder,
            None if exchange.skip is None else prepared.tail, self._upstream.pulse(request.asked[-1]),
            keep_alive_s=self._keep_alive_s,
        )

    async def _pass_by(
        self, prepared: Prepared, refused: ClientResponse | None
    ) -> tuple[ClientResponse, EngineRequest]:
        """Send the client's own request on its own route; its answer, and that request. If the engine has neither
        route: what it `refused`, and the request for that."""
        asked, exchange = prepared.request, prepared.exchange
        body = prepared.body.with_fields(prepared.body.naming(prepared.begun.episode_model))
        request = self._asks(prepared.caller)(exchange.dialect.path, body, model=asked.model, sticky=asked.sticky)
        with ExitStack() as to_close:
            if refused is not None:
                to_close.callback(refused.close)
            answer = await self._upstream.send(request)
            if refused is None or answer.status not in NO_ROUTE:
                exchange.pass_by()
                self._chat_routes.note(request.model)
                return answer, request
            answer.close()
            to_close.pop_all()
            return refused, asked

    def _why_gone(self, caller: Caller, begun: Begun, since: float, asked: Sequence[str] = ()) -> str:
        """Give the reason for which the client of calls does not get the end of their answer. Nothing has come of it
        `since` then from who was `asked`."""
        reason = why_gone(caller.http)
        is_dead = self._upstream.is_dead(begun.model, begun.episode, asked, monotonic() - since)
        return ENGINE_SILENT if reason == DISCONNECTED and is_dead else reason

    def _why_lost(self, prepared: Prepared, error: BaseException) -> str:
        """Give the reason for which calls are lost whose request ends with `error`."""
        if not isinstance(error, asyncio.CancelledError | ConnectionError):
            return ENGINE_ERROR
        recorder = prepared.recorder
        asked = [recorder.engine] if recorder.engine else prepared.request.asked
        reason = self._why_gone(prepared.caller, prepared.begun, recorder.came_at or prepared.began, asked)
        return NOT_WRITTEN if reason in (DISCONNECTED, ENGINE_SILENT) and recorder.holds_back() else reason

    def _account(self, prepared: Prepared) -> None:
        """Count what lost calls used for their tenant, and note whether the engine tells versions."""
        recorder, exchange = prepared.recorder, prepared.exchange
        if recorder.lost and (
            used := prepared.tail.tokens() or sum(exchange.reader.sampled[place] for place in recorder.lost)
        ):
            self._ledger_port.used(prepared.caller.claims.tenant, used)
        if exchange.reader.tells_versions:
            self._tell_versions.add(exchange.target)

    def _asks(self, caller: Caller) -> Callable[..., EngineRequest]:
        """Makes requests to the engine in the name of `caller`."""
        return partial(self._forwarding.request, caller.http, caller.headers)


def _unstated(identity: Identity) -> bool:
    """Tell whether its history may have to tell whose a request is."""
    return identity.episode is None or identity.may_be_shared
