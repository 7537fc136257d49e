"""The marks in journals: an open episode is continued after a restart, with whatever code. The digests never change."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from ajet_proxy.core.conversation.history import ChatHistory, Kind, PromptHistory
from ajet_proxy.core.trajectory.call import Captured
from tests.proxy.core.conversation.histories import history_of

CHAT, COMPLETIONS = ChatHistory, PromptHistory.of
SCOPE = b"s" * 32
CAPTURED = Captured(0, "m", (1, 2), (3,), (-0.5,), "stop")
TOOL_CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2.0, null]}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "x", "detail": None}}
CHAT_REQUEST: dict[str, Any] = {"model": "m", "messages": [
    {"role": "system", "content": "x-anthropic-billing-header: cch=1;\n\nYou help."},
    {"role": "user", "name": "bob", "content": [
        {"type": "text", "text": " gu"}, {"type": "input_text", "text": "ess"},
    ]},
    {"role": "assistant", "content": "<think>hm</think>\nok", "reasoning": "hm", "tool_calls": [
        TOOL_CALL, {"id": "call-2", "function": {"name": "g", "arguments": ""}},
        {"id": "call-3", "function": {"name": "h", "arguments": None}},
        {"id": "call-4", "function": {"name": "i", "arguments": "{broken "}},
        {"id": "call-5", "function": {"name": "j", "arguments": {"n": 2**70}}},
    ]},
    {"role": "function", "tool_call_id": "call-1", "content": "7"},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "developer", "content": [IMAGE]},
]}  # fmt: skip

CASES: dict[str, tuple[Kind, dict[str, Any], dict[str, Any]]] = {
    "chat": (CHAT, CHAT_REQUEST, {"content": "half a character \ud83d", "tool_calls": [TOOL_CALL]}),
    "text": (COMPLETIONS, {"prompt": "guess higher"}, {"text": " than 7"}),
    "ids": (COMPLETIONS, {"prompt": [1, 2, 3]}, {"text": " than 7"}),
}
"""Kind, request and answer."""
MARKS = {
    "chat": (2, 1, "83f3911e17b0f52abccb35df"),
    "text": (3, 2, "b077a167168120e9201802dc"),
    "ids": (3, 1, "39e2862dce302818401a5f3f"),
}
"""The number of marks before the request and behind its answer, and a digest of all of them."""


@pytest.mark.parametrize("name", CASES)
def test_a_history_has_these_marks(name: str) -> None:
    kind, request, answer = CASES[name]
    history = history_of(kind, request, SCOPE)
    before, after = list(history.beginnings({4, 8, 12})), list(history.after(answer, CAPTURED))
    assert (len(before), len(after), sha256(repr([*before, *after]).encode()).hexdigest()[:24]) == MARKS[name]
