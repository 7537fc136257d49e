"""The marks in journals: an open episode is continued after a restart, with whatever code. The digests never change."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.conversation.history import ChatHistory, Kind, PromptHistory, ResponseHistory, read
from ajet_proxy.core.trajectory.call import Captured

CHAT, COMPLETIONS, RESPONSES = ChatHistory, PromptHistory.of, ResponseHistory
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
RESPONSE: dict[str, Any] = {"model": "m", "instructions": "You help.", "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "guess"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "games", "arguments": "{ }"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "8"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "q"}},
    {"type": "compaction", "id": "cmp", "encrypted_content": "x"},
]}  # fmt: skip
OUTPUT = {"id": "resp-2", "output": RESPONSE["input"][1:4]}

CASES: dict[str, tuple[Kind, dict[str, Any], dict[str, Any]]] = {
    "chat": (CHAT, CHAT_REQUEST, {"content": "half a character \ud83d", "tool_calls": [TOOL_CALL]}),
    "response": (RESPONSES, RESPONSE, OUTPUT),
    "response without instructions": (RESPONSES, {"input": "guess"}, OUTPUT),
    "response that names one": (RESPONSES, {"previous_response_id": "resp-1", "input": "more"}, OUTPUT),
    "text": (COMPLETIONS, {"prompt": "guess higher"}, {"text": " than 7"}),
    "ids": (COMPLETIONS, {"prompt": [1, 2, 3]}, {"text": " than 7"}),
}
"""Kind, request and answer."""
MARKS: dict[str, tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]] = {
    "chat": (
        [
            ("chat:db587aadfe27e8e147909ca5", 0, "762b891e4f0a5219ecd38d96"),
            ("chat:cb3c94529fa4fbc03b4c6361", 0, "0a0b737ae1c63c0bf375dc49"),
        ],
        [
            ("chat:2f808d654cf6eddc0261e694", 0, "72a7b14af25d6cb0fe0ed0db"),
        ],
    ),
    "response": (
        [
            ("chat:9ea8dfac9f35b2853730c9cd", 0, "1bc7fc201eebb1ad05b7f8fc"),
            ("chat:64ac6443557a0bab5baf895e", 0, "00d9c272478699a2c8c4639c"),
            ("chat:08b3be6213f1e76454123d17", 0, "a056a995228f8ab099f04557"),
        ],
        [
            ("response:5744b906df46872592b1d829", 0, ""),
            ("chat:c384e3a16cfdc928421dbdad", 0, "bf4d619d20350d91a4e1c929"),
        ],
    ),
    "response without instructions": (
        [],
        [
            ("response:5744b906df46872592b1d829", 0, ""),
            ("chat:849334e39a48410923bc9144", 0, "914adf95333b3c4b6f290cbd"),
        ],
    ),
    "response that names one": (
        [
            ("response:e79f0217108e2b8b07276345", 0, ""),
        ],
        [
            ("response:5744b906df46872592b1d829", 0, ""),
        ],
    ),
    "text": (
        [
            ("text:69897a1779115d5401ac3eca", 12, ""),
            ("text:3e9e1043bb5f6ed2912fc664", 8, ""),
            ("text:0f5e76313fab86af22c1ef96", 4, ""),
        ],
        [
            ("ids:faf991935c33648431911694", 12, ""),
            ("text:0db7f9799c6a1103b40ab23d", 19, ""),
        ],
    ),
    "ids": (
        [
            ("ids:faf991935c33648431911694", 12, ""),
            ("ids:559f6dd8d5e6774cb418acd7", 8, ""),
            ("ids:aab401691803832432cd739f", 4, ""),
        ],
        [
            ("ids:faf991935c33648431911694", 12, ""),
        ],
    ),
}
"""The marks at which the request may go on from an earlier one, the longest first; and those behind its answer."""


@pytest.mark.parametrize("name", CASES)
def test_a_history_has_these_marks(name: str) -> None:
    kind, request, answer = CASES[name]
    history = read(kind, request, SCOPE)
    assert history is not None
    before, after = MARKS[name]
    assert list(history.beginnings({4, 8, 12})) == before
    assert list(history.after(answer, CAPTURED)) == after
