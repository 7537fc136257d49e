"""Records the tapes of ``/v1/responses`` anew; they lie in a file of their own, beside those of chat.

    .venv-engine/bin/python -m tests.kit.record_responses
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.kit import tapes
from tests.kit.record_tapes import CALL, record_all

FILE = tapes.FILE.with_name("vllm-0.31.responses.tapes.jsonl.gz")
ROUTE = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
TOOL = {
    "type": "function", "name": "guess", "description": "Guess a number.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}  # fmt: skip
NAMESPACE = {"type": "namespace", "name": "games", "description": "Games.", "tools": [TOOL]}
BUILT_IN: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "custom", "name": "apply_patch", "description": "Edit files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
]  # fmt: skip
"""Tools that Codex sends besides functions and namespaces. The engine takes them, and tells the model of none."""
NAMED_CALL = CALL.replace("guess", "games__guess")
TURNS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "guess a number"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "try"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "sure"}]},
    {"type": "function_call", "call_id": "call_1", "name": "guess", "arguments": '{"number": 3}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "higher"},
    {"role": "user", "content": "next"},
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA | {"additionalProperties": False}}}


def regex(pattern: str, tokens: int = 12) -> dict[str, Any]:
    return {"structured_outputs": {"regex": pattern}, "max_output_tokens": tokens}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructions": {"instructions": "You are an assistant.", "metadata": {"a": "b"}, "user": "me", "store": False},
    "turns": {"input": TURNS, "tools": [TOOL], "parallel_tool_calls": False},
    "logprobs": {"include": [LOGPROBS], "top_logprobs": 2},
    "ids": {"enable_response_messages": True},
    "include": {"include": ["reasoning.encrypted_content"], "top_logprobs": 100},
    "nulls": {"include": None, "top_logprobs": None, "enable_response_messages": False, "stream_options": None},
    "stop": {"stop": ["lo"], **regex("hello there, hello")},
    "utf8": regex("[é日😀]{5}"),
    "short": {"max_output_tokens": 1},
    "schema": {"text": FORMAT, "max_output_tokens": 60},
    "tool": {"tools": [TOOL], **regex(f"ok{CALL}", 120)},
    "tool-alone": {"tools": [TOOL], **regex(CALL, 120)},
    "tools2": {"tools": [TOOL], **regex(rf"{CALL}\n{CALL}", 240)},
    "tool-required": {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 160},
    "tool-named": {
        "tools": [TOOL], "tool_choice": {"type": "function", "name": "guess"}, "max_output_tokens": 160,
    },
    "tool-none": {"tools": [TOOL], "tool_choice": "none"},
    "tool-asked": {"tools": [TOOL], "include": [LOGPROBS], **regex(CALL, 120)},
    "namespace": {"tools": [{"type": "web_search"}, NAMESPACE], **regex(NAMED_CALL, 160)},
    "codex": {
        "instructions": "You are an assistant.", "store": False, "prompt_cache_key": "s", "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"},
        "input": [{"role": "developer", "content": [{"type": "input_text", "text": "right"}]}, *TURNS],
        "tools": [TOOL, NAMESPACE, *BUILT_IN], **regex(f"ok{NAMED_CALL}", 160),
    },
    "background": {"background": True},
    "error-400": {"max_output_tokens": 100_000},
    "error-type": {"input": 7},
    "error-top": {"top_logprobs": "many"},
    "error-include": {"include": ["nothing"]},
    "error-404": {"model": "nobody"},
    "error-previous": {"previous_response_id": "resp_nobody"},
}  # fmt: skip
THINKING = {"logit_bias": {"550": 100, "551": 100}}  # a mark is one token and not its letters
REASONING_CASES: dict[str, dict[str, Any]] = {
    "reasoning": THINKING | regex("<think>hello</think>ok"),
    "reasoning-tool": {"tools": [TOOL], **THINKING, **regex(f"<think>hello</think>{CALL}", 120)},
    "reasoning-tools2": {"tools": [TOOL], **THINKING, **regex(rf"<think>hello</think>ok {CALL}\n{CALL}", 240)},
    "reasoning-alone": THINKING | regex("<think>hello there</think>ok", 5),
    "reasoning-low": {"reasoning": {"effort": "low", "summary": "auto"}},
    "reasoning-before": {"input": TURNS, "tools": [TOOL], "include": ["reasoning.encrypted_content"]},
}
"""Requests that a server with a reasoning parser answers in a way of its own (see `record_tapes.REASONING`)."""
PASSED_THROUGH = ("background",)


def cases(table: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every ``(name, route, body)`` of `table`, streamed and not, as an agent sends it."""
    for name, case in table.items():
        sampling = {"seed": 7, "temperature": 1.0, "max_output_tokens": 12}
        body = {"model": "tiny", "input": "say hello", **sampling, **case}
        yield name, ROUTE, body
        yield f"{name}-stream", ROUTE, body | {"stream": True}


def as_proxy(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` as the proxy sends it on."""
    name = name.removesuffix("-stream")
    if name in PASSED_THROUGH:
        return body
    asked = body | {"enable_response_messages": True}
    if name in ("error-top",) or LOGPROBS in (body.get("include") or ()):
        return asked
    return asked | {"include": [*(body.get("include") or ()), LOGPROBS], "top_logprobs": 0}


if __name__ == "__main__":
    record_all(FILE, cases(CASES), cases(REASONING_CASES), lambda name, route, body: as_proxy(name, body))
