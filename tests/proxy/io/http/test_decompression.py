"""Packed bodies come out as they went in, at any split; one that is cut off, broken or followed by more is told."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.io.http import body as unpacking
from ajet_proxy.io.http.body import CODINGS, PIECE, Unpacking, codings_of
from ajet_sdk.errors import BadRequest, UnsupportedMedia
from tests.kit.patience import turns_of_others


def bare(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


PACKERS = {
    "gzip": ("gzip", gzip.compress), "deflate": ("deflate", zlib.compress), "bare": ("deflate", bare),
    "br": ("br", brotli.compress), "zstd": ("zstd", zstandard.compress),
}  # fmt: skip
packers = st.sampled_from(list(PACKERS.values()))
PLAIN = b'{"task": "t", "some": "more text"}'


def unpacked(coding: str, parts: Iterable[bytes]) -> bytes:
    made = Unpacking(coding)
    pieces = [piece for part in parts for piece in made.feed(part)]
    made.finish()
    return b"".join(pieces)


def refusal(coding: str, *parts: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        unpacked(coding, parts)
    assert caught.value.code == "bad_body"
    return caught.value.message


@given(how=packers, plain=st.binary(max_size=50), times=st.integers(0, 20_000), size=st.integers(1, 10_000))
def test_what_went_in_comes_out(how: tuple[str, Any], plain: bytes, times: int, size: int) -> None:
    coding, pack = how
    packed = pack(plain * times)
    assert unpacked(coding, [packed[at : at + size] for at in range(0, len(packed), size)]) == plain * times


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 64 << 20])
def test_a_step_makes_no_more_than_a_piece(kind: str, size: int) -> None:
    coding, pack = PACKERS[kind]
    made = Unpacking(coding)
    sizes = [len(piece) for piece in made.feed(pack(bytes(size)))]
    made.finish()
    assert sum(sizes) == size and max(sizes) <= (5 if kind == "zstd" else 2) * PIECE


@pytest.mark.parametrize("kind", PACKERS)
def test_what_ends_in_the_middle_is_no_body(kind: str) -> None:
    coding, pack = PACKERS[kind]
    packed = pack(PLAIN)
    for end in range(1, len(packed)):
        assert f"its {coding} " in refusal(coding, packed[:end])
    assert "ends too early" in refusal(coding, packed[:-1])


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("behind", [b"x", b"\0", b"\0" * 100, b"garbage" * 1000])
def test_nothing_stands_behind_the_end(kind: str, behind: bytes) -> None:
    coding, pack = PACKERS[kind]
    refusal(coding, pack(PLAIN) + behind)
    refusal(coding, pack(PLAIN), behind)


def test_gzip_and_zstd_may_have_members() -> None:
    for kind, (coding, pack) in PACKERS.items():
        twice = pack(PLAIN), pack(b" " * 10_000)
        if kind in ("gzip", "zstd"):
            assert unpacked(coding, twice) == unpacked(coding, [b"".join(twice)]) == PLAIN + b" " * 10_000
            refusal(coding, *twice, twice[0][:-1])
        else:
            refusal(coding, *twice)


def test_members_are_counted_and_cost_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest where one ends is copied, so nobody gets to copy much."""
    empty = gzip.compress(b"")
    monkeypatch.setattr(unpacking, "MOST_MEMBERS", 1000)
    assert unpacked("gzip", [empty * 1000]) == b""
    assert "continues after its end" in refusal("gzip", empty * 1001)


def test_no_bytes_are_no_body_and_no_gzip_is_none() -> None:
    assert unpacked("gzip", []) == unpacked("gzip", [b""]) == b""
    assert "its gzip is broken" in refusal("gzip", b"no gzip")


@pytest.mark.parametrize(("told", "codings"), [
    ([], ()), (["GZip"], ("gzip",)), (["gzip, gzip"], ("gzip", "gzip")), (["x-gzip ,", "br"], ("gzip", "br")),
    (["identity, zstd,,identity"], ("zstd",)), (["deflate"] * 4, ("deflate",) * 4),
])  # fmt: skip
def test_the_headers_say_how_a_body_is_packed(told: list[str], codings: tuple[str, ...]) -> None:
    assert set(CODINGS) == {"gzip", "deflate", "br", "zstd"}
    assert codings_of(told) == codings


@pytest.mark.parametrize(("told", "words"), [
    (["compress"], "'compress', which is not read: send it as gzip, deflate, br, zstd, or as it is"),
    (["gzip", "aes128gcm"], "'aes128gcm'"), (["gzip," * 5], "packed 5 times, and may be 4"),
])  # fmt: skip
def test_what_is_packed_otherwise_is_refused_with_what_is_read(told: list[str], words: str) -> None:
    with pytest.raises(UnsupportedMedia, match=words) as caught:
        codings_of(told)
    assert (caught.value.status, caught.value.code) == (415, "unknown_encoding")


def test_a_window_beyond_that_of_http_is_not_made() -> None:
    """It would take as much memory as its header says, before anything comes out."""
    wide = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    assert "its zstd is broken" in refusal("zstd", packer.compress(bytes(1 << 20)) + packer.flush())


async def test_others_have_their_turn_while_nothing_comes_out() -> None:
    """A few bytes stand for many, and those for none: blocks of zstd with nothing in them."""
    blocks = bytes.fromhex("28b52ffd0058") + bytes(3 << 20)

    async def come() -> AsyncIterator[bytes]:
        yield gzip.compress(blocks)

    http: Any = SimpleNamespace(content=SimpleNamespace(iter_any=come))
    with turns_of_others() as turns, pytest.raises(BadRequest, match="its zstd ends too early"):
        await anext(unpacking.pieces_of(http, ("zstd", "gzip"), 64 << 20))
    assert turns() > 3
