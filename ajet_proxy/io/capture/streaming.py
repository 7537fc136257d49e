"""A stream between the engine's connection and the client's: its pieces, and what is said while there are none.

Most pieces of a stream hold one token. Most of what such a piece costs is waking the task that relays it. So that task
sleeps while there is nothing to decide, and `Shortcut` writes pieces within the callback that brings them. Anything
else wakes the task, which then reads for itself: the end or a break, calls to record, a client that reads more slowly
than the engine writes.

Invariant: the client gets the same bytes in the same order on either way. The shortcut begins after the first bytes
that aiohttp has written. It writes only while the client's transport keeps nothing back. It frames what it writes as
aiohttp does (RFC 9112, section 7.1).

While the client hears nothing, whatever the engine says, `KeepAlive` says something that changes nothing for it. It
has one timer a stream, which asks when it runs out how long ago that was: an event costs no more than a look at the
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import aiohttp
from aiohttp import web

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.io.http.aiohttp_internals import tap_of


class KeepAlive:
    """Writes ``exchange.keep_alive()`` to `response` whenever its client has `heard` nothing for `every_s` seconds (0:
    never). It is a context: nothing more is written once it is left."""

    def __init__(self, response: web.StreamResponse, exchange: Exchange, every_s: float) -> None:
        self._response = response
        self._exchange = exchange
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._left = False

    def __enter__(self) -> Self:
        if self._every_s:
            self._timer = self._loop.call_later(self._every_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        if self._timer is not None:
            self._timer.cancel()

    def heard(self) -> None:
        """The client is given an event."""
        self._since = self._loop.time()

    def _look(self) -> None:
        if (now := self._loop.time()) >= self._since + self._every_s:
            self._since = now
            if self._writing is None or self._writing.done():
                self._writing = self._loop.create_task(self._write())
        self._timer = self._loop.call_at(self._since + self._every_s, self._look)

    async def _write(self) -> None:
        if not self._left and (said := self._exchange.keep_alive()):
            with suppress(ConnectionError):  # the handler is told of that, too
                await self._response.write(said)


class Shortcut:
    """Carries the pieces of `answer` to the client of `http` while the task waits in `run`. It is a context. `take`
    gives what the client gets of a piece, and `enough` says that the task has something to do."""

    def __init__(
        self, http: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse, *,
        take: Callable[[bytes], list[bytes]], enough: Callable[[], bool],
    ) -> None:
        self._answer = answer
        self._content = answer.content
        self._client = http.transport
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._take = take
        self._enough = enough
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()
        self._end: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end is not None:
            self._end.cancel()

    async def run(self) -> None:
        """Carry what comes until the task is needed; call it when nothing that came is left to be written.

        Raises what `take` raises.
        """
        tap = tap_of(self._answer)
        if tap is None or self._client is None or not self._chunked or self._content.exception() is not None:
            return
        self._woken = self._loop.create_future()
        if self._end is None:
            self._end = self._loop.create_task(self._await_end())
        tap.follow(self._came)
        try:
            self._came()  # what came while the task was writing
            await self._woken
        finally:
            tap.leave(self._came)

    def _came(self) -> None:
        """Something came, or the task begins to wait: carry all that is there."""
        content, client = self._content, self._client
        assert client is not None
        while not self._woken.done():
            if content.exception() is not None or client.is_closing() or client.get_write_buffer_size():
                self._wake()
            elif data := content.read_nowait():
                try:
                    parts = self._take(data)
                except Exception as error:  # the task's to handle: out of here it would reach the event loop
                    self._woken.set_exception(error)
                    return
                if parts:
                    client.write(b"".join((b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n")))
                if self._enough():
                    self._wake()
            else:
                return

    async def _await_end(self) -> None:
        """Wake the task when all is there or nothing more comes; it sees which when it reads. aiohttp tells only a
        waiting reader of these ends and of a timeout, so this one waits from the start."""
        with suppress(Exception):
            if self._content.exception() is None:
                await self._content.wait_eof()
        self._wake()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)
