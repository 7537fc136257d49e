"""A captured request from step to step. `Pipeline.capture` is the table of contents; each step is one method or module.

- `identify`: whose episode it is (`core.identity.ladder`). A reward that the request brings is on record first.
- `translate`: what the engine's route is asked, and whether it can be asked at all.
- `begin`: the request waits at the gate, and its calls begin in the ledger (`io.ledger_port`).
- `continue`: the exchange is built, once. Its prompt is the sampled ids where its history is the same text.
- `send`: the engine's answer begins.
- `relay`: the client gets what comes, until it is known what became of the calls (`io.capture.relay`).
- `record`: the calls are on disk (`io.capture.recorder`).
- `release`: the client gets the end.

Invariant: whatever ends a request early, each of its calls ends in the ledger, as lost with a reason.

Next: ajet_proxy/core/identity/ladder.py
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final

from aiohttp import ClientResponse, web
from msgspec.structs import replace

from ajet_proxy.core.conversation.history import History, Mark, deferred, marks_of
from ajet_proxy.core.conversation.prompts import begins, is_probe, is_short, prompt_digest
from ajet_proxy.core.identity.headers import Headers, retries, retry_key, retry_keys
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.identity.ladder import Identity, identify
from ajet_proxy.core.ledger.attempts import Said
from ajet_proxy.core.protocol.anthropic.messages import Messages
from ajet_proxy.core.protocol.anthropic.template import Template, depends_on_template, questions, template_of
from ajet_proxy.core.protocol.chat import Chat, trial, wants_no_reasoning, withholds
from ajet_proxy.core.protocol.dialect import Ask, Dialect
from ajet_proxy.core.protocol.exchange import Exchange, question
from ajet_proxy.core.protocol.request import Request
from ajet_proxy.core.protocol.sampling import SHAPING, effective, plain
from ajet_proxy.core.protocol.usage import Tail
from ajet_proxy.core.trajectory.call import (
    DISCONNECTED,
    ENGINE_ERROR,
    ENGINE_SILENT,
    NO_CHAT_ROUTE,
    Captured,
    Origin,
    Outcome,
)
from ajet_proxy.io.capture.continuity import ContinuedRequest, Continuity
from ajet_proxy.io.capture.recorder import Recorder, Sampled
from ajet_proxy.io.capture.relay import Relay, Sender, relaying, why_gone
from ajet_proxy.io.engines.probe import ChatRoutes, EngineProbe, SamplingProbe
from ajet_proxy.io.engines.rendering import repeated
from ajet_proxy.io.engines.rescoring import score
from ajet_proxy.io.engines.stops import Stops
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Forwarding, Upstream
from ajet_proxy.io.http.aiohttp_internals import MAX_HEADER, PATIENCE_S
from ajet_proxy.io.http.audit import SUBJECT
from ajet_proxy.io.ledger_port.cancellation import CallOff
from ajet_proxy.io.ledger_port.port import Begun, CallRequest, Gone, LedgerPort
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import BadRequest

NO_ROUTE: Final = (404, 405, 501)
"""How an engine says that it does not have a route."""
REFUSED: Final = (400, 403, 422)
"""How an engine says that it does not take a field, or not from everybody."""
MOST_TITLED: Final = 10_000
PASSED_BY: Final = Ask(skip=NO_CHAT_ROUTE)
"""An engine without a chat route is asked what the client asked, on the client's own route."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Limits in seconds, bytes and messages; a `read_timeout` or `keep_alive` of 0 means none. ``upstream_key`` is the
    engines' own API key. ``pauses`` says that weights change while calls are in flight. ``daemon`` is the daemon's
    name, which no other one has."""

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
    body_names: bool = True


class Incoming:
    """A client's request on its way. Each step adds what it finds."""

    claims: Claims
    body: bytes
    request: Request
    """The body as it was read."""
    identity: Identity
    dialect: Dialect
    translated: Request
    """The request as the engine's route takes it."""
    ask: Ask
    """What the engine is asked for besides, and how many calls come of it."""
    history: Callable[[], History | None]
    """Needed where the answer ends; before that only if nothing names the episode."""
    route: str
    """The engine's."""
    said: Said
    """What it says, as later requests and earlier ones are compared with it."""
    retry: Mapping[str, Any]
    """By what the request is known when it is sent again."""
    begun: Begun
    began: float
    """When, by the monotonic clock."""
    exchange: Exchange
    upstream_request: EngineRequest
    recorder: Recorder
    sender: Sender
    tail: Tail | None
    """The end of an answer that is not captured, which tells how many tokens it took."""

    def __init__(self, http: web.Request, headers: Headers) -> None:
        """`headers` are those of `http` that count."""
        self.http = http
        self.headers = headers
        self.tail = None
        self.asked = False
        """Whether the ledger was asked to begin its calls."""

    def identify(self, body: Mapping[str, Any] | None) -> Identity:
        """Whose request it is, by its path, key and headers, and by the fields of its `body` if they are known and
        names in bodies count."""
        return identify(path=self.http.rel_url.raw_path, headers=self.headers, body=body, claims=self.claims)


