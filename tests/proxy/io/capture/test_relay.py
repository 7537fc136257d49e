"""The answer on its way: the agent sees what the engine would have sent it, and only what is durable is finished."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import openai
import pytest

from ajet_proxy.core.protocol.dialect import COMMENT
from tests.kit.answering import listening
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.engine_tokens import encode, logprob_of
from tests.kit.tapes import steady
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Front, until

pytestmark = pytest.mark.usefixtures("flying")

TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}]
SAID = "héllo 😀"
TOOL = {"type": "function", "name": "guess", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "files", "description": "d", "tools": [TOOL]}
PLAYS: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 200}
ONE_CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'
HISTORY = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "guess"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "guess", "arguments": '{"number": 3}'},
    {"type": "function_call_output", "call_id": "c1", "output": "higher"},
]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat-n": (CHAT, {"n": 3}),
    "chat-tools": (CHAT, {"tools": TOOLS, "tool_choice": "required"}),
    "chat-stop": (CHAT, {"stop": ["e"]}),
    "chat-logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat-ids": (CHAT, {"return_token_ids": True}),
    "completions": (COMPLETIONS, {"prompt": "say"}),
    "completions-n": (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}),
    "completions-ids": (COMPLETIONS, {"prompt": [1, 2, 3], "logprobs": 1, "return_token_ids": True}),
    "completions-echo": (COMPLETIONS, {"prompt": "say", "echo": True}),
    "completions-echo-logprobs": (COMPLETIONS, {"prompt": "say", "echo": True, "logprobs": 1}),
    "responses": (RESPONSES, {}),
    "responses-history": (RESPONSES, {"input": HISTORY, "instructions": "Be brief.", **PLAYS}),
    "responses-text-and-call": (RESPONSES, PLAYS),
    "responses-call": (RESPONSES, {**PLAYS, "input": f"say: {ONE_CALL}"}),
    "responses-calls": (RESPONSES, {**PLAYS, "input": f"say: {ONE_CALL}\n{ONE_CALL}"}),
    "responses-namespace": (RESPONSES, {**PLAYS, "tools": [{"type": "web_search"}, NAMESPACE]}),
    "responses-stop": (RESPONSES, {"stop": ["e"]}),
    "responses-length": (RESPONSES, {"max_output_tokens": 2}),
    "responses-logprobs": (RESPONSES, {"include": ["message.output_text.logprobs"]}),
    "responses-ids": (RESPONSES, {"enable_response_messages": True}),
}
SCORED = ("responses-call", "responses-calls")
FINISHES = {"responses-length": "length", "responses-history": "stop"}
CHOICES = {"chat-n": 3, "completions-n": 4}


def body_for(path: str, **more: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"model": "stub", "seed": 7, "temperature": 0.70}
    if path == RESPONSES:
        return {**common, "input": SAID, "max_output_tokens": 40, **more}
    said = {} if path == COMPLETIONS else {"messages": [{"role": "user", "content": SAID}]}
    return {**common, "max_tokens": 12, **said, **more}


def visible(answer: Answer) -> dict[str, str]:
    """The headers without what differs between any two answers."""
    hidden = ("date", "content-length", "transfer-encoding", "x-ajet-episode", "x-ajet-call")
    return {name: value for name, value in answer.headers.items() if name not in hidden}


def by_choice(answer: Answer) -> list[bytes]:
    """The events of a stream, choice by choice: which choice speaks first is the engine's whim. Or the one document."""

    def place(event: bytes) -> int:
        found = re.search(rb'"index":(\d+),', event)
        return int(found[1]) if found else 10**6

    return sorted(steady(answer.body).split(b"\n\n"), key=place)


