"""A client that vanishes: the engine's work for it ends within a second, wherever the request stood."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ajet_proxy.core.ledger.events import CallStarted
from tests.kit.answering import Connected, connected
from tests.kit.engine_stub import EngineStub, Fault
from tests.proxy.io.front import CHAT, COMPLETIONS, MESSAGES, Front, leave, until

pytestmark = pytest.mark.usefixtures("flying")
WORDS = "say: " + "word " * 500
LIMIT_S = 1.0


def request_for(path: str, *, stream: bool, content: str = "hi") -> bytes:
    asked: dict[str, Any] = {"model": "stub", "max_tokens": 16_000, "stream": stream}
    asked |= {"prompt": content} if path == COMPLETIONS else {"messages": [{"role": "user", "content": content}]}
    return json.dumps(asked).encode()


def vanishing(url: str, path: str, body: bytes, length: int | None = None) -> Connected:
    """A client that has sent a request, and goes away at the end of the block."""
    length = len(body) if length is None else length
    head = f"POST /e/x{path} HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\ncontent-length: {length}"
    return connected(url, head.encode() + b"\r\n\r\n" + body)


async def engine_stops(stub: EngineStub) -> None:
    await until(lambda: stub.llm_requests()[-1].cancelled, LIMIT_S)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
@pytest.mark.parametrize(("stream", "events"), [(False, 0), (True, 0), (True, 3)])
async def test_a_client_leaves_before_its_answer_or_in_it(path: str, stream: bool, events: int) -> None:
    async with EngineStub(delay_s=0.02) as stub, Front(stub.url) as front:

        if not events:
            stub.faults.append(Fault("hang"))
        async with vanishing(front.url, path, request_for(path, stream=stream, content=WORDS)) as (answer, _):
            for _ in range(events):
                await answer.readuntil(b"data: ")
            await until(stub.llm_requests)
        await engine_stops(stub)
        await until(lambda: front.running == 0 and front.gate.in_flight == 0)
        assert set(front.lost) == {"disconnected"} and not front.calls


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_stream_that_is_only_kept_alive(path: str) -> None:
    async with EngineStub(delay_s=300.0) as stub, Front(stub.url, keep_alive_s=0.05) as front:
        async with vanishing(front.url, path, request_for(path, stream=True)) as (answer, _):
            await answer.readuntil(b"ping" if path == MESSAGES else b": waiting")
        await engine_stops(stub)
        await until(lambda: front.running == 0)


async def test_a_client_that_did_not_read() -> None:
    """The engine's words fill every buffer on the way and stop there; then the client goes."""
    async with EngineStub(group=50) as stub, Front(stub.url) as front:
        body = request_for(CHAT, stream=True, content="say: " + "wordy " * 2600)
        async with vanishing(front.url, CHAT, body) as (answer, _):
            await answer.readuntil(b"\r\n\r\n")
            answer._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.2)
        await until(lambda: stub.llm_requests()[-1].cancelled or stub.llm_requests()[-1].finished, LIMIT_S)
        await until(lambda: front.running == 0 and front.gate.in_flight == 0)


async def test_held_at_the_gate_it_never_reaches_the_engine() -> None:
    async with EngineStub() as stub, Front(stub.url, hold_s=60.0) as front:
        front.close_gate()
        for path in (CHAT, MESSAGES, "/v1/embeddings"):
            async with vanishing(front.url, path, request_for(CHAT, stream=True)):
                await until(lambda: front.gate.waiting == 1)
            await until(lambda: front.gate.waiting == 0, LIMIT_S)
        front.open_gate(1)
        await asyncio.sleep(0.05)
        assert stub.requests == [] and front.of(CallStarted) == [] and front.gate.in_flight == 0


async def test_in_the_middle_of_its_request_it_asks_nothing(stub: EngineStub, front: Front) -> None:
    async with vanishing(front.url, CHAT, b'{"model":', length=1000):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)
    assert stub.requests == [] and front.of(CallStarted) == []


async def test_what_passes_through_ends_too(stub: EngineStub, front: Front) -> None:
    stub.paused.clear()
    asking = asyncio.create_task(_hang(front))
    await until(stub.llm_requests)
    await leave(asking)
    await engine_stops(stub)


async def _hang(front: Front) -> None:
    """Beam search is not captured: its answer passes as it is."""
    body = json.dumps({"model": "stub", "prompt": "hi", "use_beam_search": True}).encode()
    async with vanishing(front.url, COMPLETIONS, body) as (answer, _):
        await answer.read()
