"""The client of the control plane: asks a route until the proxy acknowledges, over one pool of connections.

This is the asynchronous client, on which all of the SDK is built; `ajet_sdk.blocking` has its blocking face.

Invariant: a request returns only what the proxy has acknowledged. Otherwise it raises. A refusal (4xx) is raised at
once, as the error that the proxy named. Anything that may pass (no answer, 408, 429, 500, 502, 503, 504) is tried again
until the deadline, with jittered backoff or when ``Retry-After`` says. Repeating is safe: rewards carry an id, and
sealing or aborting twice is the same as once. If an episode is opened twice, one of the two idles out unused.

httpx and asyncio are imported when the first request is made, so that ``import ajet_sdk`` stays quick. A process never
uses the connections of its parent, whose answers it would take for its own.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from ajet_sdk import bodies, routes
from ajet_sdk.address import is_here, is_key, server
from ajet_sdk.bodies import to_json
from ajet_sdk.errors import AjetError, BadRequest, NotReady, OverQuota, ProxyUnreachable, from_body

if TYPE_CHECKING:
    import httpx

MAX_CONNECTIONS = 256
DEFAULT_PROXY_URL = "http://127.0.0.1:8484"
DEADLINE_S = 60.0
"""An operation goes on trying for so long to be acknowledged."""
ATTEMPT_S, LEAST_ATTEMPT_S = 30.0, 1.0
"""One request waits so long for a connection, and then for its answer: at most, and however little time is left."""
LANE_FULL = "lane_full"
"""The code by which a proxy refuses an episode that is too far ahead of training."""
NO_ENGINE = "no_engine"
"""The code by which it refuses an episode of a model that no engine serves yet."""
LEAST_S = 0.001
"""Less time than this before the deadline is none."""
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
PASSING = (408, 429, 500, 502, 503, 504)
"""Answers after which the same may be asked again."""
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""The words of OpenSSL for a certificate that nobody here trusts, which no waiting changes."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the proxy is (``scheme://host:port``, no trailing slash) and the key to show it, if any. `deadline` says
    how many seconds to go on asking it."""

    url: str
    key: str | None = None
    deadline: float = DEADLINE_S

    @classmethod
    def resolve(cls, url: str | None = None, key: str | None = None, deadline: float = DEADLINE_S) -> Target:
        """From arguments, else ``AJET_PROXY_URL`` and ``AJET_API_KEY``, else an ``OPENAI_API_KEY`` that ajet issued.

        An ``OPENAI_API_KEY`` of another issuer is never shown to the proxy. `BadRequest` for what is not a URL.
        """
        url = (url or os.environ.get("AJET_PROXY_URL") or DEFAULT_PROXY_URL).rstrip("/")
        if server(url) is None:
            shown = url.rpartition("@")[2]  # a password is for nobody to see
            raise BadRequest(
                f"the proxy's URL must look like {DEFAULT_PROXY_URL}, not {shown!r}", param="AJET_PROXY_URL"
            )
        issued = os.environ.get("OPENAI_API_KEY", "")
        key = key or os.environ.get("AJET_API_KEY") or (issued if issued.startswith(bodies.KEY_PREFIX) else None)
        if key is not None and not is_key(key):
            raise BadRequest("the API key has characters that a key cannot have", param="AJET_API_KEY")
        return cls(url, key, deadline)

    @property
    def local(self) -> bool:
        """True for a proxy on this machine. Then no HTTP proxy of the environment stands in between."""
        return is_here(self.url)


class Send(NamedTuple):
    """Make this HTTP request once; `timeout` is in seconds, for each of connecting, writing and reading. The names are
    those of httpx."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_page(self) -> bool:
        """True for a web page, which no control route answers with."""
        return self.headers.get("content-type", "").startswith("text/html")

    def json(self) -> Any:
        """The decoded body, or its text if it is not JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return self.content.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class NoReply:
    """The request may or may not have arrived; no answer did. `reason` says what went wrong."""

    reason: str


def connected(target: Target) -> httpx.AsyncClient:
    """A client of httpx for `target`; `BadRequest` for what the environment names and httpx cannot use.

    It has no TLS set-up for plain HTTP. To this machine it takes no proxy of the environment, and then httpx would not
    read ``SSL_CERT_FILE`` either. So those certificates are set here, for any host.
    """
    import httpx

    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64, keepalive_expiry=15.0)
    try:
        verify = httpx.create_ssl_context() if target.url.startswith("https:") else False
        return httpx.AsyncClient(verify=verify, trust_env=not target.local, limits=limits)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise BadRequest(f"the environment's HTTP proxy cannot be used: {error}", param="HTTP_PROXY") from error
    except OSError as error:
        raise BadRequest(f"the file that SSL_CERT_FILE names cannot be used: {error}", param="SSL_CERT_FILE") from error


def _here() -> tuple[int, object]:
    """This process, and the event loop that runs: whose connections these are."""
    import asyncio

    return os.getpid(), asyncio.get_running_loop()


class _Pool:
    """Connections of one process and one event loop; another one makes its own."""

    def __init__(self) -> None:
        self._http: httpx.AsyncClient | None = None
        self._owner: tuple[int, object] | None = None

    @property
    def made(self) -> bool:
        """True if this process has made any."""
        return self._owner is not None and self._owner[0] == os.getpid()

    def connections(self, target: Target) -> httpx.AsyncClient:
        """The connections, made when they are first needed."""
        if self._http is None or self._owner != _here():
            self._http, self._owner = connected(target), _here()
        return self._http

    async def close(self) -> None:
        """Lets go of the connections."""
        http, owner, self._http, self._owner = self._http, self._owner, None, None
        if http is not None and owner == _here():
            await http.aclose()


