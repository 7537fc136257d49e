"""The dialect as a whole: a Messages request becomes the chat request, and images and tools are judged as in chat.

A request that is usually carried over another route goes out as it is, and is not captured.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.anthropic.messages import Messages
from ajet_proxy.core.protocol.anthropic.template import Template
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_sdk.errors import BadRequest
from tests.proxy.core.protocol.answers import SSE, dump, reasons

ASK = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "é"}]}


def exchange(template: Template | None = None, **fields: Any) -> Exchange:
    dialect = Messages(template)
    return Exchange(dialect, dialect.translate(JsonBody(dump({**ASK, **fields}).encode())))


def test_the_route_is_captured_over_chat() -> None:
    running = exchange()
    assert running.target == "/v1/chat/completions"
    assert json.loads(running.upstream_body()) == {
        "model": "policy", "messages": [{"role": "user", "content": "é"}], "max_tokens": 5, "max_completion_tokens": 5,
        "tool_choice": None, "return_token_ids": True, "logprobs": True,
    }  # fmt: skip
    assert running.altered == ("return_token_ids", "logprobs")
    assert running.asked.fields["max_completion_tokens"] == 5


def test_a_message_is_one_call_whatever_else_is_asked() -> None:
    assert exchange(n=5000).choices == 1


def test_the_template_decides_where_a_system_message_stands() -> None:
    asked = [*ASK["messages"], {"role": "system", "content": "s"}]  # type: ignore[misc]
    stays = exchange(messages=asked)
    moves = exchange(Template(merges_system=True), messages=asked)
    assert [message["role"] for message in stays.asked.fields["messages"]] == ["user", "system"]
    assert [message["role"] for message in moves.asked.fields["messages"]] == ["system", "user"]


@pytest.mark.parametrize(("part", "expected"), [
    ({"type": "image", "source": {"type": "base64", "data": "A"}}, ["multimodal"]),
    ({"type": "tool_result", "content": [{"type": "tool_reference", "tool_name": "t"}]}, []),
])  # fmt: skip
def test_images_are_carried_and_not_captured(part: dict[str, Any], expected: list[str]) -> None:
    running = exchange(messages=[{"role": "user", "content": [part]}])
    running.on_headers(200, SSE)
    assert reasons(running.outcomes) == expected


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    """Where exactly is Python's affair; that the translation is nested deeper than the request is ours."""

    def refused(depth: int) -> bool:
        schema = '{"a":' * depth + "1" + "}" * depth
        body = f'{{"model":"m","max_tokens":1,"messages":[],"tools":[{{"name":"t","input_schema":{schema}}}]}}'
        try:
            Messages().translate(JsonBody(body.encode()))
        except BadRequest:
            return True
        return False

    low, high = 1, 200_000
    assert not refused(low) and refused(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refused(middle) else (middle, high)
    for depth in range(low - 8, high + 8):
        refused(depth)  # or not: no other error comes out
    deep: dict[str, Any] = {}
    for _ in range(200_000):
        deep = {"a": deep}
    request = JsonBody(dump(ASK).encode())
    request.fields["tools"] = [{"name": "t", "input_schema": deep}]
    with pytest.raises(BadRequest, match="nested"):
        Messages().translate(request)