@pytest.mark.parametrize("split_seed", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
async def test_the_agent_sees_what_the_engine_would_have_sent(name: str, stream: bool, split_seed: int | None) -> None:
    path, more = ASKED[name]
    body = body_for(path, stream=stream, **more)
    if stream and path != RESPONSES:
        body["stream_options"] = {"include_usage": True}
    async with EngineStub(split_seed=split_seed, group=2 if path == RESPONSES else 1) as stub, Front(stub.url) as front:
        direct = await send(stub.url + path, body=body)
        answer = await send(f"{front.url}/e/ep-1{path}", body=body)
    assert (answer.status, visible(answer)) == (direct.status, visible(direct))
    assert by_choice(answer) == by_choice(direct)
    assert answer.headers["x-ajet-episode"] == "ep-1"
    ids = answer.headers["x-ajet-call"].split(",")
    assert [call.call for call in front.calls] == ids and front.running == 0
    assert len(ids) == CHOICES.get(name, 1)
    for call in front.calls:
        known = (*call.prompt_token_ids, *call.token_ids)
        places = range(len(call.prompt_token_ids), len(known))
        assert call.prompt_token_ids and call.token_ids
        assert call.logprobs == tuple(logprob_of(known[max(0, place - 16) : place], known[place]) for place in places)
        assert ("scored_logprobs" in call.altered) == (name in SCORED)
        if path == RESPONSES:
            assert call.finish_reason == FINISHES.get(name, "tool_calls" if "tools" in body else "stop")
    assert len(stub.llm_requests()) == (3 if name in SCORED else 2)


async def test_an_unmodified_client_streams_and_retries() -> None:
    async with EngineStub(split_seed=3) as stub, Front(stub.url) as front:
        stub.faults.append(Fault("status", status=500))
        async with openai.AsyncOpenAI(base_url=f"{front.url}/e/x/v1", api_key="EMPTY") as client:
            stream = await client.chat.completions.create(
                model="stub", messages=body_for(CHAT)["messages"], tools=TOOLS, tool_choice="required", stream=True  # type: ignore[arg-type]
            )
            async with stream:
                said = [chunk.choices[0].delta async for chunk in stream]
    assert any(delta.tool_calls for delta in said)
    assert len(stub.llm_requests()) == 2 and len(front.calls) == 1
    assert front.calls[0].finish_reason == "tool_calls"


async def test_the_call_record_is_the_engines_own_words(stub: EngineStub, front: Front) -> None:
    body = body_for(COMPLETIONS, prompt="say")
    front.open_gate(5)
    asked = {**body, "return_token_ids": True, "logprobs": 0}
    told = (await send(stub.url + COMPLETIONS, body=asked)).json()["choices"][0]
    await send(f"{front.url}/e/ep-1{COMPLETIONS}", body=body, headers={"X-AJet-Agent": "solver"})
    (call,) = front.calls
    assert call.prompt_token_ids == tuple(encode("say"))
    assert call.token_ids == tuple(told["token_ids"])
    assert call.logprobs == tuple(told["logprobs"]["token_logprobs"])
    assert call.finish_reason == told["finish_reason"]
    assert call.policy_versions == ((5, len(call.token_ids)),)
    assert (call.model, call.agent, call.identified_by) == ("stub", "solver", "path")
    assert call.altered == ("return_token_ids", "logprobs")


async def test_each_event_leaves_as_soon_as_it_is_there() -> None:
    async with EngineStub(delay_s=0.05) as stub, Front(stub.url) as front, aiohttp.ClientSession() as client:
        body = body_for(CHAT, stream=True, max_tokens=4)
        async with client.post(f"{front.url}/e/x{CHAT}", json=body) as answer:
            first = await answer.content.readany()
            assert not stub.llm_requests()[0].finished, "the first event left before the last was there"
            rest = await answer.content.read()
    assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("keep_alive", "said"), [(0.1, True), (0, False), (9.0, False)])
