"""The short way of a stream: from the engine's connection to the client's, within the callback that bytes come with.

Most of a stream is pieces of one token, and what such a piece costs is for the most part waking the task that relays
it. So that task sleeps while there is nothing to decide. Whatever is not an everyday piece wakes it, and it reads on by
itself: the end or a break, calls to be recorded, a client that reads more slowly than the engine writes.

Invariant: the client gets the same bytes in the same order on either way. The short one begins behind the first bytes
that aiohttp has written, writes only while nothing waits to be sent before, and frames what it writes as aiohttp does
(RFC 9112, section 7.1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import aiohttp
from aiohttp import web

from ajet_proxy.io.upstream import way_of


class Flow:
    """Carries the pieces of `answer` to the client of `http` while the task waits in `run`; a context. `take` gives
    what the client gets of a piece, and `enough` says that the task has something to do."""

    def __init__(
        self, http: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse, *,
        take: Callable[[bytes], list[bytes]], enough: Callable[[], bool],
    ) -> None:
        self._content = answer.content
        self._way = way_of(answer)
        self._client = http.transport
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._take = take
        self._enough = enough
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()
        self._over: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._over is not None:
            self._over.cancel()

    async def run(self) -> None:
        """Carry what comes until the task is needed; call it when nothing that came is left to be written."""
        if self._way is None or self._client is None or not self._chunked:
            return
        if self._over is None:
            self._over = self._loop.create_task(self._content.wait_eof())
            self._over.add_done_callback(self._ended)
        if self._over.done():
            return
        self._woken = self._loop.create_future()
        self._way.follow(self._came)
        try:
            self._came()  # what came while the task was writing
            await self._woken
        finally:
            self._way.leave(self._came)

    def _came(self) -> None:
        """Something came, or the task begins to wait: carry all that is there."""
        content, client = self._content, self._client
        assert client is not None
        while not self._woken.done():
            if content.exception() is not None or client.is_closing() or client.get_write_buffer_size():
                self._wake()
            elif data := content.read_nowait():
                if parts := self._take(data):
                    client.write(b"".join((b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n")))
                if self._enough():
                    self._wake()
            else:
                return

    def _ended(self, over: asyncio.Task[None]) -> None:
        """The answer is all there, or broke off, which the task sees when it reads."""
        if not over.cancelled():
            over.exception()
        self._wake()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)
