"""Bodies: a request's, read with the limits that hold for everybody, and an answer's that leaves as it comes.

The limits are a body's size after decompression, its time, and what all bodies together may take (`budget`).

A client that waits to be asked for its body is asked here, when the body is about to be read. A request refused before
that (no good key, no such route, too long, no room) gets its answer alone, on a connection that closes. What comes next
on it might be the body or another request.

A compressed body (``Content-Encoding``) is unpacked piece by piece. It is counted as it comes out, and reading ends at
the limit. So a few kilobytes that stand for gigabytes never become more than `max_body`. aiohttp could unpack, but it
takes a gzip that ends in the middle for a whole one, and does not tell where it ended. Here that is an error, as is
anything after the end. Only gzip may have several members, one after the other (RFC 1952); together they are the body.

Invariant: no step of unpacking makes more than some `PIECE` bytes, whatever a few bytes stand for.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_sdk.errors import BadRequest, TooLarge

try:
    import brotli
except ImportError:  # pragma: no cover
    brotli = None

MAX_CONTROL = 1 << 20
"""No control request needs more."""
PIECE = 1 << 18
WINDOW = 4096
"""So much is unpacked at a time: where a member ends, what is left of it is copied."""
MOST_MEMBERS = 10_000


class Unmeasured(web.StreamResponse):
    """An answer that leaves as it comes. If it has no length, a client of HTTP/1.0 sees its end when the connection
    ends."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if request.version < HttpVersion11 and "Content-Length" not in self.headers:
            self.force_close()
        return await super().prepare(request)


async def unasked(_http: web.Request) -> None:
    """What a route does about ``Expect``: nothing yet. Anything else that a client expects is ignored, as vLLM's server
    does. aiohttp would answer 417 and repeat what was sent."""


async def close_unread(http: web.Request, response: web.StreamResponse) -> None:
    """Called before an answer leaves: no request follows an answer that came before the body it waited for."""
    if _waits(http):
        response.headers["Connection"] = "close"
        response.force_close()


async def read(http: web.Request, *, max_body: int, limit_s: float, budget: MemoryBudget) -> bytes:
    """The body. Raises `TooLarge` over `max_body` bytes, `BadRequest` if it has not come within `limit_s` seconds, and
    `NotReady` if `budget` has no room for it, or no longer has."""
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
    """The body as it comes, without its `coding`. Packed, it may not be longer than a body either."""
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


class Unpacking:
    """Decodes one of the `CODINGS`."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: Any = None
        self._members = 0

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """What comes out of the next bytes; `BadRequest` if they cannot be decoded."""
        try:
            for at in range(0, len(packed), WINDOW):
                rest = packed[at : at + WINDOW]
                while rest:
                    stream = self._stream = self._stream or self._member(rest[0])
                    yield from _out_of(stream, rest)
                    rest = stream.unused_data
                    if stream.eof:
                        self._stream = None
        except _BROKEN as error:
            raise self._bad("is broken") from error

    def finish(self) -> None:
        """Nothing follows: `BadRequest` if the coding has not ended. A body of no bytes needs no end."""
        if self._stream is not None:
            raise self._bad("ends too early")

    def _member(self, first: int) -> Any:
        """What decodes a member that begins with the byte `first`, as the decompressors of `zlib` do."""
        self._members += 1
        if self._members > (MOST_MEMBERS if self._coding == "gzip" else 1):
            raise self._bad("continues after its end")
        return CODINGS[self._coding](first)

    def _bad(self, what: str) -> BadRequest:
        return BadRequest(f"the request body cannot be read: its {self._coding} {what}", code="bad_body")


def coding_of(codings: list[str]) -> str | None:
    """Which coding to take off a body with these headers: the one that the last names, if that is one of `CODINGS`."""
    last = codings[-1].lower() if codings else ""
    return last if last in CODINGS else None


class _Brotli:
    """Brotli as a decompressor of `zlib` would be. It keeps what it has not read, and takes nothing after its end."""

    unconsumed_tail = unused_data = b""

    def __init__(self) -> None:
        self._made: Any = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._made.is_finished())

    def decompress(self, data: bytes, most: int, /) -> bytes:
        return bytes(self._made.process(data, output_buffer_limit=most))


def _out_of(stream: Any, packed: bytes) -> Iterator[bytes]:
    """All that `stream` gives for `packed`."""
    while True:
        piece = stream.decompress(packed, PIECE)
        if piece:
            yield piece
        packed = stream.unconsumed_tail
        if stream.eof or (len(piece) < PIECE and not packed):
            return


def _deflate(first: int) -> Any:
    """As RFC 9110 has it, or without its frame, as some clients do."""
    return zlib.decompressobj(zlib.MAX_WBITS if first & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS)


_BROKEN: tuple[type[Exception], ...] = (zlib.error,) if brotli is None else (zlib.error, brotli.error)
CODINGS: Mapping[str, Callable[[int], Any]] = MappingProxyType(
    {"gzip": lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS), "deflate": _deflate}
    | ({} if brotli is None else {"br": lambda _: _Brotli()})
)
"""What reads a member of each coding that is taken off; all others go on to the engine as they are."""
