"""A request's body, read with the limits that hold for everybody: its size after decompression, its time, and what all
of them together may take (`budget`).

A client that waits to be asked for its body is asked here, when the body is about to be read. Who is refused before
that (no good key, no such route, too long, no room) gets its answer alone, on a connection that closes: what comes next
on it might be the body or another request.

A body that is compressed is unpacked here (`unpacking`). It is counted as it comes out, piece by piece, and reading
ends at the limit: a few kilobytes that stand for gigabytes never become more than `max_body`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from aiohttp import HttpVersion11, web

from ajet_proxy.io.http.decompression import PIECE, Unpacking, coding_of
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_sdk.errors import BadRequest, TooLarge

MAX_CONTROL = 1 << 20
"""No control request needs more."""


async def unasked(_http: web.Request) -> None:
    """What a route does about ``Expect``: nothing yet. Anything else that a client expects is passed over, as vLLM's
    server does: aiohttp would answer 417 and repeat what was sent."""


async def close_unread(http: web.Request, response: web.StreamResponse) -> None:
    """A signal of the application: no request follows an answer that came before the body it waited for."""
    if _waits(http):
        response.headers["Connection"] = "close"
        response.force_close()


async def read(http: web.Request, *, max_body: int, limit_s: float, budget: MemoryBudget) -> bytes:
    """The body; `TooLarge` over `max_body` bytes, `BadRequest` if it has not come within `limit_s` seconds, `NotReady`
    if there is no space in `budget` for it, or no longer."""
    length = http.content_length or 0
    if length > max_body:
        raise _too_large(max_body)
    coding = coding_of(http.headers.getall("Content-Encoding", []))
    if coding is None and http.content.is_eof():  # it came along with the head, as most do
        whole = http.content.read_nowait()
        if len(whole) > max_body:
            raise _too_large(max_body)
        return whole
    budget.check(length, length)
    if _waits(http) and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, size, done = [], 0, False
    try:
        async with asyncio.timeout(limit_s), contextlib.aclosing(_pieces(http, coding, max_body)) as pieces:
            async for piece in pieces:
                parts.append(piece)
                size += len(piece)
                budget.take(len(piece))
                budget.check(size)
                if size > max_body:
                    raise _too_large(max_body)
        done = True
    except TimeoutError as error:
        raise BadRequest(f"the request body did not come within {limit_s:g} s", code="slow_body") from error
    finally:
        budget.leave(size, whole=done)
    return b"".join(parts)


async def _pieces(http: web.Request, coding: str | None, max_body: int) -> AsyncGenerator[bytes]:
    """The body as it comes, without its `coding`. What is packed is not longer than a body may be, either."""
    if coding is None:
        async for piece in http.content.iter_any():
            yield piece
        return
    unpacking, came = Unpacking(coding), 0
    async for part in http.content.iter_any():
        came += len(part)
        if came > max_body:
            raise _too_large(max_body)
        for piece in unpacking.feed(part):
            yield piece
            if len(piece) >= PIECE:  # more than the part's own length is done: others have their turn
                await asyncio.sleep(0)
    unpacking.finish()


def _waits(http: web.Request) -> bool:
    """Whether the client holds its body back until it is asked for, or has not sent all of it since."""
    expected = http.version >= HttpVersion11 and http.headers.get("Expect", "").lower() == "100-continue"
    return expected and not http.content.is_eof()


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is over the limit of {limit} bytes", code="body_too_large")
