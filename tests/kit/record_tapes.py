"""Records the tapes anew: starts a real vLLM with the tiny model and asks it everything, as an agent and as the proxy.

    .venv-engine/bin/python -m tests.kit.record_tapes
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kit import tapes, wire
from tests.kit.vllm_process import vllm_server

Cases = Iterator[tuple[str, str, dict[str, Any]]]
"""Requests as agents send them: a name, a route, a body."""
Asked = Callable[[str, str, dict[str, Any]], dict[str, Any]]
"""The body of such a request as the proxy sends it on."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
CALL = r'<tool_call>\n\{"name": "guess", "arguments": \{"number": [1-9]\}\}\n</tool_call>'
ASK = [{"role": "user", "content": "say hello"}]
TURNS = [
    {"role": "system", "content": "You are an assistant."},
    {"role": "user", "content": "guess a number"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "guess", "arguments": '{"number": 3}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "higher"},
]  # fmt: skip

CHAT_CASES: dict[str, dict[str, Any]] = {
    "plain": {"messages": ASK},
    "turns": {"messages": TURNS, "tools": [TOOL]},
    "logprobs": {"messages": ASK, "logprobs": True, "top_logprobs": 2},
    "logprobs-bare": {"messages": ASK, "logprobs": True},
    "n2": {"messages": ASK, "n": 2},
    "n2-logprobs": {"messages": ASK, "n": 2, "logprobs": True, "top_logprobs": 1},
    "ids": {"messages": ASK, "return_token_ids": True},
    "usage": {"messages": ASK, "stream_options": {"include_usage": True}},
    "usage-each": {"messages": ASK, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stop": {"messages": ASK, "stop": ["lo"], "structured_outputs": {"regex": "hello there, hello"}},
    "utf8": {"messages": ASK, "structured_outputs": {"regex": "[é日😀]{5}"}},
    "length": {"messages": ASK, "max_tokens": 1},
    "tool": {"messages": ASK, "tools": [TOOL], "structured_outputs": {"regex": f"ok{CALL}"}, "max_tokens": 120},
    "tools2": {"messages": ASK, "tools": [TOOL], "structured_outputs": {"regex": rf"{CALL}\n{CALL}"},
               "max_tokens": 240},
    "tool-n2": {"messages": ASK, "n": 2, "tools": [TOOL], "structured_outputs": {"regex": CALL}, "max_tokens": 120},
    "tool-required": {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 160},
    "tool-named": {
        "messages": ASK, "tools": [TOOL], "max_tokens": 160,
        "tool_choice": {"type": "function", "function": {"name": "guess"}},
    },
    "grouped": {"messages": ASK, "stream_interval": 3},
    "n-lax": {"messages": ASK, "n": "2", "stream_options": None},
    "parallel": {"messages": ASK, "tools": [TOOL], "structured_outputs": {"regex": rf"{CALL}\n{CALL}"},
                 "max_tokens": 240, "parallel_tool_calls": False},
    "tokens-as-ids": {"messages": ASK, "logprobs": True, "return_tokens_as_token_ids": True},
    "logprob-ids": {"messages": ASK, "logprobs": True, "logprob_token_ids": [40, 41]},
    "prompt-logprobs": {"messages": ASK, "prompt_logprobs": 1},
    "words": {"messages": ASK, "bad_words": ["hello"], "min_tokens": 5, "best_of": 2, "stop": ["e"],
              "include_stop_str_in_output": True},
    "echo": {"messages": [*ASK, {"role": "assistant", "content": "hello"}], "echo": True,
             "add_generation_prompt": False, "continue_final_message": True},
    "beam": {"messages": ASK, "use_beam_search": True, "n": 2},
    "error-400": {"messages": ASK, "max_tokens": 100_000},
    "error-type": {"messages": "not a list"},
    "error-404": {"messages": ASK, "model": "nobody"},
}  # fmt: skip
COMPLETIONS_CASES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "say hello"},
    "prompt-ids": {"prompt": [40, 41, 42, 43]},
    "logprobs": {"prompt": "say hello", "logprobs": 2},
    "n2": {"prompt": "say hello", "n": 2},
    "ids": {"prompt": "say hello", "return_token_ids": True},
    "usage": {"prompt": "say hello", "stream_options": {"include_usage": True}},
    "stop": {"prompt": "say", "stop": ["lo"], "structured_outputs": {"regex": "hello there, hello"}},
    "utf8": {"prompt": "say", "structured_outputs": {"regex": "[é日😀]{5}"}},
    "two-prompts": {"prompt": ["say hello", "guess a number"]},
    "grouped": {"prompt": "say hello", "stream_interval": 3},
    "n2-of-two": {"prompt": [[40, 41], [42, 43, 44]], "n": 2},
    "tokens-as-ids": {"prompt": "say hello", "logprobs": 0, "return_tokens_as_token_ids": True},
    "logprob-ids": {"prompt": "say hello", "logprobs": 0, "logprob_token_ids": [40, 41]},
    "prompt-logprobs": {"prompt": "say hello", "prompt_logprobs": 1},
    "words": {"prompt": "say hello", "bad_words": ["hello"], "min_tokens": 5, "best_of": 2},
    "echo": {"prompt": "say hello", "echo": True},
    "echo-n2": {"prompt": "say hello", "echo": True, "n": 2},
    "echo-two": {"prompt": ["say hello", 'guess é\n\x01\x7f"\\/😀\u2028'], "echo": True},
    "echo-logprobs": {"prompt": "guess é", "echo": True, "logprobs": 1,
                      "structured_outputs": {"regex": "hello there, hello"}, "stream_interval": 2},
    "echo-prompt-logprobs": {"prompt": "say hello", "echo": True, "prompt_logprobs": 0},
    "echo-ids": {"prompt": "say hello", "echo": True, "return_token_ids": True},
    "echo-prompt-ids": {"prompt": [40, 41, 42], "echo": True},
    "echo-score": {"prompt": "say hello", "echo": True, "max_tokens": 0, "logprobs": 1},
    "beam": {"prompt": "say hello", "use_beam_search": True, "n": 2},
    "error-400": {"prompt": "say", "max_tokens": 100_000},
}


