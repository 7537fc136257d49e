"""The only module that uses aiohttp beyond its public interface, and why each part is needed.

- `Runner`: connections of a class of our own. It cuts off clients that stop reading, and answers what is not HTTP in
  the shape of contract §5.8. It refuses paths that would take aiohttp's router long.
- `Pool` and `Tap`: which connection a request got, whether a byte came back, and pieces without waking a task.
- `break_off`, `unread`: answers that break off with their connection, and what had come of them.

None of this is promised. `TRIED` are the versions that it was tried with, and ``pyproject.toml`` asks for no others.
``tests/proxy/io/http/test_aiohttp_internals.py`` says which part a newer one has changed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from ajet_proxy.io.http.errors import error_response
from ajet_sdk.errors import AjetError, BadRequest, NotFound
from ajet_sdk.sockets import UNTAKEN_S, watching

TRIED: Final = ">=3.14,<3.15"
PROGRESS = 1 << 20
"""Bytes."""
PATIENCE_S = 120.0
MAX_HEADER = 64 << 10
"""Bytes of a header, or of a request line."""
MOST_SIGNS = 5000
"""Slashes and percent signs of a path. The longest name of a model has 4000."""


class Runner(web.AppRunner):
    """Serves an application, as `web.AppRunner` does. A client may keep us waiting for `patience_s`. Bodies come as
    they were packed; `body` unpacks them.

    Why: a runner offers no public way to have its connections made by another class."""

    def __init__(self, app: web.Application, *, patience_s: float = PATIENCE_S, **options: Any) -> None:
        super().__init__(app, auto_decompress=False, **options)
        self._patience_s = patience_s

    @property
    def server(self) -> Any:
        """The factory that the sites listen with: called, it makes a connection. None before `setup`."""
        return None if self._server is None else partial(_Connection, self._server, self._patience_s)


def stalled(http: web.BaseRequest) -> bool:
    """True if the client of `http` was cut off because it stopped reading."""
    return isinstance(http.protocol, _Connection) and http.protocol.stalled


def stopped(http: web.BaseRequest) -> bool:
    """True if the server stopped and ended `http`, whose client had not left."""
    return isinstance(http.protocol, _Connection) and http.protocol.stopped


class _Connection(web.RequestHandler):
    """A client's connection.

    What aiohttp's parser refuses never reaches the application. So the one place where errors become answers (`errors`)
    does not see it, and `handle_error` asks that place. What was sent is not repeated in the answer, because it may
    hold a key.

    A client that does not finish the head of its first request costs memory. So does one that stops reading its answer,
    which also keeps a gate from draining. Both are cut off after `patience_s`. For reading, that is measured between
    the transport's call to pause and its call to resume, so a client that reads costs nothing. One that reads a large
    answer slowly is left alone while `PROGRESS` of it goes out in each `patience_s`.

    A server that stops cancels its handlers, just as a client does that leaves. `stopped` tells the two apart.
    """

    __slots__ = ("_deadline", "_patience_s", "_unsent", "stalled", "stopped")

    def __init__(self, server: web.Server, patience_s: float) -> None:
        super().__init__(server, loop=server._loop, **server._kwargs)
        self._patience_s = patience_s
        self._request_handler = partial(_path, server.request_handler)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.stalled = self.stopped = False
        found = transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            for option in watching(max(UNTAKEN_S, self._patience_s)):
                found.setsockopt(*option)
        self._deadline = self._loop.call_later(self._patience_s, self._unasked)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        await super().shutdown(timeout)
        self.stopped = True  # a handler that was cancelled in there has not run yet

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline.cancel()

    def _unasked(self) -> None:
        """The time for the head of the first request is over. aiohttp itself limits those that follow."""
        if not self._request_count:
            self.force_close()

    def _watch(self) -> None:
        """Give the client its time to read on."""
        self._deadline.cancel()
        self._unsent = self._waiting()
        self._deadline = self._loop.call_later(self._patience_s, self._unread)

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


async def _path(handle: Callable[[Any], Awaitable[web.StreamResponse]], http: web.BaseRequest) -> web.StreamResponse:
    """Have `http` handled, if it has a path, with `MOST_SIGNS` at most. Without one (``CONNECT``) aiohttp would answer
    ``Expect`` itself. For each slash of a path it copies it, and a path with many percent signs takes long to read.
    Nobody has seen a key yet."""
    path = http.rel_url.raw_path
    if path.startswith("/") and path.count("/") + path.count("%") <= MOST_SIGNS:
        return await handle(http)
    said = f"a route has a path, with at most {MOST_SIGNS} slashes and percent signs"
    answer = error_response("", NotFound(said, code="unknown_route"))
    answer.force_close()
    return answer


def _error(error: BaseException | None) -> AjetError:
    if isinstance(error, LineTooLong):
        return BadRequest("the request line or a header is longer than allowed", code="header_too_large")
    if isinstance(error, HttpProcessingError):
        return BadRequest("the request is not HTTP/1.1 as it should be", code="bad_http")
    return AjetError("the proxy failed unexpectedly; its log says why", code="internal_error")


class Tap:
    """Stands between an engine's connection and aiohttp's `reader` of it. It notes whether anything came back, and
    tells the follower of an answer. It makes an answer break off with its connection.

    Why: aiohttp's errors do not tell whether a byte came back, and its `StreamReader` wakes a task for each piece. A
    reader of chunks whose framing is broken is not told that nothing more comes.
    """

    def __init__(self, reader: asyncio.Protocol) -> None:
        self._reader = reader
        self.reused = False
        self.listen()

    def listen(self) -> None:
        """A request was just written: nothing has come back for it yet."""
        self.heard = False
        self.since = monotonic()
        self.content: aiohttp.StreamReader | None = None
        """The body of the answer that comes."""
        self._told: Callable[[], None] | None = None
        self.data_received = self._first

    def age(self) -> float:
        """Seconds since the request was written."""
        return monotonic() - self.since

    def follow(self, told: Callable[[], None]) -> None:
        """Have `told` called whenever the reader has got something, until `leave` or the connection's next request."""
        self._told = told
        self.data_received = self._followed

    def leave(self, told: Callable[[], None]) -> None:
        if self._told == told:
            self._told = None
            self.data_received = self._reader.data_received

    def _followed(self, data: bytes) -> None:
        self._reader.data_received(data)
        if self._told is not None:
            self._told()

    def _first(self, data: bytes) -> None:
        self.heard = True
        self.data_received = self._reader.data_received  # the rest goes there at once: a call less for each piece
        self._reader.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)
        if self.content is not None:
            break_off(self.content)

    def __getattr__(self, name: str) -> Any:
        """Everything else that a connection calls is the reader's."""
        return getattr(self._reader, name)


