"""Recognising history on ``/v1/responses``: the outline of a request whose history is told in items, or by a name.

Items are known by the messages that the engine makes of them (see `ajet_proxy.core.continuity.items`). A streamed
answer is told twice, in events and whole at the end, and vLLM gives its calls other ids there; the client may have kept
either, so an answer is known by both. A request with ``previous_response_id`` says nothing of its history again and
goes on from the very response that it names, with its reasoning and its calls, under the same instructions.

How the engine renders such a request can be asked in two ways: on ``/tokenize``, with the messages, or on the route
itself, where `Responding.question` has it generate one token and tell its prompt. The first is cheaper, the second true
of every engine and the only one for a history that is named. Whoever asks tries once for each `kind` of request whether
the two agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ajet_proxy.core.continuity.items import Spoken, functions, is_unfinished, kinds, spoken
from ajet_proxy.core.continuity.memory import (
    FIELD,
    HARMLESS,
    Outline,
    Sought,
    beginnings,
    digest,
    last_answer,
    shape_of,
)
from ajet_proxy.core.tokens import are_tokens

ROUTE = "/v1/responses"
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
"""What an answer of one given word must be free of."""
_SURELY = 100
"""The bias under which a token is sampled, whatever the model thinks of it."""


class Responding(Outline, frozen=True):
    """An `Outline` whose ``fields`` are those of the chat that the engine makes of the request ``asked``. ``items`` are
    its input, which ``said`` is in messages, with the last answer at ``last``, if there is one. ``named`` is whether
    the history is that of the response that the request names; ``seed`` tells this client's responses from another's.
    """

    asked: Mapping[str, Any]
    items: list[Any]
    said: Sequence[Spoken]
    last: int | None
    named: bool
    seed: bytes

    def ends(self, answer: Mapping[str, Any]) -> Iterator[tuple[bytes, str]]:
        """The digests of the histories that end with `answer`, which is as `Reader.answers` tells it."""
        if self.asked.get("store") is not False:
            yield _name(self.seed, answer["id"]), ""
        for output in () if self.named else (answer.get("shown"), answer["output"]):
            messages = spoken(output) if isinstance(output, list) else None
            if messages is not None and len(messages) == 1 and messages[0].message["role"] == "assistant":
                yield from Outline.ends(self, messages[0].message)

    def called(self, answer: Mapping[str, Any]) -> bool:
        output = answer["output"] if isinstance(answer["output"], list) else []
        return any(isinstance(item, Mapping) and item.get("type") == "function_call" for item in output)

    @property
    def kind(self) -> bytes:
        """What may shape the prompt, but for the words of the instructions, and the kinds of messages there are."""
        shape = shape_of(self.asked, _HARMLESS | {"instructions"})
        return digest(shape, [bool(self.asked.get("instructions")), kinds(self.said)])

    @property
    def reasoned(self) -> bool:
        """Whether an answer in the history came with reasoning, or may have."""
        return self.named or any(message.get("reasoning") for message in self.fields["messages"])

    def question(self) -> dict[str, Any]:
        """A request of one token on the client's own route, whose answer tells how the engine renders this one."""
        return {name: value for name, value in self.asked.items() if name not in _NOT_ASKED} | _ONE

    def question_with_answer(self, text: str) -> dict[str, Any]:
        """`question` with `text` in place of the last answer. What comes before an answer that is only named is not
        known, and some other question stands there."""
        mark = {"type": "message", "role": "assistant", "content": text}
        before, after = [{"type": "message", "role": "user", "content": "?"}], self.items
        if self.last is not None:
            answer = self.said[self.last]
            before, after = self.items[: answer.start], self.items[answer.end :]
        return self.question() | {"input": [*before, mark, *after], "previous_response_id": None}

    def first_word(self, token: int, ids: Sequence[int] | None) -> dict[str, Any]:
        """A request for a stream of the one `token` behind this conversation, or behind `ids`."""
        body = self.question() | _FREE | {"stream": True, "logit_bias": {str(token): _SURELY}}
        return body if ids is None else body | {FIELD: {"prompt_token_ids": list(ids)}}


def outline(fields: Mapping[str, Any], *, episode: str, model: str, agent: str) -> Responding | None:
    """The outline of a request to ``/v1/responses``; None where its prompt is more than its items."""
    told = fields.get("input")
    items = [{"type": "message", "role": "user", "content": told}] if isinstance(told, str) else told
    tools, reasoning = functions(fields.get("tools")), fields.get("reasoning") or {}
    if not isinstance(items, list) or is_unfinished(items) or tools is None or not isinstance(reasoning, Mapping):
        return None
    if any(map(fields.get, _BEYOND)) or fields.get("truncation") not in (None, "disabled"):
        return None
    said, previous = spoken(items), fields.get("previous_response_id")
    if said is None or not isinstance(previous, str | None):
        return None
    if previous is not None and last_answer([one.message for one in said]) is not None:
        return None
    instructions = fields.get("instructions")
    head = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*head, *(one.message for one in said)]
    seed = digest(b"", [episode, model, agent])
    try:
        digests = beginnings(seed, messages)
        shape = shape_of(fields, _HARMLESS)
    except RecursionError:
        return None
    answer = last_answer(messages)
    last = None if answer is None else answer - len(head)
    end = _name(seed, previous) if previous is not None else None if answer is None else digests[answer + 1]
    return Responding(
        fields=_as_chat(fields, messages, tools, reasoning) | {"model": model}, beginnings=digests, answer=answer,
        sought=Sought(shape, end, goes_on=last != len(said) - 1), asked={**fields, "model": model}, items=items,
        said=said, last=last, named=previous is not None, seed=seed,
    )


def trial(model: str, ids: Sequence[int]) -> dict[str, Any]:
    """A request whose answer shows whether the engine reads the `ids` that it is given."""
    return {"model": model, "input": "?", FIELD: {"prompt_token_ids": list(ids)}} | _ONE


def prompt_told(answer: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The prompt that an `answer` in one piece tells, asked with ``enable_response_messages``."""
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        [message] = answer["input_messages"]
        if are_tokens(message["tokens"]):
            return tuple(message["tokens"])
    return None


def heard_as(stream: bytes) -> str | None:
    """As what the first word of a `stream` came, ``reasoning`` or ``content``; None if there is none."""
    for line in stream.splitlines():
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            event = json.loads(line.removeprefix(b"data:"))
            if event["delta"] and event["type"] in _HEARD:
                return _HEARD[event["type"]]
    return None


_HEARD = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "content"}


def _as_chat(
    fields: Mapping[str, Any], messages: Sequence[Any], tools: Sequence[Any], reasoning: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that a chat with these messages would have, of those that count here. Unlike a chat, vLLM puts the
    tokenizer's own special tokens before a response's prompt, if it has any."""
    text = fields.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    free = not isinstance(form, Mapping) or form.get("type") == "text"
    return {
        "messages": list(messages), "tools": list(tools), "add_special_tokens": True,
        "chat_template_kwargs": fields.get("chat_template_kwargs"), "reasoning_effort": reasoning.get("effort"),
        "tool_choice": fields.get("tool_choice"), "stream": fields.get("stream"),
        "structured_outputs": fields.get("structured_outputs"), "response_format": None if free else form,
        "max_tokens": fields.get("max_output_tokens"),
    }  # fmt: skip


def _name(seed: bytes, response: Any) -> bytes:
    """The digest of a history that is known by the name of its last `response`."""
    return digest(seed, ["response", response])
