"""Bodies: a request's, read with the limits that hold for everybody, and an answer's that leaves as it comes.

The limits are a body's size after decompression, its time, and what all bodies together may take (`budget`).

A client that waits to be asked for its body is asked here, when the body is about to be read. A request refused before
that (no good key, no such route, too long, no room) gets its answer alone, on a connection that closes. What comes next
on it might be the body or another request.

A compressed body (``Content-Encoding``) is unpacked piece by piece. It is counted as it comes out, and reading ends at
the limit. So a few kilobytes that stand for gigabytes never become more than `max_body`. aiohttp could unpack, but it
takes a gzip that ends in the middle for a whole one, and does not tell where it ended. Here that is an error, as is
anything after the end. Only gzip and zstd may have several members, one after the other (RFC 1952, RFC 8878); together
they are the body. A body may be packed several times (`MOST_CODINGS`); each layer counts as the body does. What is
packed in another way is refused, with the codings that are taken (RFC 9110, section 15.5.16).

Invariant: no step of unpacking makes more than a few `PIECE` bytes, whatever a few bytes stand for. Nor does it read
much: a layer may stand for megabytes of which the next makes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_sdk.errors import BadRequest, TooLarge, UnsupportedMedia

try:
    import brotli
    import zstandard
except ImportError:  # pragma: no cover
    brotli = zstandard = None  # type: ignore[assignment]

PIECE = 1 << 18
WINDOW = 4096
"""So much is unpacked at a time: where a member ends, what is left of it is copied."""
MOST_MEMBERS = 10_000
MOST_CODINGS = 4
TURN_S = 0.005
"""After so long others have their turn."""


class Unmeasured(web.StreamResponse):
    """An answer that leaves as it comes. If it has no length, a client of HTTP/1.0 sees its end when the connection
    ends."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if request.version < HttpVersion11 and "Content-Length" not in self.headers:
            self.force_close()
        return await super().prepare(request)


async def unasked(_http: web.Request) -> None:
    """Answers ``Expect`` for a route: nothing yet. Anything else that a client expects is ignored, as vLLM's server
    does. aiohttp would answer 417 and repeat what was sent."""


async def close_unread(http: web.Request, response: web.StreamResponse) -> None:
    """Called before an answer leaves: no request follows an answer that came before the body it waited for."""
    if _waits(http):
        response.headers["Connection"] = "close"
        response.force_close()


async def read(http: web.Request, *, max_body: int, limit_s: float, budget: MemoryBudget) -> bytes:
    """The body. Raises `TooLarge` over `max_body` bytes, and `BadRequest` if it has not come within `limit_s` seconds.
    Raises `UnsupportedMedia` if it is packed in an unknown way, and `NotReady` if `budget` has no room for it, or no
    longer has."""
    length = http.content_length or 0
    if length > max_body:
        raise _too_large(max_body)
    codings = codings_of(http.headers.getall("Content-Encoding", []))
    if not codings and http.content.is_eof():  # it came along with the head, as most do
        whole = http.content.read_nowait()
        if len(whole) > max_body:
            raise _too_large(max_body)
        return whole
    budget.check(length, length)
    if _waits(http) and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, size, done = [], 0, False
    try:
        async with asyncio.timeout(limit_s), contextlib.aclosing(pieces_of(http, codings, max_body)) as pieces:
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


async def pieces_of(http: web.Request, codings: Sequence[str], max_body: int) -> AsyncGenerator[bytes]:
    """The body as it comes, without its `codings`; the last of them was put on last."""
    layers, since = [Unpacking(coding, max_body) for coding in reversed(codings)], monotonic()
    async for part in http.content.iter_any():
        for piece in _through(layers, part):
            if piece:
                yield piece
            if monotonic() - since >= TURN_S:
                await asyncio.sleep(0)
                since = monotonic()
    for layer in layers:
        layer.finish()


def _through(layers: Sequence[Unpacking], packed: bytes) -> Iterator[bytes]:
    """The bytes that come out of all `layers` for `packed`. Where none do after a step, there is an empty piece."""
    if not layers or not packed:
        yield packed
        return
    for piece in layers[0].feed(packed):
        yield from _through(layers[1:], piece)


