"""Bytes that are no HTTP are answered all the same, in the shape of contract §5.8 and without a word of what was
sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from aiohttp import web

from ajet_proxy.io.capture import front
from ajet_proxy.io.http import aiohttp_internals as server
from ajet_proxy.io.http.aiohttp_internals import MOST_SIGNS
from ajet_proxy.settings import Config
from ajet_sdk.sockets import WATCH
from tests.kit.answering import answering, connected
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.front import Front

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def told(front: Front, raw: bytes) -> tuple[int, dict[str, str | None], bytes]:
    """``(status, error, all that came)``; the connection is closed behind it."""
    async with connected(front.url, raw) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), 300)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split(b" ")[1]), json.loads(body)["error"], answer


@pytest.mark.parametrize(("raw", "code"), [
    (b"GARBAGE sesame\r\n\r\n", "bad_http"), (b"GET / HTTP/sesame\r\n\r\n", "bad_http"),
    (b"\x16\x03\x01\x02sesame\r\n\r\n", "bad_http"), (HEAD + b"no colon sesame\r\n\r\n", "bad_http"),
    (HEAD + b"content-length: sesame\r\n\r\n", "bad_http"), (HEAD + b"x: sesame\r\n" * 200 + b"\r\n", "bad_http"),
    (HEAD + b"x-key: sesame" + b"a" * 10_000 + b"\r\n\r\n", "header_too_large"),
    (b"GET /sesame" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n", "header_too_large"),
])  # fmt: skip
async def test_what_is_no_http_is_a_400_in_the_shape_of_errors(
    stub: EngineStub, front: Front, raw: bytes, code: str
) -> None:
    status, error, answer = await told(front, raw)
    assert (status, error["code"], error["type"]) == (400, code, "invalid_request_error")
    assert set(error) == {"message", "type", "code", "param"}
    assert b"sesame" not in answer
    assert stub.requests == []


@pytest.mark.parametrize("asks", [
    b"GET /v1/models/" + b"/" * MOST_SIGNS, b"GET /v1/models/" + b"%" * MOST_SIGNS, b"CONNECT sesame:443", b"OPTIONS *",
])  # fmt: skip
async def test_what_takes_long_to_read_or_is_no_path_is_no_route(stub: EngineStub, front: Front, asks: bytes) -> None:
    head = asks + HEAD[len("GET /health") :] + b"expect: sesame\xff\r\n\r\n"
    status, error, answer = await told(front, head)
    assert b"sesame" not in answer
    assert (status, error["code"]) == (404, "unknown_route") and b"connection: close" in answer.lower()
    assert stub.requests == []


async def test_a_defect_of_the_server_itself_is_a_500(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("sesame")

    monkeypatch.setattr(front.server, "request_handler", fails)
    status, error, answer = await told(front, HEAD + b"\r\n")
    assert (status, error["code"]) == (500, "internal_error")
    assert b"sesame" not in answer


@pytest.mark.usefixtures("flying")
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: "])
async def test_a_connection_that_never_asks_is_closed(sent: bytes) -> None:
    async with Front(patience_s=0.3) as front, connected(front.url) as (reader, writer), asyncio.timeout(300):
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            if sent and not writer.is_closing():
                writer.write(sent)
                sent = b"a"
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionResetError):  # it was closed while we were sending
            assert await closed == b""


@pytest.mark.usefixtures("flying")
async def test_a_client_in_good_time_is_left_alone() -> None:
    async with EngineStub() as stub, Front(stub.url, patience_s=0.3) as front, connected(front.url) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)


async def large(_: web.Request) -> web.Response:
    """An engine whose answer is more than sockets hold."""
    return web.Response(body=b"x" * (24 << 20))


@pytest.mark.usefixtures("flying")
@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_reads_slowly_gets_all_of_a_large_answer(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PROGRESS", 1 << 16)
    got, asked = 0, b"GET /v1/files/large HTTP/1.1\r\nhost: x\r\n\r\n"
    async with (
        answering("/v1/files/large", large) as engine, Front(engine, patience_s=3.0) as front,
        connected(front.url, asked) as (reader, _),
    ):  # fmt: skip
        await reader.readuntil(b"\r\n\r\n")
        began = asyncio.get_running_loop().time()
        if not reads:
            await asyncio.sleep(6.0)
        with contextlib.suppress(ConnectionError):
            while got < 24 << 20 and (data := await reader.read(1 << 20)):
                got += len(data)
                await asyncio.sleep(0.2 if reads else 0)
        assert (got == 24 << 20) is reads
        assert asyncio.get_running_loop().time() - began > 3.0


async def endless(http: web.Request) -> web.StreamResponse:
    """An engine whose stream never ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    choice = {"index": 0, "delta": {"content": "x" * 4000}, "token_ids": [1], "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    while True:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@pytest.mark.usefixtures("flying")
async def test_a_client_that_stops_reading_is_cut_off_and_lets_the_gate_drain() -> None:
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    asked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    asked += b"content-length: %d\r\n\r\n" % len(body) + body
    async with (
        answering("/v1/chat/completions", endless) as engine, Front(engine, patience_s=0.5) as front,
        connected(front.url, asked) as (reader, _),
    ):  # fmt: skip
        await reader.readuntil(b"\r\n\r\n")
        assert front.gate.in_flight == 1
        assert await front.gate.drained(300.0)
        assert front.lost == ["stalled"]


@pytest.mark.usefixtures("flying")
async def test_a_request_that_does_not_end_is_waited_for_once() -> None:
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(100)
        raise AssertionError

    served = web.Application()
    served.router.add_get("/", hang)
    made = front.runner(Config(drain_s=8.0), served)
    await made.setup()
    await web.TCPSite(made, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*made.addresses[0])
    async with connected(url, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") as (reader, _):
        await asked.wait()
        began = asyncio.get_running_loop().time()
        await made.cleanup()
        assert 7.9 <= asyncio.get_running_loop().time() - began < 15.5, "systemd does not wait twice as long"
        assert await reader.read() == b""


@pytest.mark.parametrize(("patience_s", "untaken"), [(5.0, 120_000), (300.0, 300_000)])
async def test_a_client_whose_host_is_gone_is_noticed(patience_s: float, untaken: int) -> None:
    async with (
        EngineStub() as stub, Front(stub.url, patience_s=patience_s) as front,
        connected(front.url, HEAD + b"\r\n") as (reader, _),
    ):  # fmt: skip
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        [connection] = front.server.connections
        assert connection.transport is not None
        ours = connection.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert {name: ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in WATCH} == WATCH
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == untaken
