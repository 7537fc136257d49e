"""Recognizing history: whether a request continues a call of its episode, as text and as structure.

An engine renders history from text on each turn, and the tokens that it then reads can differ from what was sampled. A
request may repeat exactly what a call was asked and what it answered. Then its prompt can be that call's own tokens,
followed by the new messages (see `ajet_proxy.core.continuity.splice`). This module says which call that is, or why
there is none, with a word of `Outcome`. Chats are outlined here. A dialect may outline its turns itself.

Idea: a history is known by its fingerprint (`ajet_proxy.core.conversation.history`) at the level of text. A call is
kept under the digest of its request and its answer. The next request is looked up by the digest of its own beginning,
up to and with its last assistant message. Fields that can shape a prompt (`tools`, `chat_template`, and every field
that is not known to be harmless) must be the same. Some clients sign the model's messages with a name, which no answer
has. History is found without it, so the caller must see that the engine does not render names (`Outline.unsigned`).

Invariant: a call is found only by a request whose messages, up to and with the last answer, are the call's own. What
follows is new, and not the assistant's.

Next: ajet_proxy/core/continuity/splice.py
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, NamedTuple

from msgspec import Struct

from ajet_proxy.core.conversation.history import MALFORMED, ChatHistory, packed, text_of
from ajet_proxy.core.tokens import are_tokens
from ajet_proxy.core.trajectory.call import Captured

Outcome = Literal[
    "exact", "same", "first_turn", "unsupported", "unknown_history", "nothing_new", "request_changed",
    "reasoning_left_out", "words_left_out", "stop_string", "not_rendered", "not_proven", "no_joint", "stop_token",
    "too_long", "reasoning_parser", "engine", "refused", "ignored",
]
"""All that can become of a turn's continuity. What each word means: docs/explain/continuity.md, in this order."""
CAPACITY = 100_000
"""Answers remembered; the oldest are forgotten first, and their next turns go out as they are."""
HARMLESS = frozenset((
    "model", "messages", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "seed", "stop", "stream", "stream_options", "temperature",
    "top_p", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
    "logprob_token_ids", "allowed_token_ids", "bad_words", "structured_outputs", "priority", "request_id",
    "session_id", "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text", "cache_salt", "vllm_xargs",
    "repetition_detection", "stream_interval", "thinking_token_budget", "include_reasoning", "parallel_tool_calls",
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
))  # fmt: skip
_BEYOND = (
    "echo", "continue_final_message", "truncate_prompt_tokens", "kv_transfer_params", "ec_transfer_params",
    "mm_processor_kwargs", "media_io_kwargs", "use_beam_search", "prompt_embeds", "return_prompt_text",
)  # fmt: skip
_ASKED = ("model", "messages", "cache_salt")
_HEEDING = ("stream", "structured_outputs", "response_format")
_TOLD_TO_TOKENIZE = ("model", "tools", "chat_template", "add_special_tokens")
_ONE = {"max_tokens": 1, "return_token_ids": True}
FIELD = "kv_transfer_params"
"""Where vLLM's routes take prompt ids, under ``prompt_token_ids``, in place of its own rendering."""


class Known(Struct, frozen=True, gc=False):
    """A call that the history of a later request may end with. ``lacks`` is the word for what that history leaves out
    of the answer; None if the answer is whole. ``ended`` says how its text ended: at a stop token (``token``), the
    length limit (``length``) or a stop string (``string``). It is ``call`` for any answer with a tool call."""

    call: str
    shape: bytes
    lacks: Outcome | None
    ended: str


class Sought(NamedTuple):
    """The marks by which a request is recognized. ``end`` is the digest of its history up to and with its last answer;
    None if there is none. ``goes_on`` says whether anything follows. ``shape`` stands for all else that may shape the
    prompt."""

    shape: bytes
    end: bytes | None
    goes_on: bool


