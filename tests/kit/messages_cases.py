"""Requests of Anthropic's Messages API, streamed and not, that a real vLLM answers on a route of its own. What else a
request may say, `tests/e2e/test_messages_conversion.py` makes up.

They are greedy, because this API has no seed. `PLAIN` are for any server, `THOUGHTFUL` for one with a reasoning parser
(`record_tapes.REASONING`), `COUNTED` for ``count_tokens``, and `REFUSED` are those that the engine or the proxy finds
fault with; with its status, what the proxy says instead of the engine, None where it says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ROUTE = "/v1/messages"
COUNT = f"{ROUTE}/count_tokens"
SCHEMA = {"type": "object", "properties": {"number": {"enum": [1, 2]}}, "required": ["number"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"name": "guess", "description": "Guess a number.", "input_schema": SCHEMA, "strict": True}
OTHER = {"name": "look", "input_schema": {"properties": {}}, "strict": False, "cache_control": {"type": "ephemeral"}}
TOOLS = {"tools": [TOOL, OTHER], "max_tokens": 40}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch=0a1b2;"
SYSTEM = [
    {"type": "text", "text": BILLING},
    {"type": "text", "text": "You are an assistant.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": " Guess again."},
]
HELLO = {"role": "user", "content": "say hello"}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "guess a number"}, {"type": "text", "text": "again"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "try two", "signature": "0" * 32},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "sure"},
        {"type": "tool_use", "id": "toolu_1", "name": "guess", "input": {"number": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "guess", "input": {"number": 2, "é": [None, 1.50]}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "higher"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
         "content": [{"type": "text", "text": "no"}]},
        {"type": "text", "text": "next", "cache_control": {"type": "ephemeral"}},
    ]},
]  # fmt: skip


def schema(value: Any) -> dict[str, Any]:
    """An answer that can only be `value`."""
    return {"output_config": {"format": {"type": "json_schema", "schema": {"enum": [value]}}}, "max_tokens": 40}


PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "short": {"max_tokens": 1},
    "system-inside": {"system": SYSTEM, "messages": [HELLO, {"role": "system", "content": "Be right."}, HELLO]},
    "turns": {"system": SYSTEM, "messages": TURNS, **TOOLS, "max_tokens": 12},
    "utf8": schema("é日😀 \\ \"'\n\u2028"),
    "stop": {"stop_sequences": ["zz", "lo t"], **schema("hello there, hello")},
    "tools-any": {**TOOLS, "tools": [TOOL], "tool_choice": {"type": "any"}},
    "tools-named": {**TOOLS, "tool_choice": {"type": "tool", "name": "guess"}},
    "tools-cut": {**TOOLS, "tool_choice": {"type": "tool", "name": "guess"}, "max_tokens": 6},
}  # fmt: skip
THOUGHTFUL: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": {"type": "adaptive"}},
    "thinking-off": {"thinking": {"type": "disabled"}},
    "thinking-before": {"messages": TURNS},
}
COUNTED: dict[str, dict[str, Any]] = {
    "count": {"system": SYSTEM, "messages": TURNS, "tools": [TOOL, OTHER]},
    "count-wrong": {"messages": 7},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "unknown-model": ({"model": "nobody"}, None),
    "too-long": ({"max_tokens": 100_000}, None),
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, None),
    "document": ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages.0.content.0"),
    "web-search": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    "mcp": ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
    "no-limit": ({"max_tokens": None}, "max_tokens"),
    "no-messages": ({"messages": None}, "messages"),
    "tiny-budget": ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
}


def cases(table: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every ``(name, body)`` of `table`, streamed and not, as an agent sends it."""
    for name, case in table.items():
        body = {"model": "tiny", "messages": [HELLO], "temperature": 0.0, "max_tokens": 12, **case}
        yield name, body
        yield f"{name}-stream", body | {"stream": True}
