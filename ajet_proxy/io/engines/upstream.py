"""The way to the engines: one connection pool, header rules, retry and failover.

vLLM closes an idle connection after 5 seconds; ours are given up after 4. A request may still meet a connection that
closes at that very moment: it was reused, and not one byte came back. Then it is sent once more on a fresh connection.
Whether a byte came is seen where bytes come in (`Tap`), because aiohttp's errors do not tell. An engine that cannot be
reached is left alone for a while and the next is tried. Any other failure is the caller's to see, because the engine
may have begun to generate.

If an engine's host is gone, nothing says so: the system asks it (`watched`), so that nobody waits for it.

The pool has no upper limit: a thousand agents at once are a thousand connections. There is no limit on how long an
answer takes unless one is configured, because it would be a bias against long episodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import aiohttp
from aiohttp import web
from msgspec import Struct, field
from multidict import CIMultiDict
from yarl import URL

from ajet_proxy.core.identity.headers import Headers, is_text
from ajet_proxy.core.identity.keys import holds_key
from ajet_proxy.io.engines.pulse import LOOK_S, Pulse
from ajet_proxy.io.http.aiohttp_internals import LATEST, MAX_HEADER, Pool, break_off, tap_of
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError, EngineError, EngineTimeout, NotReady
from ajet_sdk.headers import HEADER_PREFIX
from ajet_sdk.sockets import watching

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""For an engine to accept a connection."""
KEEPALIVE_S = 4.0
COOLDOWN_S, LONGEST_COOLDOWN_S = 10.0, 60.0
"""For how long an engine that could not be reached is left alone, at first and at most."""
AT_ONCE_S = 2.0
"""A connection that breaks later than this after its request was not closed for being idle: the engine may have worked
on the request."""
HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
))
_OF_OTHER_LENGTH = HOP_BY_HOP | {"content-length"}
_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect"}
MAX_HEADERS = 1000
"""Of an engine's answer."""
_CREDENTIALS = ("authorization", "x-api-key")


class Engines:
    """Which engines serve a model: those that a trainer `announced`, else the `fixed` ones of the command line.

    `announced` reads the ledger; `fixed` maps a model name (``""``: any) to base URLs. A request for a model that
    nobody knows still reaches an engine, whose own 404 then says what is wrong.
    """

    def __init__(
        self,
        fixed: Mapping[str, tuple[str, ...]],
        announced: Callable[[str], tuple[str, ...]],
        models: Callable[[], tuple[str, ...]],
    ) -> None:
        self._fixed = fixed
        self._announced = announced
        self._models = models

    def of(self, model: str) -> tuple[str, ...]:
        """The base URLs that serve `model`; those of other models are left out."""
        return _base_urls(self._announced(model) or self._fixed.get(model) or self._fixed.get("", ()))

    def candidates(self, model: str) -> tuple[str, ...]:
        """Where a request for `model` can go; empty while no engine at all is known, or none of an announced model."""
        return self.of(model) or (() if model in self._models() else self.all())

    def lacks(self, models: Iterable[str]) -> str | None:
        """The first of the models that no engine serves."""
        known = self.names()
        return next((model for model in models if model not in known and not self.of(model)), None)

    def home(self, model: str) -> str:
        """As whose a request for `model` counts: that of a model with engines of its own, of the only one that is
        announced, or "" for any other."""
        if model in self._fixed or model in (announced := self._models()):
            return model
        return announced[0] if len(announced) == 1 else ""

    def guards(self, gate: str, home: str) -> bool:
        """Tell whether the gate of a model, or the one without a name, holds what counts as of `home`. It holds the
        model's own. Where no other model is announced, it holds all. What names no announced model may be answered by
        any engine that it can reach, and so is held by the gates of their models."""
        announced = self._models()
        if gate in ("", home):
            return True
        if home in announced or (announced and gate not in announced):
            return False
        return len(announced) < 2 or not set(self.of(gate)).isdisjoint(self.candidates(home))

    def passes(self, shut: Callable[[], Iterable[str]], home: str) -> bool:
        """Tell whether what counts as of `home` may go while the gates are shut that `shut` tells."""
        return not any(self.guards(gate, home) for gate in shut())

    def all(self) -> tuple[str, ...]:
        """Every engine once."""
        urls = [url for name in self.names() for url in self.of(name)]
        return tuple(dict.fromkeys(urls))

    def behind(self, gate: str) -> tuple[str, ...]:
        """The engines whose weights change while a gate is shut: a model's own, or all where no other is announced."""
        return self.of(gate) if gate and set(self._models()) - {gate} else self.all()

    def shares(self, gate: str) -> bool:
        """Tell whether an engine of the model of a gate also serves another one by its name, as two adapters: what is
        frozen there is frozen for both. A gate without a name is that of the only model that is announced."""
        announced = self._models()
        model = gate or (announced[0] if len(announced) == 1 else "")
        others = {url for name in self.names() if name not in ("", model) for url in self.of(name)}
        return model != "" and not others.isdisjoint(self.of(model))

    def names(self) -> tuple[str, ...]:
        """The models that have engines of their own; ``""`` among them stands for any model."""
        return tuple(sorted({*self._models(), *self._fixed}))


