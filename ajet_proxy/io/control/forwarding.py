"""Control routes that reach a worker: passed on to the process that has the ledger, and its answers passed back.

They travel as HTTP on a socket file in the data directory, which nobody else can enter. So a long poll, a stream of
events and a batch of any size take the same way. A caller who goes away ends the work at the other end. The ledger's
process cannot see the caller's address, whether TLS was spoken, or whose certificate was shown. These go along in
headers that no client can set. Who may do what is decided there. Here only a body from a caller without a key is
refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ajet_proxy.core.identity.headers import is_text
from ajet_proxy.core.identity.keys import Keys, key_in
from ajet_proxy.io.capture import relay
from ajet_proxy.io.engines.upstream import HOP_BY_HOP, EngineRequest, as_written, session
from ajet_proxy.io.http import body as body_of
from ajet_proxy.io.http import tls
from ajet_proxy.io.http.aiohttp_internals import PATIENCE_S
from ajet_proxy.io.http.errors import Handler
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_sdk.errors import NotReady
from ajet_sdk.limits import MAX_CONTROL

PEER, SCHEME, CERTIFICATE = "X-AJet-Relay-Peer", "X-AJet-Relay-Scheme", "X-AJet-Relay-Certificate"
_OURS = HOP_BY_HOP | {"content-length", "content-encoding", "expect", *map(str.lower, (PEER, SCHEME, CERTIFICATE))}
KEEPALIVE_S = 30.0
RETRY_AFTER_S = 2.0


class ControlForwarding:
    """Passes requests on to the socket at `path`."""

    def __init__(self, path: str, *, keys: Keys, clock: Clock, max_body: int, budget: MemoryBudget) -> None:
        self._path = path
        self._budget = budget
        self._keys = keys
        self._clock = clock
        self._max_body = max_body
        self._session: aiohttp.ClientSession

    def add_routes(self, app: web.Application) -> None:
        """Take the control routes of `app`, before its front takes what is left."""
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/metrics", self._pass, expect_handler=body_of.unasked)
        app.router.add_route("*", "/ajet{tail:(/.*)?}", self._pass, expect_handler=body_of.unasked)

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.UnixConnector(self._path, limit=0, keepalive_timeout=KEEPALIVE_S)
        async with session(connector, aiohttp.ClientTimeout(total=None)) as self._session:
            yield

    async def _pass(self, http: web.Request) -> web.StreamResponse:
        if http.body_exists:
            self._keys.authenticate(key_in(http.headers), self._clock.now())
        most = min(self._max_body, MAX_CONTROL)
        body = await body_of.read(http, max_body=most, limit_s=PATIENCE_S, budget=self._budget)
        headers = CIMultiDict(
            (name, value) for name, value in as_written(http.raw_headers).items()
            if name.lower() not in _OURS and is_text(value)
        )
        headers[PEER], headers[SCHEME] = http.remote or "", http.scheme
        if (shown := tls.subject(http)) is not None:
            headers[CERTIFICATE] = quote(shown)
        request = EngineRequest(http.method, http.rel_url.raw_path_qs, headers, body or None, model="", sticky="")
        return await relay.passed(http, request, self)

    async def send(self, request: EngineRequest) -> aiohttp.ClientResponse:
        """The answer of the ledger's process."""
        try:
            return await self._session.request(
                request.method, URL(f"http://ledger{request.target}", encoded=True), data=request.body,
                headers=request.headers, allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            raise NotReady("the proxy is stopping", code="stopping", retry_after=RETRY_AFTER_S) from error


@web.middleware
async def forwarded(http: web.Request, handler: Handler) -> web.StreamResponse:
    """A middleware around everything else: makes a worker's request look as the worker's client made it."""
    headers = http.headers.copy()
    told: dict[str, Any] = {"remote": headers.pop(PEER, ""), "scheme": headers.pop(SCHEME, http.scheme)}
    shown = headers.pop(CERTIFICATE, None)
    request = http.clone(headers=headers, **told)
    if shown is not None:
        request[tls.SUBJECT] = unquote(shown)
    return await handler(request)
