"""The marks in journals: an open episode is continued after a restart, with whatever code. The digests never change."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.conversation.history import CHAT, COMPLETIONS, RESPONSES, read
from ajet_proxy.core.trajectory.call import Captured

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

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (CHAT, CHAT_REQUEST, {"content": "half a character \ud83d", "tool_calls": [TOOL_CALL]}),
    "response": (RESPONSES, RESPONSE, OUTPUT),
    "response without instructions": (RESPONSES, {"input": "guess"}, OUTPUT),
    "response that names one": (RESPONSES, {"previous_response_id": "resp-1", "input": "more"}, OUTPUT),
    "text": (COMPLETIONS, {"prompt": "guess higher"}, {"text": " than 7"}),
    "ids": (COMPLETIONS, {"prompt": [1, 2, 3]}, {"text": " than 7"}),
}
"""Route, request and answer."""
MARKS: dict[str, tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]] = {
    "chat": (
        [
            ("chat:8da30b02fde044c2ddfd6ac0", 0, "295951a47361ad2792295ef8"),
            ("chat:5c64c2b2feef7e2d697c65c7", 0, "a53c54004deee7ea3e4d9ac6"),
        ],
        [
            ("chat:1bfa120176afce0def037c17", 0, "70843bf3085f92c0e272032a"),
        ],
    ),
    "response": (
        [
            ("chat:0c41b9200000b8cba8ce6e42", 0, "0d873501db88a56cac5cb761"),
            ("chat:11d77d374e60db147a35547f", 0, "fc6f6026720c11e0bbbdcb66"),
            ("chat:a54b031983053daed8cca707", 0, "d20e246f4bb3dbbbff68e04e"),
        ],
        [
            ("response:5744b906df46872592b1d829", 0, ""),
            ("chat:1002800d20a84908a070a7dc", 0, "5f275ee34cc68c40e9b936ad"),
        ],
    ),
    "response without instructions": (
        [],
        [
            ("response:5744b906df46872592b1d829", 0, ""),
            ("chat:6a027489c1c24cef6f2d3bc6", 0, "fc6f6026720c11e0bbbdcb66"),
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
    route, request, answer = CASES[name]
    history = read(route, request, SCOPE)
    assert history is not None
    before, after = MARKS[name]
    assert list(history.beginnings({4, 8, 12})) == before
    assert list(history.after(answer, CAPTURED)) == after