def base_url(url: str) -> str:
    """`url` without a trailing ``/`` or ``/v1``, so that an engine may be named as clients name it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def as_asked(url: str) -> str:
    """The base URL `url` as the addresses of its answers begin with it, however it was written."""
    return str(URL(url, encoded=True)).rstrip("/")


@lru_cache
def _base_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(base_url, urls))


class EngineRequest(Struct, frozen=True):
    """A request to an engine. ``target`` is path and query as written; ``sticky`` keeps an episode on one engine.
    ``asked`` has the engines that it was sent to, in this body or another."""

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes | None
    model: str
    sticky: str
    asked: list[str] = field(default_factory=list)


Standing = tuple[tuple[str, int], ...]
"""Engines, each with how often it was found gone. In another standing it may be another process that answers."""


class _Away(NamedTuple):
    """An engine that could not be reached. Others are asked first until `until`, which is `pause` seconds later."""

    until: float
    pause: float


def watched(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for `address` whose connection breaks off some two minutes after the other host is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option in watching():
        made.setsockopt(*option)
    return made


def session(connector: aiohttp.BaseConnector, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    """A client that leaves requests and answers unchanged."""
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=MAX_HEADER, max_field_size=MAX_HEADER, max_headers=MAX_HEADERS,
    )


class Upstream:
    """Sends requests to the engine that should have them."""

    def __init__(self, engines: Engines, *, clock: Clock, metrics: Metrics, read_timeout: float) -> None:
        """`read_timeout` limits an engine's silence, in seconds; 0 is no limit."""
        self._engines = engines
        self._clock = clock
        self._metrics = metrics
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read_timeout or None)
        self._pooled: aiohttp.ClientSession
        self._fresh: aiohttp.ClientSession
        self._away: dict[str, _Away] = {}
        self._gone: Counter[str] = Counter()
        self._pulses: dict[str, Pulse] = {}

    @asynccontextmanager
    async def connected(self, _app: web.Application | None = None) -> AsyncIterator[None]:
        """Requests can be sent only in this context; at its end the connections are closed."""
        pooled = Pool(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=watched)
        fresh = Pool(limit=0, force_close=True, socket_factory=watched)
        async with session(pooled, self._timeout) as self._pooled, session(fresh, self._timeout) as self._fresh:
            yield
            for pulse in self._pulses.values():
                await pulse.close()

    def pulse(self, url: str) -> Pulse:
        """The pulse of the server at `url`. Only its scheme, host and port count."""
        known = self._pulses.get(url)
        if known is None:
            origin = str(URL(url, encoded=True).origin())
            known = self._pulses.get(origin) or Pulse(partial(self._is_healthy, origin))
            self._pulses[url] = self._pulses[origin] = known
        return known

    def is_dead(self, model: str, sticky: str, asked: Sequence[str], waited_s: float) -> bool:
        """Tell whether the engine is dead that was `asked` last, as far as a client can tell that waited for so long.
        If none was, it is the one that `order` names first."""
        return any(self.pulse(url).is_dead(waited_s) for url in asked[-1:] or self.order(model, sticky)[:1])

    async def _is_healthy(self, origin: str) -> bool:
        try:
            look = self._fresh.get(f"{origin}/health", allow_redirects=False)
            async with asyncio.timeout(LOOK_S), look as answer:
                return answer.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False

    def standing(self, model: str) -> Standing:
        """The engines that may answer for `model`, as far as is known of them by now."""
        return tuple((url, self._gone[url]) for url in self._engines.candidates(model))

    def order(self, model: str, sticky: str) -> list[str]:
        """The engines to try for `sticky`, by rendezvous hash; those that could not be reached lately come last."""
        candidates, now = self._engines.candidates(model), self._clock.now()
        if len(candidates) < 2:
            return list(candidates)

        def rank(url: str) -> tuple[bool, bytes]:
            is_away = url in self._away and self._away[url].until > now
            return is_away, hashlib.sha256(f"{url}\n{sticky}".encode()).digest()

        return sorted(candidates, key=rank)

    async def send(self, request: EngineRequest) -> aiohttp.ClientResponse:
        """The engine's answer as soon as its headers are there; `EngineError` or `EngineTimeout` if none comes."""
        failure: AjetError | None = None
        for url in self.order(request.model, request.sticky):
            if (away := self._away.get(url)) is not None:  # while this request looks, others leave the engine alone
                until = self._clock.now() + COOLDOWN_S + CONNECT_S
                self._away[url] = away._replace(until=until)
            request.asked.append(url)
            try:
                answer = await self._send_to(url, request)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                failure = self._failed(url, error)
                self._leave_alone(url, failure, longer=isinstance(error, TimeoutError))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._failed(url, error) from error
            else:
                if self._away.pop(url, None) is not None:
                    logger.warning("the engine at %s is back", url)
                return answer
        raise failure or NotReady("no engine has been announced yet", code="no_engine", retry_after=KEEPALIVE_S)

    def _leave_alone(self, url: str, why: AjetError, *, longer: bool) -> None:
        """Have other engines asked before one that could not be reached. The pause grows each time if it is `longer`,
        because finding out took long."""
        before = self._away.get(url)
        if before is None:
            logger.warning("%s; where there are others they are asked first", why.message)
        pause = min(LONGEST_COOLDOWN_S, 2 * before.pause) if longer and before is not None else COOLDOWN_S
        self._away[url] = _Away(self._clock.now() + pause, pause)

    async def told(self, request: EngineRequest, url: str | None = None) -> tuple[int, bytes]:
        """The status and the body of the whole answer to `request`. If it must come of the engine at `url`, what fails
        is aiohttp's error."""
        answer = await (self.send(request) if url is None else self._send_to(url, request))
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()

    async def _send_to(self, url: str, request: EngineRequest) -> aiohttp.ClientResponse:
        LATEST.set(None)
        pulse = self.pulse(url)
        with pulse:
            try:
                answer = await self._request(self._pooled, url, request)
            except aiohttp.ClientConnectionError as error:
                tap = LATEST.get()
                is_old = tap is not None and tap.reused and not tap.heard and tap.age() <= AT_ONCE_S
                if isinstance(error, TimeoutError) or not is_old:
                    raise
                self._metrics.inc("ajet_upstream_retries_total")
                answer = await self._request(self._fresh, url, request)
        pulse.beat = True
        return answer

    async def _request(self, pool: aiohttp.ClientSession, url: str, request: EngineRequest) -> aiohttp.ClientResponse:
        answer = await pool.request(
            request.method, URL(url + request.target, encoded=True), data=request.body, headers=request.headers,
            allow_redirects=False,
        )
        if (tap := tap_of(answer)) is not None:
            tap.content = answer.content
        elif answer.connection is not None:
            break_off(answer.content)
        return answer

    def _failed(self, url: str, error: Exception) -> AjetError:
        if isinstance(error, TimeoutError):
            self._metrics.inc("ajet_upstream_errors_total", kind="timeout")
            return EngineTimeout(f"the engine at {url} did not answer in time", code="engine_timeout")
        self._gone[url] += 1
        kind = "connect" if isinstance(error, aiohttp.ClientConnectorError) else "broken"
        self._metrics.inc("ajet_upstream_errors_total", kind=kind)
        what = "cannot be reached" if kind == "connect" else "closed the connection without an answer"
        if isinstance(error, aiohttp.ClientResponseError):
            what = "gave an answer that is not HTTP, or whose head is too long"
        return EngineError(f"the engine at {url} {what}", code=f"engine_{kind}")


