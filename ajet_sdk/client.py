"""The blocking client: carries out the operations of `ajet_sdk.operations` over one pool of connections.

httpx is imported when the first request is made, so that ``import ajet_sdk`` stays quick. A `Client` may be shared by
threads and survives a fork. It holds no state but its connections. A process never uses those of its parent, whose
answers it would take for its own. A client that was closed makes new ones if it is used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ajet_sdk.errors import BadRequest
from ajet_sdk.operations import DEADLINE_S, NoReply, Reply, Send, Sleep, T, Talk, Target, request

if TYPE_CHECKING:
    import httpx

H = TypeVar("H")
MAX_CONNECTIONS = 256


def connected(kind: Callable[..., H], target: Target, transport: Any = None) -> H:
    """A client of httpx for `target`; `BadRequest` for what the environment names and httpx cannot use.

    It has no TLS set-up for plain HTTP. To this machine it takes no proxy of the environment, and then httpx would not
    read ``SSL_CERT_FILE`` either. So those certificates are set here, for any host.
    """
    import httpx

    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64, keepalive_expiry=15.0)
    try:
        verify = httpx.create_ssl_context() if target.url.startswith("https:") else False
        return kind(transport=transport, verify=verify, trust_env=not target.local, limits=limits)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise BadRequest(f"the environment's HTTP proxy cannot be used: {error}", param="HTTP_PROXY") from error
    except OSError as error:
        raise BadRequest(f"the file that SSL_CERT_FILE names cannot be used: {error}", param="SSL_CERT_FILE") from error


def no_reply(target: Target, error: Exception) -> NoReply:
    """What came of a request that raised `error`; `BadRequest` if the URL itself is at fault."""
    import httpx

    if isinstance(error, httpx.RequestError):
        return NoReply(f"{type(error).__name__}: {error}")
    raise BadRequest(f"{target.url} cannot be asked: {error}", param="AJET_PROXY_URL") from error


class ClientBase:
    """What both clients have: where their proxy is, and connections that belong to the process that made them.
    `transport` replaces the network in tests."""

    def __init__(
        self,
        proxy_url: str | None = None,
        api_key: str | None = None,
        *,
        deadline: float = DEADLINE_S,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.target = Target.resolve(proxy_url, api_key, deadline=deadline)
        self._transport = transport
        self._http: Any = None
        self._process = os.getpid()
        self._making = threading.Lock()

    def _connections(self, kind: Callable[..., H]) -> H:
        """The httpx client of this `kind`; it is made when it is first needed."""
        if self._process != os.getpid():  # the parent's, and its lock may have been held by another thread
            self._process, self._http, self._making = os.getpid(), None, threading.Lock()
        with self._making:
            self._http = self._http or connected(kind, self.target, self._transport)
            http: H = self._http
            return http


class Client(ClientBase):
    """A connection to one proxy's control plane.

    `proxy_url` and `api_key` default to the environment's (see `Target.resolve`). `deadline`, in seconds, bounds how
    long each operation may try to be acknowledged.
    """

    def drive(self, talk: Talk[T]) -> T:
        """Carries an operation out to its end."""
        outcome: Reply | NoReply | None = None
        while True:
            try:
                effect = talk.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            outcome = self._perform(effect)

    def ask(self, name: str, body: Any = None, *, id: str | None = None, **query: Any) -> Reply:
        """The acknowledged answer of the route called `name` in `ajet_sdk.routes.ROUTES`; `body` is its dataclass."""
        return self.drive(request(self.target, name, body, id=id, query=query))

    def _perform(self, effect: Send | Sleep) -> Reply | NoReply | None:
        import httpx

        if isinstance(effect, Sleep):
            time.sleep(effect.seconds)
            return None
        try:
            answer = self._connections(httpx.Client).request(**effect._asdict())
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
            return no_reply(self.target, error)
        return Reply(answer.status_code, answer.headers, answer.content)

    def close(self) -> None:
        """Lets go of the connections."""
        http, self._http = self._http, None
        if http is not None and self._process == os.getpid():
            http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