class Pipeline:
    """What all captured requests share."""

    def __init__(
        self, *, ledger_port: LedgerPort, upstream: Upstream, engines: Engines, forwarding: Forwarding,
        metrics: Metrics, settings: FrontSettings,
    ) -> None:
        self._ledger_port = ledger_port
        self._upstream = upstream
        self._forwarding = forwarding
        self._metrics = metrics
        self._settings = settings
        self._continuity = (
            Continuity(upstream, ledger_port=ledger_port, metrics=metrics) if settings.continuity else None
        )
        self._chat_routes = ChatRoutes(upstream, engines)
        self._templates = EngineProbe(upstream, questions, template_of, otherwise=Template())
        self._withholds = EngineProbe(upstream, trial, withholds, otherwise=True)
        self._sampling = SamplingProbe(upstream)
        self._stops = Stops(upstream)
        self._titled: set[str] = set()
        """Episodes that were given a task."""
        self._tell_versions: set[str] = set()
        """The routes on which an engine has shown that it can say which weights sampled each token."""

    def _note_titled(self, episode: str) -> None:
        if len(self._titled) >= MOST_TITLED:
            self._titled.clear()
        self._titled.add(episode)

    async def close(self, _app: web.Application | None = None) -> None:
        """Ask engines nothing more of our own."""
        await self._sampling.close()

    async def capture(self, incoming: Incoming) -> web.StreamResponse:
        """Ask the engine on the agent's behalf, and record the calls that come of it."""
        await self._identify(incoming)
        await self._translate(incoming)
        async with CallOff(incoming.http) as call_off, self._begin(incoming, call_off) as incoming.begun:
            incoming.began = monotonic()
            with self._left_before(incoming):
                await self._continue(incoming)
            with self._calls_end(incoming), await self._send(incoming) as answer:
                await answer.relay()
                await incoming.recorder.record(incoming.exchange.outcomes)
                return await answer.release()

    async def _identify(self, incoming: Incoming) -> None:
        named = incoming.request.fields if self._settings.body_names else None
        incoming.identity = identity = incoming.identify(named)
        if identity.labels.reward is not None and identity.episode is not None:
            incoming.identity = await record_reward(
                self._ledger_port, incoming.http, identity, incoming.body, call=True
            )
        incoming.request.check_size()

    async def _translate(self, incoming: Incoming) -> None:
        """Find what the engine's route is asked; `BadRequest` if it cannot be asked that."""
        dialect, identity = incoming.dialect, incoming.identity
        carried = await self._carry(incoming)
        route = dialect.target if carried else dialect.path
        fields, exact = incoming.translated.fields, self._continuity is not None
        incoming.history = history = deferred(route, fields, identity.scope, exact=exact)
        incoming.said, incoming.route = Said(history, fields, identity.scope), route
        scope = identity.scope if _untold(identity) else b""
        incoming.retry = retry_keys(incoming.http.headers, dialect.path, incoming.body, scope=scope)
        if identity.labels.reward is not None and identity.episode is None:
            incoming.identity = await record_reward(
                self._ledger_port, incoming.http, identity, incoming.body, incoming.history(), incoming.retry, call=True
            )
        most = self._settings.max_choices
        incoming.ask = question(dialect, incoming.translated, most) if carried else PASSED_BY

    async def _carry(self, incoming: Incoming) -> bool:
        """Translate the request for the engine's route. False if the engine does not have that route."""
        dialect, request = incoming.dialect, incoming.request

        def look(path: str) -> EngineRequest:
            return replace(self._request(incoming, path, None, request.model, sticky=""), method="GET")

        incoming.translated = request
        if dialect.path == dialect.target:
            return True
        if self._chat_routes.lack(request.model):
            return False
        try:
            incoming.translated = dialect.translate(request)
        except BadRequest:
            async with self._ledger_port.enter(request.model):
                if not await self._chat_routes.look(dialect, request.model, look):
                    raise
            return False
        return True

    def _begin(self, incoming: Incoming, call_off: CallOff) -> AbstractAsyncContextManager[Begun]:
        identity, fields = incoming.identity, incoming.translated.fields
        history = incoming.history() if _untold(identity) else None
        first = begins(fields)
        request = CallRequest(
            identity, history, incoming.retry, incoming.request.model, incoming.ask.choices, incoming.dialect.path,
            incoming.said.key, self._prompt(incoming) if first or is_short(fields) else "", first, is_probe(fields),
        )
        incoming.asked = True
        return self._ledger_port.begin(request, call_off.now)

    def _prompt(self, incoming: Incoming) -> str:
        """A digest of what is said, unless the episode has been given a task."""
        identity = incoming.identity
        if identity.labels.task is not None or (identity.episode in self._titled and not _untold(identity)):
            return ""
        return prompt_digest(incoming.route, incoming.translated.fields)

    async def _continue(self, incoming: Incoming) -> None:
        begun = incoming.begun
        if begun.titled:
            self._note_titled(begun.episode)
        await self._suit(incoming)
        incoming.exchange = exchange = Exchange(
            incoming.dialect, incoming.translated, ask=incoming.ask, model=begun.episode_model,
            versions=incoming.dialect.target in self._tell_versions,
        )
        if self._settings.pauses and incoming.ask is not PASSED_BY:
            exchange.under(begun.policy_version, begun.gate_since)
        origin = Origin(
            calls=begun.calls, episode=begun.episode, model=begun.model, agent=begun.agent,
            started_at=begun.started_at, policy_version=begun.policy_version,
            identified_by=begun.identified_by, altered=exchange.altered,
        )
        asks = partial(self._forwarding.request, incoming.http, incoming.headers)  # holds no `incoming`: see `Recorder`
        incoming.upstream_request = request = asks(
            exchange.target, exchange.upstream_body(), model=begun.model, sticky=begun.episode
        )
        incoming.recorder = recorder = Recorder(
            origin, score=lambda choice: score(choice, self._upstream, request, exchange.cache_salt, self._metrics),
            find_same_text=partial(repeated, self._upstream, request), ledger_port=self._ledger_port,
            find_sampling=partial(self._sampled, exchange, begun, asks), begins=incoming.said.begins(begun.open),
            marks=self._marks(incoming.history, exchange),
            is_cut=lambda choice: self._stops.is_cut(choice, request, exchange.asked.fields), stops=self._stops.seen,
        )
        incoming.sender = self._upstream
        if self._continuity is not None:
            incoming.sender = turn = ContinuedRequest(self._continuity, exchange, origin, incoming.history)
            recorder.finished = turn.finished

    async def _suit(self, incoming: Incoming) -> None:
        """Translate again where the model's engines decide for themselves what the request means."""
        begun, fields = incoming.begun, incoming.request.fields

        def ask(path: str, body: bytes) -> EngineRequest:
            return self._request(incoming, path, body, begun.model, sticky=begun.episode)

        if incoming.ask is PASSED_BY:
            return
        if isinstance(incoming.dialect, Messages) and depends_on_template(fields):
            incoming.dialect = Messages(await self._templates.of(begun.model, ask))
        elif isinstance(incoming.dialect, Chat) and wants_no_reasoning(fields):
            incoming.dialect = Chat(withholds=await self._withholds.of(begun.model, ask))
        else:
            return
        incoming.translated = incoming.dialect.translate(incoming.request)
        incoming.ask = question(incoming.dialect, incoming.translated, self._settings.max_choices)

    async def _sampled(self, exchange: Exchange, begun: Begun, asks: Callable[..., EngineRequest]) -> Sampled:
        """How the calls were sampled. If the request names nothing that shapes that, it is known beforehand."""
        model = begun.model

        def ask(path: str, body: bytes) -> EngineRequest:
            return asks(path, body, model=model, sticky=begun.episode)

        known = self._sampling.kept.get((model, self._upstream.standing(model)))
        if known is None:
            known = await self._sampling.of(model, ask, partial(self._ledger_port.enter, model))
        if SHAPING.isdisjoint(exchange.asked.fields):
            return partial(plain, exchange.target, known)
        return partial(effective, exchange.target, exchange.asked.fields, known)

    async def _send(self, incoming: Incoming) -> Relay:
        exchange, request = incoming.exchange, incoming.upstream_request
        answer = None if incoming.ask is PASSED_BY else await incoming.sender.send(request)
        if answer is not None and answer.status in REFUSED and exchange.retreat():
            answer.close()
            answer = await incoming.sender.send(replace(request, body=exchange.upstream_body()))
        elif answer is None or (answer.status in NO_ROUTE and incoming.dialect.path != incoming.dialect.target):
            answer, request = await self._pass_by(incoming, answer)
        incoming.tail = None if exchange.skip is None else Tail()
        return relaying(
            incoming.http, answer, request, exchange, incoming.recorder, incoming.tail,
            self._upstream.pulse(str(answer.url.origin())), keep_alive_s=self._settings.keep_alive,
        )

    async def _pass_by(
        self, incoming: Incoming, refused: ClientResponse | None
    ) -> tuple[ClientResponse, EngineRequest]:
        """Send the client's own request on its own route; its answer, and that request. If the engine has neither
        route: what it `refused`, and the request for that."""
        body = incoming.request.with_fields(incoming.request.naming(incoming.begun.episode_model))
        asked = incoming.upstream_request
        request = self._request(incoming, incoming.dialect.path, body, asked.model, asked.sticky)
        with ExitStack() as to_close:
            if refused is not None:
                to_close.callback(refused.close)
            answer = await self._upstream.send(request)
            if refused is None or answer.status not in NO_ROUTE:
                incoming.exchange.pass_by()
                self._chat_routes.note(request.model)
                return answer, request
            answer.close()
            to_close.pop_all()
            return refused, asked

    def _why_gone(self, incoming: Incoming, asked: Sequence[str] = ()) -> str:
        """Why the client of calls does not get the end of their answer. Nothing of that has come from who was `asked`.
        """
        reason, begun = why_gone(incoming.http), incoming.begun
        is_dead = self._upstream.is_dead(begun.model, begun.episode, asked, monotonic() - incoming.began)
        return ENGINE_SILENT if reason == DISCONNECTED and is_dead else reason

    @contextmanager
    def _left_before(self, incoming: Incoming) -> Iterator[None]:
        """Before their request is sent, an engine may be asked about itself, and a client may give up meanwhile."""
        try:
            yield
        except asyncio.CancelledError:
            begun, reason = incoming.begun, self._why_gone(incoming)
            self._ledger_port.lose([Gone(begun.episode, call, reason) for call in begun.calls])
            raise

    @contextmanager
    def _calls_end(self, incoming: Incoming) -> Iterator[None]:
        """However this block is left, its calls have ended. What lost calls used is counted for their tenant."""
        recorder, exchange = incoming.recorder, incoming.exchange
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            nothing_came = recorder.answer is None or not recorder.answer.total_bytes
            asked = incoming.upstream_request.asked
            recorder.lose(self._why_gone(incoming, asked) if nothing_came else why_gone(incoming.http))
            raise
        except BaseException:
            recorder.lose(ENGINE_ERROR)
            raise
        finally:
            if recorder.lost:
                told = 0 if incoming.tail is None else incoming.tail.tokens()
                if used := told or sum(exchange.reader.sampled[place] for place in recorder.lost):
                    self._ledger_port.used(incoming.claims.tenant, used)
        if exchange.reader.tells_versions:
            self._tell_versions.add(exchange.target)

    def _marks(
        self, history: Callable[[], History | None], exchange: Exchange
    ) -> Callable[[Outcome], tuple[Mark, ...]]:
        """Tells where a client's history ends after each choice; called before the answer's end is released."""

        def marks(outcome: Outcome) -> tuple[Mark, ...]:
            if exchange.response_id is not None:
                self._ledger_port.keep(exchange.response_id, exchange.ask)
            captured = outcome if isinstance(outcome, Captured) else None
            return marks_of(history(), exchange.answers[outcome.index], captured)

        return marks

    def _request(self, incoming: Incoming, path: str, body: bytes | None, model: str, sticky: str) -> EngineRequest:
        return self._forwarding.request(incoming.http, incoming.headers, path, body, model=model, sticky=sticky)


