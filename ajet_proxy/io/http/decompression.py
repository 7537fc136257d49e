"""The coding of a request's body (``Content-Encoding``) taken off, piece by piece.

aiohttp could do it, but takes a gzip that ends in the middle for a whole one, and does not tell where it ended. What is
cut off on its way is no request of anybody, so here it is an error, as is what stands behind the end. Only gzip may
have several members, one behind the other (RFC 1952); together they are the body.

Invariant: no step makes more than some `PIECE` bytes, whatever a few bytes stand for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ajet_sdk.errors import BadRequest

try:
    import brotli
except ImportError:  # pragma: no cover
    brotli = None

PIECE = 1 << 18
WINDOW = 4096
"""So much is unpacked at a time: where a member ends, what is left of it is copied."""
MOST_MEMBERS = 10_000


class Unpacking:
    """Takes off one of the `CODINGS`."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: _Stream | None = None
        self._members = 0

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """What comes out of the next bytes; `BadRequest` if nothing can."""
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
        """Nothing follows: `BadRequest` unless that is the end. A body of no bytes has none."""
        if self._stream is not None:
            raise self._bad("ends too early")

    def _member(self, first: int) -> _Stream:
        """What reads a member that begins with the byte `first`."""
        self._members += 1
        if self._members > (MOST_MEMBERS if self._coding == "gzip" else 1):
            raise self._bad("continues after its end")
        return CODINGS[self._coding](first)

    def _bad(self, what: str) -> BadRequest:
        return BadRequest(f"the request body cannot be read: its {self._coding} {what}", code="bad_body")


def coding_of(codings: list[str]) -> str | None:
    """Which coding is taken off a body with these headers: what the last one names, if that is one of `CODINGS`."""
    last = codings[-1].lower() if codings else ""
    return last if last in CODINGS else None


class _Stream(Protocol):
    """What the decompressors of `zlib` are."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, most: int, /) -> bytes: ...


class _Brotli:
    """Holds back by itself what it has not read, and takes nothing behind its end."""

    unconsumed_tail = unused_data = b""

    def __init__(self) -> None:
        self._made: Any = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._made.is_finished())

    def decompress(self, data: bytes, most: int, /) -> bytes:
        return bytes(self._made.process(data, output_buffer_limit=most))


def _out_of(stream: _Stream, packed: bytes) -> Iterator[bytes]:
    """All that `stream` can say after `packed`."""
    while True:
        piece = stream.decompress(packed, PIECE)
        if piece:
            yield piece
        packed = stream.unconsumed_tail
        if stream.eof or (len(piece) < PIECE and not packed):
            return


def _deflate(first: int) -> _Stream:
    """As RFC 9110 has it, or without its frame, as some clients do."""
    return zlib.decompressobj(zlib.MAX_WBITS if first & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS)


_BROKEN: tuple[type[Exception], ...] = (zlib.error,) if brotli is None else (zlib.error, brotli.error)
CODINGS: Mapping[str, Callable[[int], _Stream]] = MappingProxyType(
    {"gzip": lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS), "deflate": _deflate}
    | ({} if brotli is None else {"br": lambda _: _Brotli()})
)
"""What reads a member of each coding that is taken off; all others go on to the engine as they are."""
