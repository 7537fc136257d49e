"""The words of an engine behind the end of an answer: the agent does not wait for it, and calls that it contradicts are
lost while nothing has settled with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from ajet_proxy.core.ledger import views
from tests.kit.answering import listening
from tests.kit.engine_stub import EngineStub, Fault
from tests.proxy.io.capture.test_flow_control_sockets import FIRST, HEAD, LAST, TOKEN, framed
from tests.proxy.io.front import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Front, until

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "say: higher"}], "max_tokens": 50}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {**SAID, "stream_options": {"include_usage": True}}, COMPLETIONS: {"prompt": "say"}, MESSAGES: SAID,
    RESPONSES: {"input": "say: higher"},
}
FINISH = {CHAT: b'"finish_reason":"stop"', COMPLETIONS: b'"finish_reason":"stop"', RESPONSES: b"response.completed"}
ROUTES = pytest.mark.parametrize("path", ASKED)
COMPLETE, LOST = {"running": 0, "complete": 1, "lost": 0}, {"running": 0, "complete": 0, "lost": 1}


@asynccontextmanager
async def finished(front: Front, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream of which the client has the finish and the ledger the call, while the engine has more to say. The client
    of messages is told of the finish with the usage, which comes later."""
    body = {"model": "stub", "stream": True, **ASKED[path]}
    async with (
        asyncio.timeout(300), aiohttp.ClientSession() as client, client.post(f"{front.url}/e/x{path}", json=body) as got
    ):  # fmt: skip
        event = b""
        while path in FINISH and FINISH[path] not in event:
            event = await got.content.readuntil(b"\n\n")
        await until(lambda: front.store.state.tallies.calls == COMPLETE)
        yield got


@ROUTES
async def test_the_agent_has_the_finish_before_the_engine_is_done(stub: EngineStub, front: Front, path: str) -> None:
    stub.faults = [Fault("late_done")]
    async with finished(front, path) as answer:
        assert not stub.go_on.is_set()
        stub.go_on.set()
        rest = await answer.read()
    ends = {CHAT: b"[DONE]\n\n", COMPLETIONS: b"[DONE]\n\n", MESSAGES: b'"message_stop"}\n\n', RESPONSES: b""}
    assert rest.endswith(ends[path]) and (b'"usage"' in rest) == (path in (CHAT, MESSAGES))
    assert front.store.state.tallies.calls == COMPLETE and front.lost == []


@ROUTES
async def test_an_engine_that_never_says_that_it_is_done_costs_nothing(
    stub: EngineStub, front: Front, path: str
) -> None:
    """It keeps the connection open for as long as the client does."""
    stub.faults = [Fault("late_done")]
    async with finished(front, path):
        pass
    await until(lambda: front.gate.in_flight == 0)
    assert front.store.state.tallies.calls == COMPLETE and front.lost == []


@ROUTES
async def test_a_call_that_the_engine_contradicts_behind_its_finish_is_taken_out(
    stub: EngineStub, front: Front, path: str
) -> None:
    stub.faults = [Fault("said_on")]
    async with finished(front, path) as answer:
        stub.go_on.set()
        await answer.read()
    await until(lambda: front.store.state.tallies.calls == LOST)
    assert front.lost == ["capture_failed"]
    record = views.record(front.store.state, "x")
    assert [(call["complete"], call["reason"]) for call in record["calls"]] == [(False, "capture_failed")]


async def test_what_an_episode_has_settled_with_stays(stub: EngineStub, front: Front) -> None:
    stub.faults = [Fault("said_on")]
    async with finished(front, CHAT) as answer:
        async with aiohttp.ClientSession() as client:
            headers = {"x-ajet-episode": "x", "x-ajet-reward": "1.0", "x-ajet-final": "1"}
            assert (await client.get(f"{front.url}/v1/models", headers=headers)).status == 200
        stub.go_on.set()
        assert (await answer.read()).endswith(b"[DONE]\n\n")
    await until(lambda: front.gate.in_flight == 0)
    assert views.record(front.store.state, "x")["state"] == "ready"
    assert front.store.state.tallies.calls == COMPLETE and front.lost == []


@pytest.mark.usefixtures("asked_briefly")
@pytest.mark.parametrize(("said", "calls"), [(b"", COMPLETE), (framed(TOKEN), LOST)])
async def test_what_came_before_the_engine_broke_off_counts(said: bytes, calls: dict[str, int]) -> None:
    go_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(HEAD + framed(FIRST) + framed(LAST))
        await go_on.wait()
        writer.write(said + b"zz\r\nnonsense")
        await reader.read()
        writer.close()

    async with listening(answer) as url, Front(url) as front:
        try:
            async with finished(front, CHAT) as got:
                go_on.set()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await got.read()
        finally:
            go_on.set()
        await until(lambda: front.store.state.tallies.calls == calls)
