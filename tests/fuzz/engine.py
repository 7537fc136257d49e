"""The stub engine without a socket: a request's bytes in, its whole answer out, the same each time.

Fields are read as vLLM reads them, by pydantic's lax rules, and what it would refuse is refused: so two requests that
differ in what the proxy adds can be answered side by side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from typing_extensions import Required, TypedDict

from tests.kit import engine_dialect as dialect
from tests.kit import engine_responses as responses
from tests.kit.engine_stub import CHAT, COMPLETIONS, RESPONSES, WRITERS, prompts_of
from tests.kit.engine_tokens import encode, generate, render

SSE, JSON = "text/event-stream; charset=utf-8", "application/json"
MESSAGES = "/v1/messages"
MAX_CHOICES = 16384


@dataclass(frozen=True, slots=True)
class Answer:
    """`parts` are the events of a stream, or the one document."""

    status: int
    content_type: str
    parts: tuple[bytes, ...]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class Message(TypedDict, total=False):
    role: Required[str]
    content: str | None


class Function(TypedDict, total=False):
    name: Required[str]
    parameters: dict[str, Any]


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


class FlatTool(Function):
    type: Required[Literal["function"]]


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Common(BaseModel):
    model: str | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool | None = None


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[Tool] | None = None


class CompletionRequest(Common):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None


class ResponseRequest(BaseModel):
    model: str | None = None
    input: str
    instructions: str | None = None
    stream: bool | None = False
    max_output_tokens: int | None = Field(default=None, ge=1)
    include: list[str] | None = None
    top_logprobs: int | None = 0
    enable_response_messages: bool = False
    tools: list[FlatTool] = Field(default_factory=list)


KINDS: dict[str, type[BaseModel]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponseRequest}


def ask(path: str, body: bytes) -> Answer:
    """The engine's answer."""
    try:
        given = json.loads(body)
        json.dumps(given, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return refusal("JSON decode error")
    try:
        known = KINDS[path].model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return refusal(f"1 validation error: {first['loc']}: {first['type']}")
    fields = known.model_dump()
    return refusal(problem) if (problem := _fault(path, fields, given)) else _answered(path, fields)


def refusal(message: str) -> Answer:
    return Answer(400, JSON, (dialect.error(400, message),))


def _fault(path: str, fields: dict[str, Any], given: Mapping[str, Any]) -> str | None:
    if fields.get("stream_options") and not fields["stream"]:
        return "Stream options can only be defined when `stream=True`."
    if path == CHAT:
        if fields["top_logprobs"] and not fields["logprobs"]:
            return "when using `top_logprobs`, `logprobs` must be set to true."
        if (fields["top_logprobs"] or 0) > 20 or (fields["top_logprobs"] or 0) < 0:
            return "`top_logprobs` must be between 0 and 20"
        fields["logprobs"] = fields["logprobs"] and fields["top_logprobs"] is not None
    if path == COMPLETIONS and not -1 <= (fields["logprobs"] or 0) <= 20:
        return "`logprobs` must be between 0 and 20"
    return "too many tokens" if any((fields.get(name) or 0) > 100_000 for name in ("max_tokens", "n")) else None


def _answered(path: str, fields: dict[str, Any]) -> Answer:
    fields = {name: value for name, value in fields.items() if value is not None}
    if path == RESPONSES:
        asked = responses.as_chat(fields)
        asked["tools"] = asked["tools"] or None
    else:
        asked = fields
    if asked.get("tools"):
        asked.pop("stop", None)  # the stub cannot tell a call from its text while it holds text back
    prompts = prompts_of(fields) if path == COMPLETIONS else [encode(render(asked["messages"], asked.get("tools")))]
    outputs = [[generate(prompt, asked, place) for place in range(asked.get("n") or 1)] for prompt in prompts]
    prefix = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}[path]
    reply = dialect.Reply(f"{prefix}{1:016x}", 1_795_000_001, asked, prompts, outputs)
    document, events = WRITERS[path]
    if fields.get("stream"):
        return Answer(200, SSE, tuple(events(reply, 1)))
    return Answer(200, JSON, (document(reply),))
