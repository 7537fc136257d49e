"""Answers of control routes as JSON on the wire.

Idea: who looks must not keep others waiting, however many look and however often. So looks are made one after another,
and after each the processor is left to others for some time. What takes longer than an answer's own words is made in
one thread. The event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from aiohttp import web

from ajet_proxy.core.control.asked import Asked
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.http import body as body_of

PIECE = 1 << 18
PAUSE = 2.0
"""The next look is made no sooner than after so many times as long as one took."""


class Answers:
    """The handler of routes that only show what there is, and may show much. `close` it when no more are asked for."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._maker = ThreadPoolExecutor(1, "ajet-answers")
        self._turn, self._free_at = asyncio.Lock(), 0.0

    async def close(self, _app: web.Application) -> None:
        """Let go of the thread that makes answers."""
        self._maker.shutdown(wait=False, cancel_futures=True)

    async def look(self, http: web.Request, asked: Asked) -> web.StreamResponse:
        """The answer as JSON, in its turn: what is shown is how it is then. Parts that are made later are made in the
        thread."""
        answer = await self._desk.decide(asked)
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._free_at - loop.time())
            began = loop.time()
            try:
                written = in_pieces(await self._desk.shown(answer))
                first, second = await self._next(written), await self._next(written)
            finally:
                self._free_at = loop.time() + PAUSE * (loop.time() - began)
        if second is None:
            return web.Response(body=first, content_type="application/json", charset="utf-8")
        return await self._write(http, chain([first or b"", second], written))

    async def _write(self, http: web.Request, written: Iterator[bytes]) -> web.StreamResponse:
        """Write piece by piece: a record with tokens may be hundreds of megabytes, so memory and other requests bear
        one item at a time."""
        response = body_of.Unmeasured()
        response.content_type, response.charset = "application/json", "utf-8"
        await response.prepare(http)
        piece: bytes | None
        while (piece := await self._next(written)) is not None:
            await response.write(piece)
        await response.write_eof()
        return response

    async def _next(self, pieces: Iterator[bytes]) -> bytes | None:
        return await asyncio.get_running_loop().run_in_executor(self._maker, next, pieces, None)


def in_pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """`body` as JSON, in pieces of some `PIECE` characters, or of one item of its iterators if that is more."""
    text = "{"
    for place, (name, value) in enumerate(body.items()):
        text += f"{', ' if place else ''}{json.dumps(name)}: "
        if not isinstance(value, Iterator):
            text += json.dumps(value() if callable(value) else value)
            continue
        text += "["
        for number, item in enumerate(value):
            text += f"{', ' if number else ''}{json.dumps(item)}"
            if len(text) >= PIECE:
                yield text.encode()
                text = ""
        text += "]"
    yield f"{text}}}".encode()
