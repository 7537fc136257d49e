"""Responses on their way: the agent sees the engine's own, and every token that was sampled has its logprob."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from ajet_sdk.routes import Policy
from tests.kit import compare_events, tapes
from tests.kit.engine_stub import RESPONSES, EngineStub, Fault
from tests.kit.engine_tokens import logprob_of
from tests.kit.record_responses import FILE
from tests.kit.tapes import steady
from tests.kit.wire import Answer, send
from tests.proxy.io.front import COMPLETIONS, Front, leave, until

TOOL = {"type": "function", "name": "guess", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "files", "description": "d", "tools": [TOOL]}
ONE_CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'
HISTORY = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "guess"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "guess", "arguments": '{"number": 3}'},
    {"type": "function_call_output", "call_id": "c1", "output": "higher"},
]
ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "history": {"input": HISTORY, "instructions": "Be brief.", "tools": [TOOL], "max_output_tokens": 200},
    "text-and-call": {"tools": [TOOL], "max_output_tokens": 200},
    "call": {"tools": [TOOL], "input": f"say: {ONE_CALL}", "max_output_tokens": 200},
    "calls": {"tools": [TOOL], "input": f"say: {ONE_CALL}\n{ONE_CALL}", "max_output_tokens": 200},
    "namespace": {"tools": [{"type": "web_search"}, NAMESPACE], "max_output_tokens": 200},
    "stop": {"stop": ["e"]},
    "length": {"max_output_tokens": 2},
    "logprobs": {"include": ["message.output_text.logprobs"]},
    "ids": {"enable_response_messages": True},
}
SCORED = ("call", "calls")


def body_for(**more: Any) -> dict[str, Any]:
    return {"model": "stub", "input": "héllo 😀", "max_output_tokens": 40, "seed": 7, "temperature": 0.70, **more}


def visible(answer: Answer) -> dict[str, str]:
    hidden = ("date", "content-length", "transfer-encoding", "x-ajet-episode", "x-ajet-call")
    return {name: value for name, value in answer.headers.items() if name not in hidden}


@pytest.mark.parametrize("split_seed", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
async def test_the_agent_sees_what_the_engine_would_have_sent(name: str, stream: bool, split_seed: int | None) -> None:
    body = body_for(stream=stream, **ASKED[name])
    async with EngineStub(split_seed=split_seed, group=2) as stub, Front(stub.url) as front:
        direct = await send(stub.url + RESPONSES, body=body)
        answer = await send(f"{front.url}/e/ep-1{RESPONSES}", body=body)
    assert (answer.status, visible(answer)) == (direct.status, visible(direct))
    assert steady(answer.body) == steady(direct.body)
    (call,) = front.calls
    assert answer.headers["x-ajet-call"] == call.call and front.running == 0
    known = (*call.prompt_token_ids, *call.token_ids)
    places = range(len(call.prompt_token_ids), len(known))
    assert call.logprobs == tuple(logprob_of(known[max(0, place - 16) : place], known[place]) for place in places)
    assert ("scored_logprobs" in call.altered) == (name in SCORED)
    assert len(stub.llm_requests()) == (3 if name in SCORED else 2)
    ends = {"length": "length", "history": "stop"}
    assert call.finish_reason == ends.get(name, "tool_calls" if "tools" in body else "stop")


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
    body = body_for(stream=True, **ASKED["call"])
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
    body = body_for(stream=stream, **ASKED["call"])
    for fault in (Fault("status"), Fault("no_logprobs"), Fault("cut", after=50)):
        async with EngineStub() as stub, Front(stub.url) as front:
            direct = await send(stub.url + RESPONSES, body=body)
            stub.faults += [Fault("slow"), fault]
            answer = await send(f"{front.url}/e/x{RESPONSES}", body=body)
        assert (answer.status, steady(answer.body)) == (200, steady(direct.body))
        assert front.lost == ["not_scored"] and front.running == 0


async def test_new_weights_do_not_score_what_the_old_ones_sampled(stub: EngineStub, front: Front) -> None:
    body = body_for(**ASKED["call"])
    front.store.post(front.store.commands.announce(Policy("stub", 1), at=front.clock.now()))
    stub.faults += [Fault("slow"), Fault("slow", delay_s=0.2)]
    asking = asyncio.create_task(send(f"{front.url}/e/x{RESPONSES}", body=body))
    await until(lambda: len(stub.llm_requests()) == 2)
    front.store.post(front.store.commands.announce(Policy("stub", 2), at=front.clock.now()))
    assert (await asking).status == 200
    assert front.lost == ["weights_changed"]


async def test_a_client_that_goes_away_while_its_call_is_scored(stub: EngineStub, front: Front) -> None:
    stub.faults += [Fault("slow"), Fault("hang")]
    asking = asyncio.create_task(send(f"{front.url}/e/x{RESPONSES}", body=body_for(**ASKED["call"])))
    await until(lambda: len(stub.llm_requests()) == 2)
    await leave(asking)
    await until(lambda: front.lost == ["disconnected"])
    await until(lambda: stub.llm_requests()[1].cancelled)


@pytest.mark.parametrize("status", [400, 403, 422])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_refuses_the_question_is_asked_as_the_agent_asked(
    stub: EngineStub, front: Front, stream: bool, status: int
) -> None:
    body = body_for(stream=stream)
    direct = await send(stub.url + RESPONSES, body=body)
    stub.faults.append(Fault("status", status=status))
    answer = await send(f"{front.url}/e/x{RESPONSES}", body=body)
    assert (answer.status, steady(answer.body)) == (200, steady(direct.body))
    assert stub.requests[-1].body == body
    assert front.lost == ["unaskable"]


async def test_a_request_that_is_wrong_is_refused_in_the_engines_words(stub: EngineStub, front: Front) -> None:
    for more in ({"model": "nobody"}, {"max_output_tokens": 10**6}, {"previous_response_id": "resp_nobody"}):
        direct = await send(stub.url + RESPONSES, body=body_for(**more))
        answer = await send(f"{front.url}/e/x{RESPONSES}", body=body_for(**more))
        assert direct.status in (400, 404)
        assert (answer.status, answer.body, visible(answer)) == (direct.status, direct.body, visible(direct))
    assert set(front.lost) <= {"refused", "unaskable"} and len(front.lost) == 3


@pytest.mark.parametrize(("kind", "reason"), [
    ("no_token_ids", "no_token_ids"), ("no_finish", "truncated"), ("error_event", "engine_error"),
    ("not_vllm", "capture_failed"),
])  # fmt: skip
async def test_an_answer_without_a_call_reaches_the_agent_all_the_same(
    stub: EngineStub, front: Front, kind: str, reason: str
) -> None:
    headers = {"x-stub-fault": json.dumps({"kind": kind, "after": 3})}
    direct = await send(stub.url + RESPONSES, body=body_for(stream=True), headers=headers)
    answer = await send(f"{front.url}/e/x{RESPONSES}", body=body_for(stream=True), headers=headers)
    assert (answer.status, steady(answer.body)) == (direct.status, steady(direct.body))
    assert front.lost == [reason]


async def test_what_comes_later_is_not_captured(stub: EngineStub, front: Front) -> None:
    answer = await send(f"{front.url}/e/x{RESPONSES}", body=body_for(background=True))
    assert answer.status == 200 and stub.requests[0].body == body_for(background=True)
    assert front.lost == ["background"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_the_engine_keeps_is_fetched_as_the_agent_knows_it(stream: bool) -> None:
    """It was kept with ids and logprobs, which the agent never asked for."""
    kept = tapes.load(FILE)["plain", tapes.PROXY].body
    engine = Keeping(kept, tapes.load(FILE)["plain-stream", tapes.PROXY].body)
    async with engine.running() as url, Front(url) as front:
        asked = await send(f"{front.url}/e/x{RESPONSES}", body=body_for(stream=stream))
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

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post(RESPONSES, self._answer)
        app.router.add_get(RESPONSES + "/{id}", self._kept)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield "http://{}:{}".format(*runner.addresses[0][:2])
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        stream = (await request.json()).get("stream")
        body, kind = (self.stream, "text/event-stream") if stream else (self.document, "application/json")
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _kept(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        if not self.cut:
            return web.Response(status=self.status, body=self.document, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Length": "9"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response
