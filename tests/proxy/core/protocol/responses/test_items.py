"""Items as the messages that vLLM 0.31 makes of them (its `construct_input_messages`), and items that have none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.responses.history import spoken

USER = {"role": "user", "content": "hello"}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": []}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "guess", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "higher"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALLED = {"id": "c1", "type": "function", "function": {"name": "guess", "arguments": "{}"}}


def messages(*items: Any) -> list[Any] | None:
    found = spoken(items)
    return None if found is None else [dict(one.message) for one in found]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], []),
        ([USER], [USER]),
        ([{**USER, "id": "m", "status": "completed", "type": "message"}], [USER]),
        ([{"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}],
         [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        ([TEXT], [{"role": "assistant", "content": "hi"}]),
        ([{"role": "assistant", "content": "hi"}], [{"role": "assistant", "content": "hi"}]),
        ([TEXT, TEXT], [{"role": "assistant", "content": "hi"}] * 2),
        ([THOUGHT, TEXT, CALL, CALL],
         [{"role": "assistant", "reasoning": "hm", "content": "hi", "tool_calls": [CALLED, CALLED]}]),
        ([TEXT, THOUGHT], [{"role": "assistant", "content": "hi", "reasoning": "hm"}]),
        ([THOUGHT, THOUGHT], [{"role": "assistant", "reasoning": "hm"}] * 2),
        ([CALL, RESULT, CALL],
         [{"role": "assistant", "tool_calls": [CALLED]},
          {"role": "tool", "content": "higher", "tool_call_id": "c1"},
          {"role": "assistant", "tool_calls": [CALLED]}]),
        ([{**RESULT, "output": [{"type": "input_text", "text": "x"}]}],
         [{"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c1"}]),
        ([{**CALL, "namespace": "games"}],
         [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "games__guess", "arguments": "{}"}}]}]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": None}],
         [{"role": "assistant", "reasoning": "so"}]),
        ([{"type": "reasoning", "summary": [], "content": None}], [{"role": "assistant", "reasoning": ""}]),
    ],
)  # fmt: skip
def test_items_are_messages(items: list[Any], expected: list[Any]) -> None:
    assert messages(*items) == expected


@pytest.mark.parametrize(
    "item",
    [
        "hello",
        {},
        {"type": "message"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": [{"type": "input_text", "text": 7}]},
        {"role": "user", "content": ["hello"]},
        {"role": "user", "content": "hello", "name": "bob"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"type": "item_reference", "id": "m"},
        {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"},
        {**CALL, "arguments": {}},
        {**CALL, "call_id": None},
        {**CALL, "namespace": 7},
        {**RESULT, "call_id": None},
        {**RESULT, "output": {"a": 1}},
        {**THOUGHT, "encrypted_content": "x"},
        {**THOUGHT, "summary": None},
        {**THOUGHT, "content": "hm"},
        {**THOUGHT, "content": ["hm"]},
        {**THOUGHT, "content": [{"text": 7}]},
        {**THOUGHT, "content": [*THOUGHT["content"], *THOUGHT["content"]]},
    ],
)
def test_items_that_are_no_messages(item: Any) -> None:
    assert messages(USER, item, USER) is None


any_items = st.lists(st.sampled_from([USER, TEXT, CALL, RESULT, THOUGHT]), max_size=8)


@given(items=any_items)
def test_every_item_stands_in_one_message_and_no_message_mixes_speakers(items: list[Any]) -> None:
    found = spoken(items)
    assert found is not None
    assert [place for one in found for place in range(one.start, one.end)] == list(range(len(items)))
    for one in found:
        mine = one.message["role"] == "assistant"
        assert [messages(item)[0]["role"] == "assistant" for item in items[one.start : one.end]] == [  # type: ignore[index]
            mine
        ] * (one.end - one.start)
        assert len(one.parts) == (one.end - one.start if mine else 0)