async def test_a_silent_stream_is_kept_alive_between_events(keep_alive: float, said: bool) -> None:
    body = body_for(CHAT, stream=True, max_tokens=3)
    async with EngineStub(delay_s=0.3, split_seed=2) as stub, Front(stub.url, keep_alive_s=keep_alive) as front:
        answer = await send(f"{front.url}/e/x{CHAT}", body=body)
    assert answer.body.startswith(COMMENT) == said and b"\n\n: " not in answer.body
    events = answer.body.replace(COMMENT, b"").split(b"\n\n")
    nothing = b'"delta":{},"logprobs":null,"finish_reason":null'
    silent = [place for place, event in enumerate(events) if nothing in event]
    assert bool(silent) == said
    assert all(event.startswith(b"data: ") for event in events[:-1]) and events[-1] == b""
    finished = next(place for place, event in enumerate(events) if b'"finish_reason":"' in event)
    assert all(place < finished for place in silent), "never after the end"
    assert answer.events()[-1] == "[DONE]"
    assert len(front.calls) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_a_client_hears_something_until_its_call_is_on_disk(path: str) -> None:
    """Also if the engine itself has long said all: the end is held back."""
    async with EngineStub() as stub, Front(stub.url, keep_alive_s=0.1) as front, aiohttp.ClientSession() as client:
        front.store.slow.clear()
        body = body_for(path, stream=True, **({"prompt": "say"} if path == COMPLETIONS else {}))
        async with client.post(f"{front.url}/e/x{path}", json=body) as answer:
            await until(lambda: front.calls)
            seen = answer.content.read_nowait()
            for _ in range(3):
                seen += await answer.content.readany()
            front.store.slow.set()
            seen += await answer.content.read()
    before = seen.split(b"\n\n")[-9:-2]
    assert len(front.calls) == 1 and front.lost == []
    assert sum(b'"delta":{}' in e or b'"text":""' in e or b"ping" in e or b'"delta":""' in e or b"in_progress" in e
               for e in before) >= 3  # fmt: skip


