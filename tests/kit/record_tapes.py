"""Records the tapes anew: starts a real vLLM with the tiny model and asks it everything, as an agent and as the proxy.

    .venv-engine/bin/python -m tests.kit.record_tapes
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit import tapes, wire
from tests.kit.vllm_process import vllm_server

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
    "echo": {"prompt": "say hello", "echo": True},
    "error-400": {"prompt": "say", "max_tokens": 100_000},
}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every ``(name, route, body)``, streamed and not, as an agent sends it."""
    for kind, route, table in (("chat", CHAT, CHAT_CASES), ("completions", COMPLETIONS, COMPLETIONS_CASES)):
        for name, case in table.items():
            body = {"model": "tiny", "seed": 7, "temperature": 1.0, "max_tokens": 12} | case
            options = body.pop("stream_options", None)
            if options is None or name == "usage":
                yield f"{kind}-{name}", route, body
            streamed = body | {"stream": True} | ({"stream_options": options} if options else {})
            yield f"{kind}-{name}-stream", route, streamed


def as_proxy(route: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` as the proxy sends it on: token ids always, logprobs where the agent did not ask for them itself."""
    asked = body | {"return_token_ids": True}
    if route == CHAT:
        return asked | {"logprobs": True}
    return asked if body.get("logprobs") is not None else asked | {"logprobs": 0}


async def record(url: str) -> list[tapes.Tape]:
    out = []
    for name, route, body in cases():
        for asked_by, request in ((tapes.AGENT, body), (tapes.PROXY, as_proxy(route, body))):
            answer = await wire.send(url + route, body=request)
            headers = {key: answer.headers[key] for key in ("content-type",) if key in answer.headers}
            chunks = [chunk.decode() for chunk in answer.chunks]
            out.append(tapes.Tape(name, asked_by, route, request, answer.status, headers, chunks))
    return out


def main() -> None:
    from tests.kit.tiny_model import build

    with tempfile.TemporaryDirectory(prefix="ajet-tapes-") as folder:
        model = build(Path(folder, "tiny"))
        with vllm_server(model, Path(folder, "vllm.log")) as url:
            tapes.save(asyncio.run(record(url)))
    sys.stdout.write(f"{len(tapes.load())} tapes in {tapes.FILE}\n")


if __name__ == "__main__":
    main()