class Client:
    """A connection to one proxy's control plane. What it connects belongs to the event loop that uses it.

    `proxy_url` and `api_key` default to the environment's (see `Target.resolve`). `deadline`, in seconds, bounds how
    long each operation may try to be acknowledged. A client that was closed makes new connections if it is used again.
    """

    clock = staticmethod(time.monotonic)
    chance = random.Random().random
    """Draws the jitter of a pause, and nothing from the generator that an agent may have seeded."""

    def __init__(
        self, proxy_url: str | None = None, api_key: str | None = None, *, deadline: float = DEADLINE_S
    ) -> None:
        self.target = Target.resolve(proxy_url, api_key, deadline=deadline)
        self._pool = _Pool()

    def but(self, **change: Any) -> Client:
        """This client with another `key` or `deadline`, over the same connections."""
        other = copy.copy(self)
        other.target = replace(self.target, **change)
        return other

    def within(self, seconds: float) -> Client:
        """This client with a deadline of at most so many seconds."""
        return self.but(deadline=min(seconds, self.target.deadline))

    async def ask(self, name: str, body: Any = None, *, id: str | None = None, **query: Any) -> Reply:
        """Asks the route called `name` in `ajet_sdk.routes.ROUTES` until it is acknowledged.

        `body` is the route's dataclass. If a lane has no room for an episode, this waits for as long as it takes,
        unless the body's ``hold_s`` says for how long.
        """
        send, deadline = _send(self.target, name, body, id, query), self.target.deadline
        started, attempts = self.clock(), 0
        while True:
            left = deadline - (self.clock() - started)
            outcome = await self.attempt(send._replace(timeout=min(ATTEMPT_S, max(LEAST_ATTEMPT_S, left))))
            attempts += 1
            if isinstance(outcome, Reply) and 200 <= outcome.status < 300 and not outcome.is_page:
                return outcome
            failure = _failure(outcome)
            left = deadline - (self.clock() - started)
            stays = UNTRUSTED in outcome.reason if isinstance(outcome, NoReply) else outcome.status not in PASSING
            if stays:
                raise failure
            if failure.code in (LANE_FULL, NO_ENGINE) and getattr(body, "hold_s", None) is not None:
                raise failure
            if failure.code == LANE_FULL:  # the proxy is well, and has it wait for training
                started, left = self.clock(), deadline
            if left < LEAST_S:
                raise _gave_up(failure, send, attempts, deadline)
            pause = failure.retry_after
            if pause is None:
                pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(attempts - 1, 16))
            await self.sleep(min(left, max(pause, BACKOFF_FIRST_S) * (1.0 + 0.5 * self.chance())))

    async def attempt(self, send: Send) -> Reply | NoReply:
        """Makes one HTTP request, once."""
        import httpx

        try:
            answer = await self._pool.connections(self.target).request(**send._asdict())
        except httpx.RequestError as error:
            return NoReply(f"{type(error).__name__}: {error}")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise BadRequest(f"{self.target.url} cannot be asked: {error}", param="AJET_PROXY_URL") from error
        return Reply(answer.status_code, answer.headers, answer.content)

    async def sleep(self, seconds: float) -> None:
        """Waits, on the same clock."""
        import asyncio

        await asyncio.sleep(seconds)

    @property
    def used(self) -> bool:
        """True once there are connections to let go of."""
        return self._pool.made

    async def aclose(self) -> None:
        """Lets go of the connections."""
        await self._pool.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _send(target: Target, name: str, body: Any, id: str | None, query: Mapping[str, Any] | None) -> Send:
    route = routes.route(name)
    path = route.path if id is None else route.path.replace("{id}", bodies.check_episode(id, "id"))
    headers = {"accept": "application/json"}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    content = None
    if route.body is not None:
        content = json.dumps({} if body is None else to_json(body)).encode()
        headers["content-type"] = "application/json"
    url = target.url + routes.PREFIX + path + ("?" + urlencode(query) if query else "")
    return Send(route.method, url, headers, content, ATTEMPT_S)


def _failure(outcome: Reply | NoReply) -> AjetError:
    if isinstance(outcome, NoReply):
        reason = outcome.reason
        if UNTRUSTED in reason and "mismatch" in reason:
            reason += ": the proxy's certificate is for other names: use one of those"
        elif UNTRUSTED in reason:
            reason += ": the proxy's certificate is not trusted here. Name the file of its CA in SSL_CERT_FILE"
        return ProxyUnreachable(reason)
    return refused(outcome)


def refused(reply: Reply) -> AjetError:
    """The error that an answer which acknowledges nothing stands for."""
    try:
        after: float | None = max(0.0, float(reply.headers["retry-after"]))
    except (KeyError, ValueError):
        after = None
    return from_body(reply.status, reply.json(), retry_after=after)


def _gave_up(failure: AjetError, send: Send, attempts: int, deadline: float) -> AjetError:
    """The error that ends all trying: it says what was asked, how often, for how long, and what came last."""
    tried = f"{send.method} {send.url}: {attempts} {'attempt' if attempts == 1 else 'attempts'} in {deadline:g} s"
    if isinstance(failure, (NotReady, OverQuota)):
        return type(failure)(
            f"{failure.message} ({tried})", code=failure.code, param=failure.param, retry_after=failure.retry_after
        )
    return ProxyUnreachable(
        f"no proxy acknowledged {tried}; the last one: {failure.message}. "
        "Is `ajet-proxy serve` running, and is AJET_PROXY_URL the address that it printed?",
        code="unreachable",
    )