LATEST: ContextVar[Tap | None] = ContextVar("tap")
"""The connection that the request of this task was written to last."""


def tap_of(answer: aiohttp.ClientResponse) -> Tap | None:
    """The tap on the connection that `answer` comes over. None once the answer is all there or broken off, when another
    request may have the connection."""
    connection = answer.connection
    tap = None if connection is None or connection.transport is None else connection.transport.get_protocol()
    return tap if isinstance(tap, Tap) else None


def break_off(content: aiohttp.StreamReader) -> None:
    """Tell `content` that nothing more comes. aiohttp does that itself, except for chunks whose framing is broken: it
    closes the connection, and a reader would wait forever."""
    if not content.is_eof() and content.exception() is None:
        content.set_exception(aiohttp.ClientPayloadError("the answer is not framed as it should be"))


class Pool(aiohttp.TCPConnector):
    """A connection pool that tells which connection a request got. It reuses none on which something came that nobody
    had asked for: aiohttp would take that for the answer (RFC 9112, section 9.2)."""

    async def connect(self, *request: Any, **more: Any) -> Any:
        while True:
            connection = await super().connect(*request, **more)
            tap: Any = None if (transport := connection.transport) is None else transport.get_protocol()
            if not (isinstance(tap, Tap) and tap.should_close):
                break
            connection.close()
        if transport is not None:
            if isinstance(tap, Tap):
                tap.reused = True
                tap.listen()
            else:
                tap = Tap(tap)
                transport.set_protocol(tap)
            LATEST.set(tap)
        return connection


def unread(answer: aiohttp.ClientResponse) -> bytes:
    """The bytes of `answer` that had come when it broke off and was not read yet; aiohttp tells of the break first, and
    keeps it."""
    return answer.content._read_nowait(-1)
