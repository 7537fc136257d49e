"""Answers as vLLM writes them, for tests that need one which no tape has."""

from __future__ import annotations

import json
from typing import Any

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured, Lost, Outcome

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SSE = "text/event-stream; charset=utf-8"


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: Any) -> bytes:
    return f"data: {value if isinstance(value, str) else dump(value)}\n\n".encode()


def chat_event(
    delta: Any, *, index: int = 0, ids: Any = None, logprobs: Any = None, finish: Any = None, **top: Any
) -> dict[str, Any]:
    """One event; `logprobs` are numbers, a token each."""
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    if logprobs is not None:
        choice["logprobs"] = {"content": [
            {"token": "t", "logprob": value, "bytes": [116], "top_logprobs": []} for value in logprobs
        ]}  # fmt: skip
    if "role" not in delta:
        choice["token_ids"] = ids
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    return {**head, "choices": [choice], **top}


def chat_start(prompt: Any, *, index: int = 0) -> dict[str, Any]:
    return chat_event({"role": "assistant", "content": ""}, index=index, prompt_token_ids=prompt, prompt_text=None)


def completion_event(
    text: str, *, index: int = 0, ids: Any = None, logprobs: Any = None, finish: Any = None, prompt: Any = None
) -> dict[str, Any]:
    told = None if logprobs is None else {
        "text_offset": [0] * len(logprobs), "token_logprobs": logprobs, "tokens": ["t"] * len(logprobs),
        "top_logprobs": [{"t": value} for value in logprobs],
    }  # fmt: skip
    choice = {
        "index": index, "text": text, "logprobs": told, "finish_reason": finish, "stop_reason": None,
        "prompt_token_ids": prompt, "token_ids": ids,
    }  # fmt: skip
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "policy", "choices": [choice]}


def exchange(path: str, request: dict[str, Any] | None = None, **more: Any) -> Exchange:
    dialect = CAPTURED[path]
    asked = JsonBody(dump({"model": "policy", **(request or {})}).encode())
    return Exchange(dialect, dialect.translate(asked), **more)


def stream(
    path: str, events: list[Any], request: dict[str, Any] | None = None
) -> tuple[list[Any], tuple[Outcome, ...]]:
    """The part of each event that the client sees, and the outcomes."""
    running = exchange(path, request)
    running.on_headers(200, SSE)
    out = b"".join(b"".join([*running.feed(event(item)), *running.release()]) for item in events)
    out += b"".join(running.finish())
    seen = [item.removeprefix("data: ") for item in out.decode().split("\n\n") if item]
    return [item if item == "[DONE]" else json.loads(item) for item in seen], running.outcomes


def document(path: str, body: Any, request: dict[str, Any] | None = None) -> tuple[bytes, tuple[Outcome, ...]]:
    """The body that the client sees, and the outcomes."""
    running = exchange(path, request)
    running.on_headers(200, "application/json")
    assert running.feed(body if isinstance(body, bytes) else dump(body).encode()) == []
    return b"".join(running.finish()), running.outcomes


def reasons(outcomes: tuple[Outcome, ...]) -> list[str]:
    return [outcome.reason if isinstance(outcome, Lost) else "captured" for outcome in outcomes]


def ids_of(outcomes: tuple[Outcome, ...]) -> list[tuple[int, ...]]:
    assert all(isinstance(outcome, Captured) for outcome in outcomes)
    return [outcome.token_ids for outcome in outcomes if isinstance(outcome, Captured)]