def _waits(http: web.Request) -> bool:
    """True if the client holds its body back until it is asked for, or has not sent all of it since."""
    expected = http.version >= HttpVersion11 and http.headers.get("Expect", "").lower() == "100-continue"
    return expected and not http.content.is_eof()


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is over the limit of {limit} bytes", code="body_too_large")


class Unpacking:
    """Decodes one of the `CODINGS`, from at most `most` bytes."""

    def __init__(self, coding: str, most: int = sys.maxsize) -> None:
        self._coding = coding
        self._most = self._left = most
        self._stream: Any = None
        self._members = 0

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Unpacks the next bytes; `BadRequest` if they cannot be decoded, `TooLarge` if they are too many."""
        self._left -= len(packed)
        if self._left < 0:
            raise _too_large(self._most)
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
        """The decoder of a member that begins with the byte `first`, as the decompressors of `zlib` do."""
        self._members += 1
        if self._members > (MOST_MEMBERS if self._coding in ("gzip", "zstd") else 1):
            raise self._bad("continues after its end")
        return CODINGS[self._coding](first)

    def _bad(self, what: str) -> BadRequest:
        return BadRequest(f"the request body cannot be read: its {self._coding} {what}", code="bad_body")


def codings_of(headers: Iterable[str]) -> tuple[str, ...]:
    """The packing of a body with these ``Content-Encoding`` headers: names of `CODINGS`, in the order in which they
    were put on. `UnsupportedMedia` if it is packed in another way, or too often."""
    named = [name.strip().lower() for header in headers for name in header.split(",")]
    found = tuple(name.removeprefix("x-") for name in named if name not in ("", "identity"))
    if unknown := [name for name in found if name not in CODINGS]:
        raise UnsupportedMedia(
            f"the request body is packed as {unknown[0][:50]!r}, which is not read: send it as {ACCEPTED}, or "
            "as it is", code="unknown_encoding",
        )  # fmt: skip
    if len(found) > MOST_CODINGS:
        raise UnsupportedMedia(
            f"the request body is packed {len(found)} times, and may be {MOST_CODINGS} times", code="unknown_encoding"
        )
    return found


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


class _Zstd:
    """Zstandard as a decompressor of `zlib` would be. It takes no limit on what comes out, and four bytes can stand for
    128 KiB. So it gets a few at a time. The window is that of RFC 9659."""

    STEP = 32

    def __init__(self) -> None:
        self._made: Any = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj()
        self.unconsumed_tail = self.unused_data = b""

    @property
    def eof(self) -> bool:
        return bool(self._made.eof)

    def decompress(self, data: bytes, most: int, /) -> bytes:
        out, size, at = [], 0, 0
        while at < len(data) and size < most and not self.eof:
            out.append(self._made.decompress(data[at : at + self.STEP]))
            size, at = size + len(out[-1]), at + self.STEP
        rest = data[at:]
        self.unused_data = self._made.unused_data + rest if self.eof else b""
        self.unconsumed_tail = b"" if self.eof else rest
        return b"".join(out)


def _out_of(stream: Any, packed: bytes) -> Iterator[bytes]:
    """All that `stream` gives for `packed`, which may be nothing."""
    while True:
        piece = stream.decompress(packed, PIECE)
        yield piece
        packed = stream.unconsumed_tail
        if stream.eof or (len(piece) < PIECE and not packed):
            return


def _deflate(first: int) -> Any:
    """As RFC 9110 has it, or without its frame, as some clients do."""
    return zlib.decompressobj(zlib.MAX_WBITS if first & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS)


_BROKEN: tuple[type[Exception], ...] = (
    (zlib.error,) if brotli is None else (zlib.error, brotli.error, zstandard.ZstdError)
)
CODINGS: Mapping[str, Callable[[int], Any]] = MappingProxyType(
    {"gzip": lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS), "deflate": _deflate}
    | ({} if brotli is None else {"br": lambda _: _Brotli(), "zstd": lambda _: _Zstd()})
)
"""The reader of a member of each coding."""
ACCEPTED = ", ".join(CODINGS)
"""The codings that a refusal names."""
