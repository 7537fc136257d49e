"""What a choice said is the same however the engine told it, and is what a client would send back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.answer_text import joined
from ajet_proxy.core.protocol.dialects import CAPTURED
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import Request
from tests.kit import tapes
from tests.kit.record_tapes import PASSED

TOLD = [
    name for name in tapes.names()
    if tapes.load()[name, tapes.PROXY].status == 200 and "echo" not in name and name not in PASSED
]  # fmt: skip
IN_BOTH_WAYS = [name for name in TOLD if f"{name}-stream" in TOLD]


def given_by(name: str) -> list[dict[str, Any]]:
    """What the choices of a tape said, without what is drawn anew for each answer."""
    asked, told = tapes.load()[name, tapes.AGENT], tapes.load()[name, tapes.PROXY]
    running = Exchange(CAPTURED[told.route], Request(json.dumps(asked.request).encode()))
    running.on_headers(told.status, told.headers["content-type"])
    for chunk in told.chunks:
        running.feed(chunk.encode())
    running.finish()
    whole = [dict(one or {}) for one in running.given]
    for one in whole:
        one["content"] = one.get("content") or None
        one["tool_calls"] = [
            (call["type"], call["function"]["name"], call["function"]["arguments"], bool(call["id"]))
            for call in one.get("tool_calls", ())
        ]
    return whole


@pytest.mark.parametrize("name", IN_BOTH_WAYS)
def test_a_stream_says_what_a_document_says(name: str) -> None:
    whole = given_by(name)
    assert given_by(f"{name}-stream") == whole
    text = json.loads(tapes.load()[name, tapes.PROXY].body)["choices"][0]
    assert whole[0]["content"] == (text.get("message", {}).get("content") or None)
    assert whole[0].get("text") == text.get("text")


def test_pieces_of_text_and_of_tool_calls_are_joined() -> None:
    pieces = [
        {"role": "assistant", "content": ""}, b'"reasoning":"h\\u00e9"', b'"reasoning":"m"', {"content": None},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": None}}]},
        {"tool_calls": [{"index": 1, "id": None, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 1, "id": "not this", "function": {"arguments": " 1}"}}]}, b'"content":"ok"',
    ]  # fmt: skip
    assert joined(pieces) == {
        "role": "assistant", "content": "ok", "reasoning": "hém",
        "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": ""}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
        ],
    }  # fmt: skip
    assert joined([{"role": "assistant", "tool_calls": None, "annotations": []}]) == {
        "role": "assistant", "annotations": [],
    }  # fmt: skip


@pytest.mark.parametrize("piece", [
    b'"content":"\x01"', b'"content":"\xff"', {"tool_calls": 7}, {"tool_calls": ["x"]}, ["no", "map"],
    {"tool_calls": [{"function": None}]}, {"tool_calls": [{"index": []}]}, {"tool_calls": [{"index": "x"}, {}]},
    {"tool_calls": [{"function": {"name": 1}}]},
])  # fmt: skip
def test_what_nobody_could_put_together_is_nothing(piece: Any) -> None:
    assert joined([{"tool_calls": [{"index": 0}]}, piece]) is None
