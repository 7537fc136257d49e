"""Recognizing history on ``/v1/responses``: the outline of a request whose history is told in items, or by a name.

Items are known by the messages that the engine makes of them (`history`). A streamed answer is told twice, in events
and as a whole at the end, and vLLM gives its calls other ids there. The client may have kept either, so an answer is
known by both. A request with ``previous_response_id`` does not repeat its history. It continues the very response that
it names, with its reasoning and its calls, under the same instructions.

How the engine renders such a request can be asked in two ways: on ``/tokenize`` with the messages, or on the route
itself. There `Responding.question` asks for one token, and the answer reports the prompt. The first way is cheaper. The
second is true of every engine, and the only one for a history that is named. Whether the two agree is tried once for
each `kind` of request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, ClassVar

from ajet_proxy.core.continuity.memory import FIELD, HARMLESS, Outcome, Outline, digest, shape_of, sought_by
from ajet_proxy.core.protocol.responses.history import ResponseHistory, Spoken, spoken
from ajet_proxy.core.tokens import are_tokens

_HARMLESS = HARMLESS | {
    "input", "include", "max_output_tokens", "max_tool_calls", "previous_response_id", "enable_response_messages",
    "background", "client_metadata",
}  # fmt: skip
_BEYOND = (
    "background", "conversation", "prompt", "previous_input_messages", "kv_transfer_params", "ec_transfer_params",
    "mm_processor_kwargs", "media_io_kwargs", "enable_response_messages",
)  # fmt: skip
_NOT_ASKED = frozenset((
    "stream", "stream_options", "include", "top_logprobs", "request_id", "max_tool_calls", "min_tokens", "ignore_eos",
))  # fmt: skip
_ONE = {"max_output_tokens": 1, "store": False, "enable_response_messages": True}
_FREE = {"text": None, "structured_outputs": None, "tool_choice": "auto", "temperature": 0}
"""Fields of which an answer of one given word must be free."""
_DESCRIBED, _OPTIONAL = ("name", "description", "parameters"), ("strict", "defer_loading")
_HEARD = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "content"}
_UNFINISHED = ("in_progress", "incomplete")
_SURELY = 100
"""The bias under which a token is sampled, whatever the model thinks of it."""


class Responding(Outline, frozen=True):
    """An `Outline` whose ``fields`` are those of the chat that the engine makes of the request ``asked``."""

    history: ResponseHistory
    asked: Mapping[str, Any] = {}
    route_tells: ClassVar[bool] = True

    @property
    def kind(self) -> bytes:
        """The digest of what may shape the prompt, except the instructions' words, and of the kinds of messages."""
        shape = shape_of(self.asked, _HARMLESS | {"instructions"})
        return digest(shape, [bool(self.asked.get("instructions")), kinds(self.history.spoken)])

    def ends(self, answer: Mapping[str, Any]) -> Iterator[tuple[bytes, Outcome | None]]:
        """The digests of the histories that end with `answer`, which has the form of `Reader.answers`."""
        if self.asked.get("store") is not False:
            yield _name(self.seed, answer["id"]), None
        for output in () if self.by_name else (answer.get("shown"), answer["output"]):
            messages = spoken(output) if isinstance(output, list) else None
            if messages is not None and len(messages) == 1 and messages[0].message["role"] == "assistant":
                yield from Outline.ends(self, messages[0].message)

    def called(self, answer: Mapping[str, Any]) -> bool:
        output = answer["output"] if isinstance(answer["output"], list) else []
        return any(isinstance(item, Mapping) and item.get("type") == "function_call" for item in output)

    def question(self) -> dict[str, Any]:
        """A request for one token on the client's own route, whose answer tells how the engine renders this request."""
        return {name: value for name, value in self.asked.items() if name not in _NOT_ASKED} | _ONE

    def question_with_answer(self, text: str) -> dict[str, Any]:
        """`question` with `text` in place of the last answer. If that answer is only named, what came before it is not
        known, and a question of our own stands there."""
        stand_in = {"type": "message", "role": "assistant", "content": text}
        items = self.history.items
        before, after = [{"type": "message", "role": "user", "content": "?"}], items
        if self.history.answer is not None:
            answer = self.history.spoken[self.history.answer - len(self.history.messages)]
            before, after = items[: answer.start], items[answer.end :]
        return self.question() | {"input": [*before, stand_in, *after], "previous_response_id": None}

    def first_word(self, token: int, ids: Sequence[int] | None) -> dict[str, Any]:
        """A request that streams the one `token` after this conversation, or after `ids`."""
        body = self.question() | _FREE | {"stream": True, "logit_bias": {str(token): _SURELY}}
        return body if ids is None else body | {FIELD: {"prompt_token_ids": list(ids)}}

    @staticmethod
    def trial(model: str, ids: Sequence[int]) -> dict[str, Any]:
        return {"model": model, "input": "?", FIELD: {"prompt_token_ids": list(ids)}} | _ONE

    @staticmethod
    def prompt_in(answer: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The prompt ids that an unstreamed `answer` reports, if ``enable_response_messages`` asked for them."""
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            [message] = answer["input_messages"]
            if are_tokens(message["tokens"]):
                return tuple(message["tokens"])
        return None

    @staticmethod
    def delta_in(event: Any) -> Mapping[str, Any]:
        return {_HEARD[event["type"]]: event["delta"]}


def outline(
    fields: Mapping[str, Any], history: ResponseHistory, *, episode: str, model: str, agent: str
) -> Responding | None:
    """The outline of a request to ``/v1/responses``; None if its prompt is more than its items."""
    tools, reasoning = functions(fields.get("tools")), fields.get("reasoning") or {}
    if is_unfinished(history.items) or tools is None or not isinstance(reasoning, Mapping):
        return None
    if any(map(fields.get, _BEYOND)) or fields.get("truncation") not in (None, "disabled"):
        return None
    previous, seed = history.previous, digest(b"", [episode, model, agent])
    if not isinstance(previous, str | None) or (previous is not None and history.answer is not None):
        return None
    sought = sought_by(fields, _HARMLESS, history, seed)
    if sought is None:
        return None
    if previous is not None:
        sought = sought._replace(end=_name(seed, previous))
    asked = {**fields, "model": model}
    return Responding(_as_chat(asked, tools, reasoning), history, seed, sought, previous is not None, asked)


def is_unfinished(items: Sequence[Any]) -> bool:
    """Tell whether the engine would continue the last of `items` instead of beginning a new turn."""
    last = items[-1] if items and isinstance(items[-1], Mapping) else {}
    return last.get("status") in _UNFINISHED and last.get("type", "message") in ("message", "reasoning")


def kinds(said: Sequence[Spoken]) -> list[Any]:
    """The kinds of messages in `said`, each once: the role, the parts, and which fields are empty."""
    found = set()
    for one in said:
        shapes = tuple(f"{name}:{type(value).__name__}:{bool(value)}" for name, value in sorted(one.message.items()))
        found.add((one.message["role"], tuple(part for part, _ in groupby(one.parts)), shapes))
    return sorted(found)


def functions(tools: Any) -> list[dict[str, Any]] | None:
    """The functions among the `tools` of a response, as a chat's tools: those that the model is told of, by the names
    that it is told. None if that cannot be said."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return None if tools else []
    out = []
    for tool in tools:
        head, within = (f"{tool.get('name')}__", tool.get("tools")) if tool.get("type") == "namespace" else ("", [tool])
        if not isinstance(within, list) or not all(isinstance(inner, Mapping) for inner in within):
            return None
        for inner in within:
            if inner.get("type") == "function":
                described = {name: inner.get(name) for name in _DESCRIBED}
                optional = {name: inner[name] for name in _OPTIONAL if inner.get(name) is not None}
                function = described | optional | {"name": f"{head}{inner.get('name')}"}
                out.append({"type": "function", "function": function})
    return out


def _as_chat(fields: Mapping[str, Any], tools: Sequence[Any], reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that count here, as a chat would have them, without its messages. Unlike for a chat, vLLM puts the
    tokenizer's own special tokens before a response's prompt, if it has any."""
    text = fields.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    free = not isinstance(form, Mapping) or form.get("type") == "text"
    return {
        "model": fields["model"], "tools": list(tools), "add_special_tokens": True,
        "chat_template_kwargs": fields.get("chat_template_kwargs"), "reasoning_effort": reasoning.get("effort"),
        "tool_choice": fields.get("tool_choice"), "stream": fields.get("stream"),
        "structured_outputs": fields.get("structured_outputs"), "response_format": None if free else form,
        "max_tokens": fields.get("max_output_tokens"),
    }  # fmt: skip


def _name(seed: bytes, response: Any) -> bytes:
    """The digest of a history that is known by the name of its last `response`."""
    return digest(seed, ["response", response])