THOUGHT = {
    "messages": ASK, "structured_outputs": {"regex": "<think>hello\n[é日]</think>yes [a-c]{3}"}, "max_tokens": 40,
    "logit_bias": {"550": 100, "551": 100},  # a mark is one token and not its letters
}  # fmt: skip
QUIET = THOUGHT | {"include_reasoning": False}
REASONING_CASES: dict[str, dict[str, Any]] = {
    "reasoning": THOUGHT,
    "quiet": QUIET,
    "quiet-grouped": QUIET | {"stream_interval": 3},
    "quiet-n2": QUIET | {"n": 2},
    "quiet-asked": QUIET | {"logprobs": True, "return_token_ids": True},
    "quiet-usage": QUIET | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "quiet-length": QUIET | {"max_tokens": 9},
    "quiet-tools": QUIET | {
        "tools": [TOOL], "structured_outputs": {"regex": f"<think>hello</think>ok {CALL}\n{CALL}"}, "max_tokens": 200,
        "parallel_tool_calls": False,
    },
}  # fmt: skip
"""Requests that only a server with a reasoning parser answers in a way of its own (see `REASONING`)."""
REASONING = ("--reasoning-parser", "deepseek_r1", "--structured-outputs-config", '{"enable_in_reasoning": true}')
PASSED = (
    "chat-beam", "chat-beam-stream", "completions-beam", "completions-beam-stream", "completions-echo-prompt-ids",
    "completions-echo-prompt-ids-stream", "completions-echo-score", "completions-echo-score-stream",
    "completions-echo-n2-stream",
)  # fmt: skip
"""Cases that nothing is asked for besides, and that are not captured."""


def cases() -> Cases:
    """Every request, streamed and not."""
    yield from _both_ways("chat", CHAT, CHAT_CASES)
    yield from _both_ways("completions", COMPLETIONS, COMPLETIONS_CASES)


def reasoning_cases() -> Cases:
    """Those for a server with a reasoning parser."""
    yield from _both_ways("chat", CHAT, REASONING_CASES)


def _both_ways(kind: str, route: str, table: dict[str, dict[str, Any]]) -> Cases:
    for name, case in table.items():
        body = {"model": "tiny", "seed": 7, "temperature": 1.0, "max_tokens": 12} | case
        options = body.pop("stream_options", None)
        if options is None or name == "usage":
            yield f"{kind}-{name}", route, body
        streamed = body | {"stream": True} | ({"stream_options": options} if "stream_options" in case else {})
        yield f"{kind}-{name}-stream", route, streamed


def as_proxy(name: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` as the proxy sends it on: token ids always, logprobs where the agent did not ask for them itself."""
    if name in PASSED:
        return body
    asked = body | {"return_token_ids": True} | ({"include_reasoning": True} if "include_reasoning" in body else {})
    if route == CHAT:
        return asked | {"logprobs": True}
    return asked if body.get("logprobs") is not None else asked | {"logprobs": 0}


async def record(url: str, asked: Cases, as_proxy: Asked) -> list[tapes.Tape]:
    out = []
    for name, route, body in asked:
        for asked_by, request in ((tapes.AGENT, body), (tapes.PROXY, as_proxy(name, route, body))):
            answer = await wire.send(url + route, body=request)
            headers = {key: answer.headers[key] for key in ("content-type",) if key in answer.headers}
            chunks = [chunk.decode() for chunk in answer.chunks]
            out.append(tapes.Tape(name, asked_by, route, request, answer.status, headers, chunks))
    return out


def record_all(file: Path, plain: Cases, thinking: Cases, as_proxy: Asked) -> None:
    """Writes `file`: what a vLLM answers to `plain` requests, and one with a reasoning parser to the others."""
    from tests.kit.tiny_model import THINK, build

    with tempfile.TemporaryDirectory(prefix="ajet-tapes-") as folder:
        log = Path(folder, "vllm.log")
        with vllm_server(build(Path(folder, "tiny")), log) as url:
            told = asyncio.run(record(url, plain, as_proxy))
        with vllm_server(build(Path(folder, "think"), more=THINK), log, options=REASONING) as url:
            told += asyncio.run(record(url, thinking, as_proxy))
    tapes.save(told, file)
    sys.stdout.write(f"{len(tapes.load(file))} tapes in {file}\n")


if __name__ == "__main__":
    record_all(tapes.FILE, cases(), reasoning_cases(), as_proxy)
