"""aiohttp's server, whose answers to what is no HTTP have the shape of contract §5.8, and whose patience ends.

A request line or header that its parser refuses never reaches the application, so the one place where errors become
answers (`errors`) does not see it. The connection asks that place instead. What was sent is not repeated in the answer:
it may hold a key.

A client that opens a connection and does not finish the head of a request, or that stops reading its answer, costs
memory, and the latter keeps a gate from draining. Both are cut off after `patience_s`. For reading that is measured
where it is felt, between the transport's call to pause and its call to resume, so a client that reads costs nothing.
Who reads a large answer slowly is left in peace while `PROGRESS` of it goes out in each `patience_s`.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from ajet_proxy.io.http.errors import error_response
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.sockets import UNTAKEN_S, watching

PROGRESS = 1 << 20
"""Bytes."""
PATIENCE_S = 120.0
MAX_HEADER = 64 << 10
"""Bytes of a header, or of a request line."""


class Runner(web.AppRunner):
    """Serves an application, as `web.AppRunner` does. A client may keep us waiting for `patience_s`. Bodies come as
    they were packed; `body` unpacks them."""

    def __init__(self, app: web.Application, *, patience_s: float = PATIENCE_S, **options: Any) -> None:
        super().__init__(app, auto_decompress=False, **options)
        self._patience_s = patience_s

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation,
            loop=made._loop, **made._kwargs,
        )
        server.patience_s = self._patience_s
        return server


class Unmeasured(web.StreamResponse):
    """An answer that leaves as it comes. Where it tells no length, a client of HTTP/1.0 sees its end by the
    connection's."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if request.version < HttpVersion11 and "Content-Length" not in self.headers:
            self.force_close()
        return await super().prepare(request)


def stalled(http: web.BaseRequest) -> bool:
    """Whether the client of `http` was cut off because it read no more."""
    return isinstance(http.protocol, _Connection) and http.protocol.stalled


class _Server(web.Server):
    patience_s: float

    def __call__(self) -> web.RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.patience_s = self.patience_s
        return connection


class _Connection(web.RequestHandler):
    __slots__ = ("_deadline", "_unsent", "patience_s", "stalled")
    patience_s: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.stalled = False
        found = transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            for option in watching(max(UNTAKEN_S, self.patience_s)):
                found.setsockopt(*option)
        self._deadline = self._loop.call_later(self.patience_s, self._unasked)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline.cancel()

    def _unasked(self) -> None:
        """The time for the first request's head is over; aiohttp sees to those that follow."""
        if not self._request_count:
            self.force_close()

    def _watch(self) -> None:
        """Give the client its time to read on."""
        self._deadline.cancel()
        self._unsent = self._waiting()
        self._deadline = self._loop.call_later(self.patience_s, self._unread)

    def _unread(self) -> None:
        if self._waiting() <= self._unsent - PROGRESS:
            self._watch()
            return
        self.stalled = True
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()

    def _waiting(self) -> int:
        """Bytes that the client has not read."""
        return self.transport.get_write_buffer_size() if isinstance(self.transport, asyncio.Transport) else 0

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # it logs, and raises where an answer has begun
        answer = error_response(request.path, _error(exc))
        answer.force_close()
        return answer


def _error(error: BaseException | None) -> AjetError:
    if isinstance(error, LineTooLong):
        return BadRequest("the request line or a header is longer than allowed", code="header_too_large")
    if isinstance(error, HttpProcessingError):
        return BadRequest("the request is not HTTP/1.1 as it should be", code="bad_http")
    return AjetError("the proxy failed unexpectedly; its log says why", code="internal_error")