class Forwarding:
    """Makes the engines' requests of clients': without keys of ours (`is_ours`), with `upstream_key` in place of any
    other key, and under the name of this `daemon`."""

    def __init__(self, *, daemon: str, upstream_key: str | None, is_ours: Callable[[str], bool]) -> None:
        self._daemon = daemon
        self._upstream_key = upstream_key
        self._is_ours = is_ours

    def request(
        self, http: web.Request, headers: Headers, path: str, body: bytes | None, *, model: str = "",
        sticky: str = "", identity: bool = True,
    ) -> EngineRequest:
        """The request of `http` for the engine's route `path`, with its query and those of its `headers` that count."""
        query = http.rel_url.raw_query_string
        return EngineRequest(
            method=http.method, target=f"{path}?{query}" if query else path,
            headers=self.headers(headers.sent.items(), identity=identity), body=body, model=model, sticky=sticky,
        )

    def headers(self, headers: Iterable[tuple[str, str]], *, identity: bool) -> CIMultiDict[str]:
        """The client's headers as the engine gets them. What is for us, for one hop or about the body's framing is left
        out. With `identity` the answer must not be compressed. ``Via`` names this daemon, which so recognizes a request
        of its own. A repeated name is spelled as it was first, since aiohttp keeps all values of one spelling."""
        named, upstream_key = [(name.lower(), name, value) for name, value in headers], self._upstream_key
        dropped = _dropped(named, _NOT_FORWARDED)
        spelled: dict[str, str] = {}
        out: CIMultiDict[str] = CIMultiDict()
        for lower, name, value in named:
            if lower in dropped or lower.startswith(HEADER_PREFIX) or (identity and lower == "accept-encoding"):
                continue
            if lower in _CREDENTIALS and (upstream_key is not None or any(map(self._is_ours, keys_in(value)))):
                continue
            if holds_key(value):  # as a cookie or in a header of the caller's own
                continue
            out.add(spelled.setdefault(lower, name), sendable(value))
        out.add(spelled.get("via", "Via"), f"1.1 {self._daemon}")
        if identity:
            out["Accept-Encoding"] = "identity"
        if upstream_key is not None:
            out["Authorization"] = f"Bearer {upstream_key}"
        return out