async def test_a_keep_alive_does_not_replace_the_limit_on_silence() -> None:
    async with EngineStub(delay_s=60.0) as stub, Front(stub.url, keep_alive_s=0.1, read_timeout=1.5) as front:
        status, got, ended = await read_all(f"{front.url}/e/x{CHAT}", body_for(CHAT, stream=True))
    assert (status, ended) == (200, False) and got == COMMENT * got.count(COMMENT) != b""
    assert front.lost == ["truncated"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_leaves_only_when_the_call_is_durable(front: Front, stream: bool) -> None:
    front.store.slow.clear()
    seen = b""

    async def read() -> None:
        nonlocal seen
        body = body_for(CHAT, stream=stream, n=2)
        async with aiohttp.ClientSession() as client, client.post(f"{front.url}/e/x{CHAT}", json=body) as answer:
            async for data in answer.content.iter_any():
                seen += data

    reader = asyncio.create_task(read())
    await until(lambda: len(front.calls) == 2 and seen.count(b'"finish_reason":"') == (1 if stream else 0))
    await asyncio.sleep(0.05)
    assert b"[DONE]" not in seen and seen.count(b'"finish_reason":"') == (1 if stream else 0)
    assert front.gate.in_flight == 1, "a gate that drains waits for the end"
    front.store.slow.set()
    await reader
    assert seen.endswith(b"data: [DONE]\n\n") == stream
    assert seen.count(b'"finish_reason":"') == 2


# --- bad days of the engine


async def read_all(url: str, body: dict[str, Any]) -> tuple[int, bytes, bool]:
    """``(status, bytes, whether the body ended as it should)``."""
    got = b""
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
        try:
            async for data in answer.content.iter_any():
                got += data
        except aiohttp.ClientPayloadError:
            return answer.status, got, False
        return answer.status, got, True


@pytest.mark.parametrize("after", [1, 300, 700, 1200])
async def test_a_stream_cut_in_the_middle_is_cut_for_the_agent_too(stub: EngineStub, front: Front, after: int) -> None:
    body = body_for(CHAT, stream=True, max_tokens=40)
    status, whole, ended = await read_all(f"{front.url}/e/x{CHAT}", body)
    assert (status, ended) == (200, True)
    stub.faults.append(Fault("cut", after=after))
    status, got, ended = await read_all(f"{front.url}/e/x{CHAT}", body)
    assert (status, ended) == (200, False)
    whole_events = steady(got).split(b"\n\n")[:-1]
    assert whole_events == steady(whole).split(b"\n\n")[: len(whole_events)]
    assert front.lost == ["truncated"] and front.running == 0


async def test_what_came_before_the_cut_is_not_lost_while_the_proxy_was_busy() -> None:
    end = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    cut = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n" + end)
        await until(lambda: front.lost)
        writer.write(b": a last word\n\n")
        writer.close()
        await writer.wait_closed()
        cut.set()

    async with listening(serve) as url, Front(url) as front:
        front.store.slow.clear()
        asking = asyncio.create_task(read_all(f"{front.url}/e/x{CHAT}", body_for(CHAT, stream=True)))
        await cut.wait()
        await asyncio.sleep(0.05)
        front.store.slow.set()
        assert await asking == (200, end + b": a last word\n\n", False)


async def test_an_answer_names_its_first_hundred_calls(front: Front) -> None:
    answer = await send(f"{front.url}/e/x{CHAT}", body=body_for(CHAT, n=150, max_tokens=1))
    assert answer.headers["x-ajet-call"].split(",") == [call.call for call in front.calls][:100]
    assert len(front.calls) == 150


async def test_a_document_cut_in_the_middle_is_a_502(stub: EngineStub, front: Front) -> None:
    stub.faults.append(Fault("cut", after=100))
    answer = await send(f"{front.url}/e/x{CHAT}", body=body_for(CHAT))
    assert answer.status == 502 and answer.json()["error"]["code"] == "engine_broken"
    assert front.lost == ["truncated"] and front.running == 0


@pytest.mark.parametrize(("path", "kind", "reason", "stream"), [
    *[(path, kind, reason, True) for path in (CHAT, RESPONSES) for kind, reason in (
        ("error_event", "engine_error"), ("no_finish", "truncated"), ("no_token_ids", "no_token_ids"),
        ("not_vllm", "capture_failed"),
    )],
    *[(CHAT, kind, reason, stream) for stream in (False, True) for kind, reason in (
        ("no_logprobs", "no_logprobs"), ("abort", "engine_aborted"),
    )],
    (CHAT, "no_token_ids", "no_token_ids", False), (CHAT, "not_vllm", "capture_failed", False),
])  # fmt: skip
async def test_an_answer_without_a_call_reaches_the_agent_all_the_same(
    stub: EngineStub, front: Front, path: str, kind: str, reason: str, stream: bool
) -> None:
    headers = {"x-stub-fault": json.dumps({"kind": kind, "after": 3})}
    body = body_for(path, stream=stream)
    direct = await send(stub.url + path, body=body, headers=headers)
    answer = await send(f"{front.url}/e/x{path}", body=body, headers=headers)
    assert answer.status == direct.status == 200
    assert steady(answer.body) == steady(direct.body)
    assert front.lost == [reason] and not front.calls and front.running == 0


async def test_a_stream_without_its_last_event_is_whole_when_its_choices_are(stub: EngineStub, front: Front) -> None:
    stub.faults.append(Fault("no_done"))
    answer = await send(f"{front.url}/e/x{CHAT}", body=body_for(CHAT, stream=True))
    assert b"[DONE]" not in answer.body and b'"finish_reason":"' in answer.body
    assert len(front.calls) == 1 and front.running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "more"), [
    (CHAT, {"model": "nobody"}), (CHAT, {"max_tokens": 10**6}), (RESPONSES, {"model": "nobody"}),
    (RESPONSES, {"max_output_tokens": 10**6}), (RESPONSES, {"previous_response_id": "resp_nobody"}),
])  # fmt: skip
async def test_the_engines_refusal_passes_untouched(
    stub: EngineStub, front: Front, path: str, more: dict[str, Any], stream: bool
) -> None:
    body = body_for(path, stream=stream, **more)
    direct = await send(stub.url + path, body=body)
    answer = await send(f"{front.url}/e/x{path}", body=body)
    assert direct.status in (400, 404)
    assert (answer.status, answer.body, visible(answer)) == (direct.status, direct.body, visible(direct))
    assert answer.headers["content-length"] == direct.headers["content-length"]
    assert not set(answer.headers) & {"x-ajet-call", "x-ajet-episode"}
    assert front.lost in (["refused"], ["unaskable"]) and front.running == 0


async def test_an_episode_that_is_sealed_meanwhile_does_not_disturb_the_answer() -> None:
    async with EngineStub(delay_s=0.02) as stub, Front(stub.url) as front:
        asking = asyncio.create_task(send(f"{front.url}/e/x{CHAT}", body=body_for(CHAT, stream=True)))
        await until(lambda: front.running == 1)
        front.do(front.store.commands.seal, "x")
        answer = await asking
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
    assert len(front.calls) == 1
