"""A tool call that was cut is recorded as cut, whatever its engine calls it; its client keeps the engine's word."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.engine_stub import EngineStub
from tests.kit.engine_tokens import encode
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, Front

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 7}}\n</tool_call>'
SCHEMA = {"type": "object"}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": "guess", "parameters": SCHEMA}}],
    MESSAGES: [{"name": "guess", "input_schema": SCHEMA}],
    RESPONSES: [{"type": "function", "name": "guess", "parameters": SCHEMA}],
}
LENGTH = len(encode(CALL))


def asks(path: str, said: str, limit: int, **more: Any) -> dict[str, Any]:
    content = f"say: {said}"
    name = "max_output_tokens" if path == RESPONSES else more.pop("name", "max_tokens")
    told = {"input": content} if path == RESPONSES else {"messages": [{"role": "user", "content": content}]}
    return {"model": "stub", "tools": TOOLS[path], name: limit, **told, **more}


def word(path: str, answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["finish_reason"] if path == CHAT else answer.get("stop_reason", answer.get("status"))


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(("path", "name", "said"), [
    (CHAT, "max_tokens", "tool_calls"), (CHAT, "max_completion_tokens", "tool_calls"),
    (MESSAGES, "max_tokens", "tool_use"),
])  # fmt: skip
async def test_a_call_that_was_cut_is_recorded_so(
    stub: EngineStub, front: Front, path: str, name: str, said: str, status: int
) -> None:
    """Also if the engine says nothing of its last token (`status`)."""
    stub.sampling.status = status
    answer = await send(f"{front.url}/e/x{path}", body=asks(path, CALL + " and more", LENGTH + 2, name=name))
    [call] = front.calls
    assert (call.finish_reason, len(call.token_ids), word(path, answer.json())) == ("length", LENGTH + 2, said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOLS)
async def test_a_call_that_ends_with_its_last_token_was_not_cut(
    stub: EngineStub, front: Front, path: str, stream: bool
) -> None:
    for _ in range(2):
        await send(f"{front.url}/e/x{path}", body=asks(path, CALL, LENGTH + 1, stream=stream))
    asked = [body for _, body in stub.sampling.asked if "logit_bias" in body and len(body["logit_bias"]) == 1]
    assert [call.finish_reason for call in front.calls] == ["tool_calls"] * 2
    assert len([body for body in asked if body["temperature"] == 0]) == 1, "of each token once"


async def test_stop_tokens_are_learned_from_answers_that_stopped(stub: EngineStub, front: Front) -> None:
    stub.sampling.status = 500
    await send(f"{front.url}/e/x{CHAT}", body=asks(CHAT, "hi", 50))
    for said, limit in ((CALL, LENGTH + 1), (CALL + " and more", LENGTH + 2)):
        await send(f"{front.url}/e/x{CHAT}", body=asks(CHAT, said, limit))
    assert [call.finish_reason for call in front.calls] == ["stop", "tool_calls", "length"]
