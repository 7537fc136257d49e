"""A call is complete only if its client was sent the end of its answer."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.io.capture import recorder
from ajet_sdk.errors import NotReady
from tests.kit.answering import address, listening
from tests.kit.engine_stub import EngineStub
from tests.kit.wire import send
from tests.proxy.io.capture.test_relay import body_for, read_all
from tests.proxy.io.front import CHAT, Front, leave, until

WITH_IDS = {"return_token_ids": True, "logprobs": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("held_s", "reason"), [(0.0, "not_written"), (1e9, "disconnected")])
async def test_a_client_that_goes_away_while_its_calls_are_written_has_not_made_them(
    front: Front, stream: bool, held_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave up on a slow disk, or it broke off by itself."""
    monkeypatch.setattr(recorder, "HELD_S", held_s)
    front.store.slow.clear()
    asking = asyncio.create_task(send(f"{front.url}/e/x{CHAT}", body=body_for(CHAT, stream=stream, n=2)))
    await until(lambda: len(front.calls) == 2)
    await leave(asking)
    await until(lambda: front.gate.in_flight == 0)
    front.store.slow.set()
    assert front.store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 2}
    assert front.lost == [reason] * 2
    assert [one["reason"] for one in views.record(front.store.state, "x")["unanswered"]] == (
        ["not_written"] if reason == "not_written" else []
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_gone_when_its_call_is_written_has_not_made_it(
    front: Front, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is on disk, and nothing has told of the client yet but its connection, which takes no more."""
    monkeypatch.setattr(recorder, "HELD_S", 300.0)  # however long a busy machine takes, nobody gave up on the end
    commit = front.store.commit

    async def and_gone(events: Any) -> None:
        await commit(events)
        for connection in front.server.connections:
            assert connection.transport is not None
            connection.transport.abort()

    front.store.commit = and_gone  # type: ignore[method-assign]
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await send(f"{front.url}/e/x{CHAT}", body=body_for(CHAT, stream=stream))
    await until(lambda: front.lost)
    assert front.store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 1}
    assert front.lost == ["disconnected"]


async def test_an_answer_is_noted_as_sent_when_it_has_left_and_not_before(front: Front) -> None:
    asked = {"model": "stub", "messages": [{"role": "user", "content": "long"}], "n": 1000, "logprobs": True}
    body = json.dumps(asked | {"top_logprobs": 5, "max_tokens": 64}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(front.url))
        slow.sendall(b"POST /e/x%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % CHAT.encode())
        slow.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: len(front.calls) == 1000)
        await asyncio.sleep(0.5)
        assert len(front.store.state.episodes.unsent) == 1000, "most of the answer waits for its reader"
        while await asyncio.to_thread(slow.recv, 1 << 20):
            pass
    await until(lambda: not front.store.state.episodes.unsent)
    assert front.lost == []


@pytest.mark.usefixtures("asked_briefly")
async def test_a_client_that_goes_away_with_the_end_of_its_answer_has_made_the_call() -> None:
    """The engine has not closed its stream by then."""
    async with EngineStub() as stub:
        whole = (await send(f"{stub.url}{CHAT}", body=body_for(CHAT, stream=True, **WITH_IDS))).body
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99999\r\n\r\n" + whole)
        await left.wait()
        writer.close()

    async with listening(serve) as url, Front(url) as front, aiohttp.ClientSession() as client:
        async with client.post(f"{front.url}/e/x{CHAT}", json=body_for(CHAT, stream=True)) as answer:
            for _ in range(whole.count(b"\n\n")):
                await answer.content.readuntil(b"\n\n")
            answer.close()
        await until(lambda: front.store.state.tallies.calls["complete"] == 1)
        left.set()
        await until(lambda: front.gate.in_flight == 0)  # with the questions on how the engine samples
        assert front.store.state.tallies.calls == {"running": 0, "complete": 1, "lost": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_disk_does_not_take_is_a_503_or_breaks_off(front: Front, stream: bool) -> None:
    commit = front.store.commit

    async def refuse(events: Any) -> None:
        await commit(events)
        raise NotReady("the disk is full", code="journal", retry_after=2.0)

    front.store.commit = refuse  # type: ignore[method-assign]
    status, got, ended = await read_all(f"{front.url}/e/x{CHAT}", body_for(CHAT, stream=stream))
    assert (status, ended) == ((200, False) if stream else (503, True))
    assert b'"finish_reason":"' not in got and (stream or json.loads(got)["error"]["code"] == "journal")
    assert front.store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 1}
    assert front.lost == ["not_written"] and front.gate.in_flight == 0
