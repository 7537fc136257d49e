"""What a client says to the control plane and what it makes of the answers, without doing any I/O.

Each operation is a generator: it yields effects (`Send`, `Sleep`), is sent what came of them (`Reply`, `NoReply`), and
returns its result. `ajet_sdk.client` carries the effects out with blocking calls and `ajet_sdk.aio` with asyncio. So
the two share every decision: what is retried, for how long, and what counts as acknowledged.

Invariant: an operation returns only what the proxy has acknowledged. Otherwise it raises. A refusal (4xx) is raised at
once, as the error that the proxy named. Anything that may pass (no answer, 408, 429, 500, 502, 503, 504) is tried again
until the deadline, with jittered backoff or when ``Retry-After`` says. Repeating is safe: rewards carry an id, and
sealing or aborting twice is the same as once. If an episode is opened twice, one of the two idles out unused.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

from ajet_sdk import routes
from ajet_sdk.address import is_key, server
from ajet_sdk.bodies import to_json
from ajet_sdk.errors import AjetError, BadRequest, NotReady, OverQuota, ProxyUnreachable, from_body

DEFAULT_PROXY_URL = "http://127.0.0.1:8484"
DEADLINE_S = 60.0
"""How long an operation goes on trying to be acknowledged."""
ATTEMPT_S = 30.0
"""How long one request waits for a connection, and then for its answer."""
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
"""What OpenSSL says of a certificate that nobody here trusts, which no waiting changes."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the proxy is (``scheme://host:port``, no trailing slash) and the key to show it, if any. `deadline` says
    how many seconds to go on asking it; `clock` measures them, and `chance` draws the jitter."""

    url: str
    key: str | None = None
    deadline: float = DEADLINE_S
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    @classmethod
    def resolve(
        cls, url: str | None = None, key: str | None = None, environ: Mapping[str, str] | None = None,
        deadline: float = DEADLINE_S,
    ) -> Target:
        """From arguments, else ``AJET_PROXY_URL`` and ``AJET_API_KEY``, else an ``OPENAI_API_KEY`` that ajet issued.

        An ``OPENAI_API_KEY`` of another issuer is never shown to the proxy. `BadRequest` for what is not a URL.
        """
        environ = os.environ if environ is None else environ
        url = (url or environ.get("AJET_PROXY_URL") or DEFAULT_PROXY_URL).rstrip("/")
        if server(url) is None:
            shown = url.rpartition("@")[2]  # a password is for nobody to see
            raise BadRequest(
                f"the proxy's URL must look like {DEFAULT_PROXY_URL}, not {shown!r}", param="AJET_PROXY_URL"
            )
        issued = environ.get("OPENAI_API_KEY", "")
        key = key or environ.get("AJET_API_KEY") or (issued if issued.startswith(routes.KEY_PREFIX) else None)
        if key is not None and not is_key(key):
            raise BadRequest("the API key has characters that a key cannot have", param="AJET_API_KEY")
        return cls(url, key, deadline)

    @property
    def local(self) -> bool:
        """Whether the proxy is on this machine. Then no HTTP proxy of the environment stands in between."""
        host = urlsplit(self.url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")


class Send(NamedTuple):
    """Make this HTTP request once; `timeout` is in seconds, for each of connecting, writing and reading. The names are
    those of httpx."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_page(self) -> bool:
        """Whether it is a web page, which no control route answers with."""
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


T = TypeVar("T")
Talk = Generator[Send | Sleep, Reply | NoReply | None, T]
"""An operation: sends, sleeps, and in the end a result of type `T`."""


def request(
    target: Target, name: str, body: Any = None, *, id: str | None = None, query: Mapping[str, Any] | None = None
) -> Talk[Reply]:
    """Asks the route called `name` until it is acknowledged.

    `body` is one of the dataclasses of `ajet_sdk.routes`. If a lane has no room for an episode, this waits for as long
    as it takes, unless the body's ``hold_s`` says for how long.
    """
    send = _send(target, name, body, id, query)
    started, attempts = target.clock(), 0
    while True:
        left = target.deadline - (target.clock() - started)
        timeout = min(ATTEMPT_S, max(1.0, left))
        outcome = yield Send(send.method, send.url, send.headers, send.content, timeout)
        attempts += 1
        if isinstance(outcome, Reply) and 200 <= outcome.status < 300 and not outcome.is_page:
            return outcome
        failure = _failure(outcome)
        left = target.deadline - (target.clock() - started)
        if not _may_pass(outcome):
            raise failure
        if failure.code in (LANE_FULL, NO_ENGINE) and getattr(body, "hold_s", None) is not None:
            raise failure
        if failure.code == LANE_FULL:  # the proxy is well, and has it wait for training
            started, left = target.clock(), target.deadline
        if left < LEAST_S:
            raise _gave_up(failure, send, attempts, target.deadline)
        pause = failure.retry_after
        if pause is None:
            pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(attempts - 1, 16))
        yield Sleep(min(left, max(pause, BACKOFF_FIRST_S) * (1.0 + 0.5 * target.chance())))


def _send(target: Target, name: str, body: Any, id: str | None, query: Mapping[str, Any] | None) -> Send:
    route = routes.route(name)
    path = route.path if id is None else route.path.replace("{id}", routes.check_id(id, "id"))
    headers = {"accept": "application/json"}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    content = None
    if route.body is not None:
        content = json.dumps({} if body is None else to_json(body)).encode()
        headers["content-type"] = "application/json"
    url = target.url + routes.PREFIX + path + ("?" + urlencode(query) if query else "")
    return Send(route.method, url, headers, content, ATTEMPT_S)


def _may_pass(outcome: Reply | NoReply | None) -> bool:
    if isinstance(outcome, NoReply):
        return UNTRUSTED not in outcome.reason
    return outcome is None or outcome.status in PASSING


def _failure(outcome: Reply | NoReply | None) -> AjetError:
    if not isinstance(outcome, Reply):
        reason = outcome.reason if outcome else "not tried"
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
