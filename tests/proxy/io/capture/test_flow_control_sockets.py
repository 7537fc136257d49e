"""The short way of a stream between a real engine's socket and a client's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.kit.answering import listening
from tests.proxy.io.front import CHAT, Front

pytestmark = pytest.mark.usefixtures("asked_briefly", "flying")
EVENT = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}]},'
    b'"finish_reason":%b,"token_ids":[5]}]%b}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST, TOKEN, LAST = EVENT % (b"null", b',"prompt_token_ids":[1]'), EVENT % (b"null", b""), EVENT % (b'"stop"', b"")
DONE = b"data: [DONE]\n\n"


def framed(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


@asynccontextmanager
async def engine(*pieces: bytes, gap_s: float = 0.0) -> AsyncIterator[str]:
    """An engine that answers with `pieces`, each in a chunk, and leaves it at that: the answer has no end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(HEAD)
        for piece in pieces:
            writer.write(framed(piece))
            await asyncio.sleep(gap_s)
        await reader.read()
        writer.close()

    async with listening(answer) as url:
        yield url


@asynccontextmanager
async def streaming(url: str, **settings: Any) -> AsyncIterator[tuple[Front, aiohttp.ClientResponse]]:
    """A front before the engine at `url`, and a stream that comes through it."""
    async with (
        Front(url, **settings) as front, aiohttp.ClientSession() as client, asyncio.timeout(300),
        client.post(f"{front.url}/e/x{CHAT}", json={"stream": True, "messages": []}) as response,
    ):  # fmt: skip
        yield front, response


async def test_a_client_that_reads_late_gets_every_byte_and_holds_the_engine_back_meanwhile() -> None:
    events, sent = [b"data: %07d %s\n\n" % (number, b"x" * 16_000) for number in range(1500)], 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"}")
        writer.write(HEAD)
        for event in events:
            writer.write(framed(event))
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")
        writer.close()

    async with listening(answer) as url, streaming(url) as (_, response):
        before = -1
        while before < sent:
            before = sent
            await asyncio.sleep(0.5)
        assert 0 < sent < len(events)
        assert await response.read() == b"".join(events)


async def test_a_front_carries_tokens_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    async def write(response: web.StreamResponse, data: bytes) -> None:
        written.append(data)
        await through(response, data)

    through = web.StreamResponse.write
    monkeypatch.setattr(web.StreamResponse, "write", write)
    async with engine(FIRST, *[TOKEN] * 20, LAST, DONE, gap_s=0.01) as url, streaming(url) as (front, response):
        for _ in range(23):
            await response.content.readuntil(b"\n\n")
        assert len(written) < 10
        (call,) = front.calls
        assert call.token_ids == (5,) * 22


async def test_a_piece_that_was_carried_is_no_silence() -> None:
    async with engine(FIRST, *[TOKEN] * 12, gap_s=0.25) as url, streaming(url, keep_alive_s=2.5) as (_, response):
        for _ in range(13):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")


@pytest.mark.parametrize("stream", [True, False])
async def test_chunks_whose_framing_breaks_are_a_break(stream: bool) -> None:
    """aiohttp closes such a connection and tells nobody who reads."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(HEAD if stream else HEAD.replace(b"text/event-stream", b"application/json"))
        await asyncio.sleep(0.05)
        writer.write(framed(FIRST))
        await asyncio.sleep(0.05)
        writer.write(b"zz\r\nnonsense")
        await reader.read()
        writer.close()

    async with (
        listening(answer) as url, Front(url) as front, aiohttp.ClientSession() as client, asyncio.timeout(300),
        client.post(f"{front.url}/e/x{CHAT}", json={"stream": stream, "messages": []}) as response,
    ):  # fmt: skip
        assert response.status == (200 if stream else 502)
        if stream:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert front.lost == ["truncated"]