def as_written(raw_headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Headers with their names as they were written; aiohttp's own views respell the names that they know."""
    code = "utf-8", "surrogateescape"
    return CIMultiDict([(name.decode(*code), value.decode(*code)) for name, value in raw_headers])


def response_headers(headers: Mapping[str, str], *, keep_length: bool) -> CIMultiDict[str]:
    """The engine's headers as the client gets them. `keep_length` means that the body stays as it is, or that the
    caller corrects the length."""
    named = [(name.lower(), name, value) for name, value in headers.items()]
    dropped = _dropped(named, HOP_BY_HOP if keep_length else _OF_OTHER_LENGTH)
    return CIMultiDict([(name, sendable(value)) for lower, name, value in named if lower not in dropped])


def sendable(value: str) -> str:
    """A header's `value`, or a reason phrase, in a form that is written whole. aiohttp writes UTF-8 and leaves out
    other bytes. These are taken for Latin-1, which they mostly are."""
    return value if value.isascii() or is_text(value) else value.encode("utf-8", "surrogateescape").decode("latin-1")


def _dropped(named: Iterable[tuple[str, str, str]], names: frozenset[str]) -> frozenset[str]:
    """`names` and the header names that a ``Connection`` header declares to be for this hop only. Each header is
    `named` in lower case first."""
    values = [value for lower, _, value in named if lower == "connection"]
    return names.union(name.strip().lower() for value in values for name in value.split(",")) if values else names


def keys_in(value: str) -> tuple[str, str]:
    """The key in a credential header: without its scheme, and with it, in case that is part of the key."""
    return value.strip().partition(" ")[2].strip(), value.strip()
