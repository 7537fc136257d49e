"""A request's body, read with the limits that hold for everybody: its size after decompression, its time, and what all
of them together may take (`room`).

A body that is compressed is counted as it comes out, piece by piece, and reading ends at the limit: a few kilobytes
that stand for gigabytes never become more than `max_body`.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from ajet_proxy.io.room import Room
from ajet_sdk.errors import BadRequest, TooLarge


async def ask(http: web.Request) -> None:
    """Ask for a body that the client holds back until it is asked for. Anything else that it expects is passed over, as
    vLLM's server does: aiohttp would answer 417 and repeat what was sent."""
    wanted = http.version >= HttpVersion11 and http.headers["Expect"].lower() == "100-continue"
    if wanted and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def read(http: web.Request, *, max_body: int, limit_s: float, room: Room) -> bytes:
    """The body; `TooLarge` over `max_body` bytes, `BadRequest` if it has not come within `limit_s` seconds, `NotReady`
    if there is no `room` for it, or no longer."""
    length = http.content_length or 0
    if length > max_body:
        raise _too_large(max_body)
    if http.content.is_eof():  # it came along with the head, as most do
        whole = http.content.read_nowait()
        if len(whole) > max_body:
            raise _too_large(max_body)
        return whole
    room.check(length, length)
    parts, size, done = [], 0, False
    try:
        async with asyncio.timeout(limit_s):
            async for part in http.content.iter_any():
                parts.append(part)
                size += len(part)
                room.take(len(part))
                room.check(size)
                if size > max_body:
                    raise _too_large(max_body)
        done = True
    except TimeoutError as error:
        raise BadRequest(f"the request body did not come within {limit_s:g} s", code="slow_body") from error
    finally:
        room.leave(size, whole=done)
    return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is over the limit of {limit} bytes", code="body_too_large")
