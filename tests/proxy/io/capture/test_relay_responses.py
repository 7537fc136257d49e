"""Responses on their way: the agent sees the engine's own, and every token that was sampled has its logprob."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest
from aiohttp import web

from ajet_proxy.io.capture import recorder
from tests.kit import compare_events, tapes
from tests.kit.answering import answering
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.record_responses import FILE
from tests.kit.tapes import steady
from tests.kit.wire import send
from tests.proxy.io.capture.test_relay import ASKED, body_for
from tests.proxy.io.front import COMPLETIONS, RESPONSES, Front, leave, until

pytestmark = pytest.mark.usefixtures("flying")

CALLING = ASKED["responses-call"][1]


async def test_the_plain_client_reads_both_kinds() -> None:
    async with EngineStub(split_seed=3) as stub, Front(stub.url) as front:
        client = openai.AsyncOpenAI(base_url=f"{front.url}/e/x/v1", api_key="EMPTY")
        whole = await client.responses.create(model="stub", input="hello")
        async with client, client.responses.stream(model="stub", input="hello") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert whole.output_text == final.output_text != ""
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert len(front.calls) == 2 and front.lost == []


async def test_the_end_leaves_only_when_the_call_is_scored_and_durable() -> None:
    body = body_for(RESPONSES, stream=True, **CALLING)
    async with EngineStub() as stub, Front(stub.url) as front, aiohttp.ClientSession() as client:
        front.store.slow.clear()
        async with client.post(f"{front.url}/e/x{RESPONSES}", json=body) as answer:
            seen = await answer.content.readuntil(b"event: response.output_item.done\n")
            await until(lambda: front.calls)
            assert stub.requests[-1].path == COMPLETIONS and stub.requests[-1].finished
            assert b"response.completed" not in seen
            front.store.slow.set()
            assert b"event: response.completed" in await answer.content.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_cannot_be_scored_costs_the_agent_nothing(stream: bool) -> None:
    body = body_for(RESPONSES, stream=stream, **CALLING)
    for fault in (Fault("status"), Fault("no_logprobs"), Fault("cut", after=50)):
        async with EngineStub() as stub, Front(stub.url) as front:
            direct = await send(stub.url + RESPONSES, body=body)
            stub.faults += [Fault("slow"), fault]
            answer = await send(f"{front.url}/e/x{RESPONSES}", body=body)
        assert (answer.status, steady(answer.body)) == (200, steady(direct.body))
        assert front.lost == ["not_scored"] and front.running == 0


async def test_new_weights_do_not_score_what_the_old_ones_sampled(stub: EngineStub, front: Front) -> None:
    body = body_for(RESPONSES, **CALLING)
    front.announce("stub", 1)
    stub.faults += [Fault("slow"), Fault("slow", delay_s=0.2)]
    asking = asyncio.create_task(send(f"{front.url}/e/x{RESPONSES}", body=body))
    await until(lambda: len(stub.llm_requests()) == 2)
    front.announce("stub", 2)
    assert (await asking).status == 200
    assert front.lost == ["weights_changed"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("held_s", "reason"), [(0.0, "not_written"), (1e9, "disconnected")])
async def test_a_client_that_goes_away_while_its_call_is_scored(
    stub: EngineStub, front: Front, stream: bool, held_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave up on an end that our question held back, or it broke off by itself."""
    monkeypatch.setattr(recorder, "HELD_S", held_s)
    stub.faults += [Fault("slow"), Fault("hang")]
    body = body_for(RESPONSES, stream=stream, **CALLING)
    asking = asyncio.create_task(send(f"{front.url}/e/x{RESPONSES}", body=body))
    await until(lambda: len(stub.llm_requests()) == 2)
    await leave(asking)
    await until(lambda: front.lost == [reason])
    await until(lambda: stub.llm_requests()[1].cancelled)


@pytest.mark.parametrize("status", [400, 403, 422])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_refuses_the_question_is_asked_as_the_agent_asked(
    stub: EngineStub, front: Front, stream: bool, status: int
) -> None:
    body = body_for(RESPONSES, stream=stream)
    direct = await send(stub.url + RESPONSES, body=body)
    stub.faults.append(Fault("status", status=status))
    answer = await send(f"{front.url}/e/x{RESPONSES}", body=body)
    assert (answer.status, steady(answer.body)) == (200, steady(direct.body))
    assert stub.requests[-1].body == body
    assert front.lost == ["unaskable"]


async def test_what_comes_later_is_not_captured(stub: EngineStub, front: Front) -> None:
    answer = await send(f"{front.url}/e/x{RESPONSES}", body=body_for(RESPONSES, background=True))
    assert answer.status == 200 and stub.requests[0].body == body_for(RESPONSES, background=True)
    assert front.lost == ["background"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_the_engine_keeps_is_fetched_as_the_agent_knows_it(stream: bool) -> None:
    """It was kept with ids and logprobs, which the agent never asked for."""
    kept = tapes.load(FILE)["plain", tapes.PROXY].body
    engine = Keeping(kept, tapes.load(FILE)["plain-stream", tapes.PROXY].body)
    async with answering(RESPONSES + "{id:.*}", engine.answer) as url, Front(url) as front:
        asked = await send(f"{front.url}/e/x{RESPONSES}", body=body_for(RESPONSES, stream=stream))
        known = compare_events.final(asked.body)
        fetched = await send(f"{front.url}/e/x{RESPONSES}/{known['id']}", method="GET")
        unknown = await send(f"{front.url}/e/x{RESPONSES}/resp_2", method="GET")
        engine.status = 404
        gone = await send(f"{front.url}/e/x{RESPONSES}/{known['id']}", method="GET")
        engine.cut = True
        cut = await send(f"{front.url}/e/x{RESPONSES}/{known['id']}", method="GET")
    assert b'"logprob"' in kept and b'"tokens"' in kept
    assert steady(json.dumps(fetched.json()).encode()) == steady(json.dumps(known).encode())
    assert (unknown.status, unknown.body) == (200, kept)
    assert (gone.status, gone.body) == (404, kept)
    assert (cut.status, cut.json()["error"]["code"]) == (502, "engine_broken")


class Keeping:
    """An engine that answers with `document` or `stream`, and gives out `document` under every id."""

    def __init__(self, document: bytes, stream: bytes) -> None:
        self.document = document
        self.stream = stream
        self.status = 200
        self.cut = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        if request.method == "POST" and (await request.json()).get("stream"):
            return web.Response(body=self.stream, headers={"Content-Type": "text/event-stream"})
        if not self.cut:
            return web.Response(status=self.status, body=self.document, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Length": "9"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response