def _untold(identity: Identity) -> bool:
    """Whether its history may have to tell whose a request is."""
    return identity.episode is None or identity.may_be_shared


async def record_reward(
    ledger_port: LedgerPort, http: web.Request, identity: Identity, body: bytes, history: History | None = None,
    sent: Mapping[str, Any] | None = None, *, call: bool = False,
) -> Identity:
    """Record the reward of a request, if it brings one. Returns `identity` with the episode that it stands for.

    `call` says that the request makes a call; `history` and `sent` find the episode where nothing names it. A request
    that makes no call rewards what its name last stood for. One that makes a call rewards the episode which the call
    goes to. A final reward is the exception: it can only be meant for what is there already.

    A request with the same `body` is known to be sent again by an equal ``Idempotency-Key`` or a count of retries. It
    gives the same reward. With a key, it is refused for another value.
    """
    labels, reward = identity.labels, identity.labels.reward
    if identity.episode is not None or sent:
        open_still = call and reward is not None and not reward.final
        looking = replace(identity, labels=replace(labels, reward=None)) if open_still else identity
        identity = replace(await ledger_port.find(looking, history, sent or {}), labels=labels)
    if reward is not None:
        if identity.episode is not None:
            http[SUBJECT] = identity.episode
        key = retry_key(http.headers)
        said = key or repr((http.method, identity.path, labels.agent, reward))
        digest = hashlib.sha256(said.encode("utf-8", "surrogatepass") + body).hexdigest()
        await ledger_port.reward(identity, f"rew-{digest[:32]}", None if key else retries(http.headers) > 0)
    return identity