class Outline(Struct, frozen=True):
    """A chat request that may continue an earlier call. ``fields`` are those of the chat. ``seed`` tells the calls of
    its episode, model and agent from all others. ``sought`` is what the earlier call is found by. ``by_name`` says that
    its history is only named, so that nobody but the engine knows its words."""

    fields: Mapping[str, Any]
    history: ChatHistory
    seed: bytes
    sought: Sought
    by_name: bool = False
    route_tells: ClassVar[bool] = False
    """True if its route tells the whole prompt. Of a chat's, it only shows whom to believe."""

    @property
    def kind(self) -> bytes:
        """A digest that requests have in common if it is enough to see once how the engine renders them."""
        return self.sought.shape

    def rendering(self, messages: Sequence[Any]) -> dict[str, Any]:
        """The body that asks the engine's ``/tokenize`` to render `messages` as it would render this request."""
        body = {name: self.fields[name] for name in _TOLD_TO_TOKENIZE if self.fields.get(name)}
        kwargs = dict(self.fields.get("chat_template_kwargs") or {})
        for name in ("documents", "reasoning_effort"):
            if self.fields.get(name) is not None:
                kwargs[name] = self.fields[name]
        if self.fields.get("reasoning_effort") is not None:
            kwargs.setdefault("enable_thinking", self.fields["reasoning_effort"] != "none")  # as vLLM does
        return body | ({"chat_template_kwargs": kwargs} if kwargs else {}) | {"messages": list(messages)}

    def whole(self) -> dict[str, Any]:
        """`rendering` of all messages."""
        return self.rendering(self.history.messages)

    def question(self) -> dict[str, Any]:
        """A request for one token on the chat route, whose answer tells how the engine renders this request there."""
        shaping = {name: value for name, value in self.fields.items() if name not in HARMLESS or name in _ASKED}
        return shaping | _ONE

    def question_with_answer(self, text: str) -> dict[str, Any]:
        """`question` with `text` in place of the last answer."""
        return self.question() | {"messages": self.with_answer(text)["messages"]}

    def unsigned(self) -> dict[str, Any] | None:
        """`whole` without the names on the assistant's messages, which are not part of their text here; None if there
        are none."""
        messages = [_unsigned(message) for message in self.history.messages]
        return None if messages == list(self.history.messages) else self.rendering(messages)

    def asked_before(self) -> dict[str, Any]:
        """`rendering` of the messages before the last answer: what its call was asked."""
        return self.rendering(self.history.messages[: self.history.answer])

    def with_answer(self, text: str) -> dict[str, Any]:
        """`rendering` with `text` in place of the last answer."""
        messages, place = list(self.history.messages), self.history.answer
        assert place is not None
        messages[place] = {"role": "assistant", "content": text}
        return self.rendering(messages)

    @property
    def heeds_reasoning(self) -> bool:
        """Tell whether the answer may depend on where the engine sees reasoning in the prompt. It does in a stream and
        under a grammar. Only answers that came with reasoning, or may have, put any there."""
        forced = self.fields.get("tool_choice") not in (None, "auto", "none")
        heeding, messages = forced or any(map(self.fields.get, _HEEDING)), self.history.messages
        return heeding and (
            self.by_name or any(one.get("reasoning") or one.get("reasoning_content") for one in messages)
        )

    def first_word(self, token: int, ids: Sequence[int] | None) -> dict[str, Any]:
        """A request that streams the one `token` after this conversation, or after `ids`."""
        body = self.whole() | {"stream": True, "max_tokens": 1, "allowed_token_ids": [token]}
        return body if ids is None else body | {FIELD: {"prompt_token_ids": list(ids)}}

    def ends(self, answer: Mapping[str, Any]) -> Iterator[tuple[bytes, Outcome | None]]:
        """The digests by which a history that ends with the message `answer` may be known, and what it then lacks."""
        message = text_of({**answer, "role": "assistant"})
        yield digest(self.seed, self.history.text(message)), None
        if message.pop("reasoning", None):
            yield digest(self.seed, self.history.text(message)), "reasoning_left_out"
        if message.get("tool_calls") and message.pop("content", None):
            yield digest(self.seed, self.history.text(message)), "words_left_out"

    def called(self, answer: Mapping[str, Any]) -> bool:
        """Tell whether `answer` calls tools."""
        return bool(answer.get("tool_calls"))

    @property
    def answer_tokens(self) -> int:
        """The length limit of the answer in tokens; 1 if the request sets none."""
        limit = self.fields.get("max_completion_tokens") or self.fields.get("max_tokens")
        return limit if isinstance(limit, int) else 1

    @staticmethod
    def trial(model: str, ids: Sequence[int]) -> dict[str, Any]:
        """A request for one token, whose answer shows whether the engine reads the `ids` that it is given."""
        asked = {"model": model, "messages": [{"role": "user", "content": "?"}]}
        return asked | {FIELD: {"prompt_token_ids": list(ids)}} | _ONE

    @staticmethod
    def prompt_in(answer: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The prompt ids that an unstreamed `answer` reports, if it does."""
        ids: Any = answer.get("prompt_token_ids")
        return tuple(ids) if are_tokens(ids) else None

    @classmethod
    def heard_as(cls, stream: bytes) -> str | None:
        """Tell whether the first word of a `stream` came as ``reasoning`` or as ``content``; None if there is none."""
        for line in stream.splitlines():
            with suppress(*MALFORMED):
                delta = cls.delta_in(json.loads(line.removeprefix(b"data:")))
                for name in ("reasoning", "content"):
                    if delta.get(name):
                        return name
        return None

    @staticmethod
    def delta_in(event: Any) -> Mapping[str, Any]:
        """The words in an `event` of a stream, by what they are; a `MALFORMED` error if it has none."""
        delta: Mapping[str, Any] = event["choices"][0]["delta"]
        return delta


def outline(fields: Mapping[str, Any], history: ChatHistory, *, episode: str, model: str, agent: str) -> Outline | None:
    """The outline of a chat request in its engine's form; None if its prompt is more than its messages."""
    if any(map(fields.get, _BEYOND)) or fields.get("add_generation_prompt") is False:
        return None
    seed = digest(b"", [episode, model, agent])
    sought = sought_by(fields, HARMLESS, history, seed)
    return None if sought is None else Outline({**fields, "model": model}, history, seed, sought)


def sought_by(
    fields: Mapping[str, Any], harmless: frozenset[str], history: ChatHistory, seed: bytes
) -> Sought | None:
    """The marks of a request with these `fields`; None if that cannot be told."""
    if not history.exact:
        return None
    try:
        shape = shape_of(fields, harmless)
    except RecursionError:
        return None
    end = None if history.answer is None else digest(seed, history.answer_text)
    return Sought(shape, end, history.answer != len(history.messages) - 1)


def shape_of(fields: Mapping[str, Any], harmless: frozenset[str]) -> bytes:
    """The digest of everything in `fields` except the `harmless` ones."""
    shape = [[name, value] for name, value in sorted(fields.items()) if name not in harmless and value is not None]
    return digest(b"", shape)


def digest(before: bytes, value: Any) -> bytes:
    """The digest of what came `before` together with `value`."""
    return hashlib.blake2b(before + packed(value), digest_size=16).digest()


def _unsigned(message: Mapping[str, Any]) -> Mapping[str, Any]:
    signed = message.get("role") == "assistant" and "name" in message
    return {name: value for name, value in message.items() if name != "name"} if signed else message


class Memory:
    """The answers that were given, each under the digest of the conversation that ends with it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._ends: dict[str, list[bytes]] = {}
        """The digests remembered of each call, though another one's answer may have taken its place since."""

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, ends: Iterable[tuple[bytes, Outcome | None]], shape: bytes, call: str, ended: str) -> None:
        """`call` was answered; `ends` and `shape` are those of its outline. Of two answers with the same words the
        later one counts. But an answer that is told whole is not hidden by one that is not."""
        for end, lacks in ends:
            if not lacks or (other := self._known.get(end)) is None or other.lacks:
                self._known[end] = Known(call, shape, lacks, ended)
                self._known.move_to_end(end)
                self._ends.setdefault(call, []).append(end)
                if len(self._known) > self._capacity:
                    _, oldest = self._known.popitem(last=False)
                    self._ends.pop(oldest.call, None)

    def recall(self, sought: Sought) -> Known | Outcome:
        """The call that a request continues, or the word for why there is none."""
        if sought.end is None:
            return "first_turn"
        known = self._known.get(sought.end)
        if known is None:
            return "unknown_history"
        if not sought.goes_on:
            return "nothing_new"
        if known.shape != sought.shape:
            return "request_changed"
        if known.lacks:
            return known.lacks
        return "stop_string" if known.ended == "string" else known

    def forget(self, calls: Iterable[str]) -> None:
        """From now on no request continues `calls`."""
        for call in calls:
            for end in self._ends.pop(call, ()):
                known = self._known.get(end)
                if known is not None and known.call == call:
                    del self._known[end]


def ended(captured: Captured, called: bool) -> str:
    """Tell how a choice ended, in the words of `Known`. If the choice `called` tools, its finish reason does not tell:
    vLLM says ``tool_calls`` for some that were cut."""
    if captured.stop_string is not None:
        return "string"
    if called:
        return "call"
    return "length" if captured.finish_reason == "length" else "token"
