"""The request's way from Anthropic's words to the engine's; that vLLM goes the same way is shown in tests/e2e."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.anthropic.request import to_chat
from ajet_proxy.core.protocol.anthropic.template import Template
from ajet_sdk.errors import BadRequest

ASK = [{"role": "user", "content": "hello"}]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}
TOOL = {"name": "guess", "description": "Guess.", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(template: Template | None = None, **fields: Any) -> dict[str, Any]:
    return to_chat({"model": "m", "max_tokens": 2000, "messages": ASK, **fields}, template or Template())


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **fields)["messages"]  # type: ignore[no-any-return]


def said(role: str, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return messages({"role": role, "content": list(blocks)})


def text(words: str | None) -> dict[str, Any]:
    return {"type": "text", "text": words}


# --- messages


def test_the_least_request() -> None:
    assert chat() == {
        "model": "m", "messages": ASK, "max_tokens": 2000, "max_completion_tokens": 2000, "tool_choice": None
    }  # fmt: skip


def test_what_the_engine_knows_by_the_same_name_is_passed_on() -> None:
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "cache_salt": "s", "vllm_xargs": {"a": 1},
            "kv_transfer_params": {"b": 1}, "ec_transfer_params": {"c": 1},
            "chat_template_kwargs": {"d": 1}}  # fmt: skip
    asked = chat(**same, metadata={"user_id": "u"}, service_tier="auto", context_management={"edits": []})
    assert asked == chat() | same
    assert chat(**dict.fromkeys(same)) == chat()
    assert chat(stop_sequences=["a"])["stop"] == ["a"]


def test_a_stream_counts_as_it_goes() -> None:
    asked = chat(stream=True)
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=False) == chat(stream=None) == chat()


@pytest.mark.parametrize(("system", "expected"), [
    ("Be brief.", "Be brief."), ([text("a"), text("b")], "ab"), ([BILLING, text("a"), text(None)], "a"),
    (BILLING["text"], BILLING["text"]), ([BILLING], None), ("", None), ([], None), (None, None),
])  # fmt: skip
def test_the_system_prompt_comes_first(system: Any, expected: str | None) -> None:
    first = [] if expected is None else [{"role": "system", "content": expected}]
    assert messages(*ASK, system=system) == first + ASK


@pytest.mark.parametrize(("content", "expected"), [
    ("now", "now"), ([text("n"), BILLING, text("ow")], "now"), (BILLING["text"], None), ("", None),
])  # fmt: skip
def test_a_system_message_stays_in_the_middle_or_moves_to_the_front(content: Any, expected: str | None) -> None:
    asked = {"messages": [*ASK, {"role": "system", "content": content}], "system": "first"}
    stays = [{"role": "system", "content": expected}] if expected else []
    assert chat(**asked)["messages"] == [{"role": "system", "content": "first"}, *ASK, *stays]
    moved = chat(Template(merges_system=True), **asked)["messages"]
    assert moved == [{"role": "system", "content": f"first{expected or ''}"}, *ASK]
    del asked["system"]
    moved = chat(Template(merges_system=True), **asked)["messages"]
    assert moved == [*stays, *ASK]


def test_texts_and_images() -> None:
    assert said("user", text("a")) == [{"role": "user", "content": "a"}]
    assert said("user", text("a"), text("b")) == [{"role": "user", "content": [text("a"), text("b")]}]
    assert said("user", IMAGE, text("a")) == [{"role": "user", "content": [IMAGE_PART, text("a")]}]
    assert said("user", IMAGE) == [{"role": "user", "content": [IMAGE_PART]}]
    url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    assert said("user", url)[0]["content"][0]["image_url"] == {"url": "https://x/y.png"}
    bare = {"type": "image", "source": {"data": "AAAA"}}
    assert said("user", bare)[0]["content"][0]["image_url"] == {"url": "data:image/jpeg;base64,AAAA"}


def test_an_empty_message_is_none_of_the_users_but_one_of_the_assistants() -> None:
    assert said("user") == said("user", text(None), text("")) == []
    assert said("assistant") == said("assistant", {"type": "redacted_thinking", "data": "?"}) == [{"role": "assistant"}]


def test_what_the_assistant_thought_said_and_called() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "guess", "input": {"é": [1.50, None]}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    [message] = said("assistant", thought, {"type": "thinking"}, thought, text("ok"), call, {"type": "tool_use"})
    assert message == {
        "role": "assistant", "reasoning": "hmhm", "content": "ok",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "guess", "arguments": '{"\\u00e9": [1.5, null]}'}},
            {"id": "call_1", "type": "function", "function": {"name": "", "arguments": "{}"}},
        ],
    }  # fmt: skip


def test_what_a_tool_gave_comes_before_the_rest_of_its_message() -> None:
    parts = [text("a"), {"type": "text"}, IMAGE, {"type": "tool_reference", "tool_name": "t"},
             {"type": "tool_reference", "name": "u"}, {"type": "tool_reference"}, text("b")]  # fmt: skip
    rich = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": parts}
    plain = {"type": "tool_result", "tool_use_id": "c2", "content": "higher"}
    assert said("user", text("so:"), rich, plain, {"type": "tool_result"}) == [
        {"role": "tool", "tool_call_id": "c1", "content": "a\n\nb"},
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "tool", "tool_call_id": "c1", "content": [
            {"type": "tool_reference", "name": "t"}, {"type": "tool_reference", "name": "u"}
        ]},
        {"role": "tool", "tool_call_id": "c2", "content": "higher"},
        {"role": "tool", "tool_call_id": "", "content": ""},
        {"role": "user", "content": "so:"},
    ]  # fmt: skip
    assert said("assistant", plain) == [{"role": "assistant", "content": "Tool result: higher"}]
    assert said("assistant", {"type": "tool_result"}) == [{"role": "assistant", "content": "Tool result: "}]


# --- what the answer is to be


def test_a_schema_and_an_effort() -> None:
    schema = {"type": "object"}
    asked = chat(output_config={"effort": "xhigh", "format": {"type": "json_schema", "schema": schema}})
    assert asked["reasoning_effort"] == "xhigh"
    assert asked["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}
    }  # fmt: skip
    for nothing in (None, {}, {"format": None, "effort": None}, {"format": {"type": "json_schema"}}):
        assert chat(output_config=nothing) == chat()


def test_thinking() -> None:
    assert chat(thinking={"type": "enabled", "budget_tokens": 1024})["thinking_token_budget"] == 1024
    assert chat(thinking={"type": "adaptive"}) == chat(thinking=None) == chat()
    off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}
    assert chat(**off)["reasoning_effort"] == "none"
    assert chat(Template(disabled_effort="low"), **off)["reasoning_effort"] == "low"


def test_tools() -> None:
    bare = {"name": "bare", "input_schema": {}, "strict": False, "defer_loading": True, "cache_control": {}}
    assert chat(tools=[TOOL, bare])["tools"] == [
        {"type": "function", "function": {
            "name": "guess", "description": "Guess.", "parameters": {"type": "object", "properties": {}}
        }},
        {"type": "function", "function": {
            "name": "bare", "description": None, "parameters": {"type": "object"}, "strict": False,
            "defer_loading": True,
        }},
    ]  # fmt: skip
    assert chat(tools=[TOOL])["tool_choice"] == "auto"
    assert chat(tools=[]) == chat(tools=None) == chat()


@pytest.mark.parametrize(("choice", "told"), [
    ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
    ({"type": "tool", "name": "guess"}, {"type": "function", "function": {"name": "guess"}}),
])  # fmt: skip
def test_the_choice_of_a_tool(choice: dict[str, Any], told: Any) -> None:
    for parallel in (True, False):
        asked = chat(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": not parallel})
        assert (asked["tool_choice"], asked["parallel_tool_calls"]) == (told, parallel)
    none = chat(tool_choice=choice)
    assert "tools" not in none and none["tool_choice"] == (None if told == "auto" else told)


# --- what cannot be carried


@pytest.mark.parametrize(("fields", "words"), [
    ({"model": None}, "model: must be a text"), ({"model": ""}, "model: must not be empty"),
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": 0}, "above 0"),
    ({"stream": "maybe"}, "stream: must be true or false"), ({"stop_sequences": "a"}, "stop_sequences: must be a list"),
    ({"messages": None}, "messages: must be a list"), ({"messages": ["a"]}, "messages.0: must be an object"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content: must be a text or a list"),
    ({"system": 5}, "system: must be"), ({"system": ["a"]}, "system.0: must be an object"),
    ({"system": [IMAGE]}, "system.0: a system prompt is text"), ({"system": [text(5)]}, "system.0.text"),
    ({"thinking": "on"}, "thinking: must be an object"), ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "at least 1024"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than max_tokens"),
    ({"output_config": 1}, "output_config"), ({"output_config": {"format": "json"}}, "output_config.format"),
    ({"output_config": {"format": {"type": "grammar"}}}, "'grammar' cannot be asked"),
    ({"output_config": {"effort": ["low"]}}, "output_config.effort: must be one of low"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget: "),
    ({"tools": {"a": 1}}, "tools: must be a list"), ({"tools": [1]}, "tools.0: must be an object"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tool_choice": "auto"}, "tool_choice: must be an object"), ({"tool_choice": {"type": []}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"), ({"mcp_servers": [{}]}, "mcp_servers: "),
    ({"container": "c"}, "container: "), ({"output_format": {"type": "json_schema"}}, "output_format: "),
])  # fmt: skip
def test_a_field_that_cannot_be_carried_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=r"^[\w.]+: ") as caught:
        chat(**fields)
    assert words in caught.value.message


@pytest.mark.parametrize(("role", "block", "words"), [
    ("user", "text", "must be an object"), ("user", {"type": "document"}, "'document' cannot be carried"),
    ("user", {"type": "tool_use"}, "message of the user"), ("user", {"type": "redacted_thinking"}, "of the user"),
    ("user", {"type": []}, "cannot be carried"), ("assistant", {"type": "server_tool_use"}, "'server_tool_use'"),
    ("user", {"type": "image"}, "content.0.source"),
    ("user", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "'file' cannot be carried"),
    ("user", {"type": "image", "source": {"type": "url"}}, "source.url"),
    ("user", {"type": "image", "source": {"type": "base64"}}, "source.data"),
    ("user", {"type": "tool_result", "content": 5}, "content.0.content: must be"),
    ("user", {"type": "tool_result", "content": ["a"]}, "content.0.content.0: must be an object"),
    ("user", {"type": "tool_result", "content": [{"type": "search_result"}]}, "results of type 'search_result'"),
    ("user", {"type": "tool_result", "content": [{"type": "text", "text": 5}]}, "content.0.content.0.text"),
    ("assistant", {"type": "tool_use", "input": "x"}, "input: must be an object"),
    ("assistant", {"type": "thinking", "thinking": 5}, "thinking: must be a text"),
    ("system", {"type": "document"}, "a system prompt is text"),
])  # fmt: skip
def test_a_block_that_cannot_be_carried_is_named(role: str, block: Any, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        said(role, block)
    assert words in caught.value.message and caught.value.message.startswith("messages.0.content.0")


# --- what Anthropic's API has besides (its Python library 0.121, betas included)

IGNORED: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"}, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {}, "fallback_credit_token": "t", "fallbacks": [{"model": "other"}], "inference_geo": "eu",
    "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast", "user_profile_id": "p",
}  # fmt: skip
"""Fields that have no bearing on what the model sees or says, or none in vLLM, which takes it and does nothing."""


def test_what_means_nothing_to_the_engine_changes_nothing() -> None:
    assert chat(**IGNORED) == chat()


def test_what_a_tool_or_a_result_says_besides_is_not_refused() -> None:
    tool = {"name": "a", "input_schema": {"type": "object"}}
    more = {"type": "custom", "cache_control": {"type": "ephemeral"}, "input_examples": [{}],
            "eager_input_streaming": True, "allowed_callers": ["direct"]}  # fmt: skip
    assert chat(tools=[tool | more]) == chat(tools=[tool])
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    assert said("user", result | {"is_error": True}) == said("user", result)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 3000) | st.sampled_from(["user", "text", "auto", "any", "enabled", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "source", "input", "name", "budget_tokens", "format"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


def test_numbers_and_truth_values_are_read_as_the_engine_reads_them() -> None:
    for limit in (50, 50.0, "50"):
        assert chat(max_tokens=limit)["max_tokens"] == 50
    for stream in (True, "true", 1):
        assert chat(stream=stream)["stream"] is True
    assert "stream" not in chat(stream="false")


FIELDS = ("model", "max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "stream",
          "stop_sequences", "temperature")  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.booleans())
def test_whatever_is_asked_is_carried_or_refused(fields: dict[str, Any], merges: bool) -> None:
    asked = {"model": "m", "max_tokens": 9, "messages": ASK, **fields}
    before = json.dumps(asked)
    with contextlib.suppress(BadRequest):
        json.dumps(to_chat(asked, Template(merges_system=merges)))
    assert json.dumps(asked) == before
