"""What a stream says to its client while the engine is silent: something that the client's protocol ignores.

One timer a stream, which counts how often it ran out since something came: a chunk costs no more than setting that to
zero.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from aiohttp import web

from ajet_proxy.core.protocol.exchange import Exchange

LOOKS = 4
"""The timer runs out so often in the time after which silence is filled, which may last longer by one part of it."""


class KeepAlive:
    """Writes ``exchange.keep_alive`` to `response` whenever nothing has come for `every_s` seconds (0: never) and the
    client has whole events. A context; nothing is written any more once it is left."""

    def __init__(self, response: web.StreamResponse, exchange: Exchange, every_s: float) -> None:
        self._response = response
        self._exchange = exchange
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self.looks = 0
        """How often was looked since something came: to be set to zero when something does."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._left = False

    def __enter__(self) -> Self:
        if self._every_s:
            self._timer = self._loop.call_later(self._every_s / LOOKS, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.looks += 1
        if self.looks > LOOKS:
            self.looks = 1
            if self._writing is None or self._writing.done():
                self._writing = self._loop.create_task(self._write())
        self._timer = self._loop.call_later(self._every_s / LOOKS, self._look)

    async def _write(self) -> None:
        if self._exchange.patient and not self._left:
            with suppress(ConnectionError):  # the handler is told of that, too
                await self._response.write(self._exchange.keep_alive)
