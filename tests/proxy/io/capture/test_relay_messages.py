"""Anthropic's Messages API through the front: in the client's words, over the engine's chat route, and back."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.anthropic import messages
from ajet_proxy.core.protocol.anthropic.template import Template
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, MESSAGES, Front

TOOL = {"name": "guess", "input_schema": {"type": "object"}}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2026-01-01"}


def body_for(**more: Any) -> dict[str, Any]:
    return {"model": "stub", "max_tokens": 12, "messages": [{"role": "user", "content": "héllo 😀"}], **more}


@pytest.mark.parametrize("split_seed", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_sampled_is_captured_and_told(stream: bool, split_seed: int | None) -> None:
    tools = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}
    async with EngineStub(split_seed=split_seed) as stub, Front(stub.url) as front:
        answer = await send(f"{front.url}/e/x{MESSAGES}?beta=true", body=body_for(stream=stream), headers=HEADERS)
        called = await send(f"{front.url}/e/x{MESSAGES}", body=body_for(stream=stream, **tools), headers=HEADERS)
        [asked, _] = stub.llm_requests()
        direct = await send(stub.url + CHAT, body=asked.body | {"stream": False, "stream_options": None})
    said, tool = front.calls
    choice = direct.json()["choices"][0]
    assert said.token_ids == tuple(choice["token_ids"]) and said.finish_reason == choice["finish_reason"]
    assert said.prompt_token_ids == tuple(direct.json()["prompt_token_ids"])
    assert tool.finish_reason == "tool_calls"
    assert [answer.headers["x-ajet-call"], called.headers["x-ajet-call"]] == [said.call, tool.call]
    if not stream:
        assert answer.json()["content"] == [{"type": "text", "text": choice["message"]["content"]}]
        assert [block["type"] for block in called.json()["content"]] == ["text", "tool_use"]
        return
    text = "".join(item["delta"]["text"] for item in answer.events() if item["type"] == "content_block_delta")
    assert text == choice["message"]["content"]
    opened = [item["content_block"]["type"] for item in called.events() if item["type"] == "content_block_start"]
    assert opened == ["text", "tool_use"]
    assert called.events()[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("merges", [False, True])
async def test_a_conversation_without_a_name_goes_on_however_the_engine_reads_it(
    monkeypatch: pytest.MonkeyPatch, front: Front, merges: bool
) -> None:
    monkeypatch.setattr(messages, "template_of", lambda answers: Template(merges_system=merges))
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"},
    ]  # fmt: skip
    episodes = []
    for _ in range(3):
        answer = await send(front.url + MESSAGES, body=body_for(system="rules", messages=turns))
        episodes.append(answer.headers["x-ajet-episode"])
        turns += [{"role": "assistant", "content": answer.json()["content"]}, {"role": "user", "content": "more"}]
    assert len(set(episodes)) == 1


@pytest.mark.parametrize(("body", "words"), [
    (b"{", "not a JSON object"), (b'{"model": "\xff"}', "not UTF-8"), (body_for(max_tokens=0), "max_tokens: "),
    (body_for(messages=[{"role": "user", "content": [{"type": "document"}]}]), "messages.0.content.0: "),
])  # fmt: skip
async def test_what_cannot_be_carried_is_refused_before_it_begins(
    stub: EngineStub, front: Front, body: Any, words: str
) -> None:
    answer = await send(f"{front.url}/e/x{MESSAGES}", body=body)
    assert not stub.requests
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error" and words in answer.json()["error"]["message"]
    assert not front.store.durable


async def test_a_stream_that_is_cut_shows_nothing_of_the_engines_own_protocol(stub: EngineStub, front: Front) -> None:
    stub.faults += [Fault("error_event", after=3), Fault("not_vllm")]
    failed = await send(f"{front.url}/e/x{MESSAGES}", body=body_for(stream=True))
    foreign = await send(f"{front.url}/e/x{MESSAGES}", body=body_for(stream=True))
    assert failed.events()[-1]["error"]["message"] == "EngineCore encountered an issue."
    assert b"It works!" in foreign.body
    assert front.lost == ["engine_error", "capture_failed"]


async def test_counting_tokens_is_the_engines_own_affair(stub: EngineStub, front: Front) -> None:
    answer = await send(f"{front.url}/e/x{MESSAGES}/count_tokens", body=body_for())
    assert [request.path for request in stub.requests] == []
    assert answer.status == 404 and answer.body == b"404: Not Found"
    assert not front.store.durable
