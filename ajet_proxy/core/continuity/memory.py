"""Recognising history: whether a request goes on from a call of its episode, as text and as structure.

An engine renders history from text on each turn, and what it then reads as tokens can differ from what it once sampled.
Where a request says again exactly what a call was asked and what it answered, its prompt can be that call's own tokens
with the new messages behind them (see `ajet_proxy.core.continuity.splice`). This module says which call that is, or why
there is none, with a word of `OUTCOMES`. Chats are read here, responses in `ajet_proxy.core.continuity.responses`.

Idea: each message is brought to one form in which only text and structure count, and a conversation is known by a chain
of digests, one for each of its beginnings. A call is kept under the digest of its request with its answer behind it, so
that the next request finds it under the digest of its own beginning up to its last assistant message. Fields that can
shape a prompt (`tools`, `chat_template`, and every field that is not known to be harmless) must be the same. Some
clients sign the model's messages with a name, which no answer has: history is found without it, and whoever goes on
from there has to see that the engine does not render the names (`Outline.unsigned`).

Invariant: a call is found only by a request whose messages, up to the last answer and with it, are the call's own. What
follows is new, and not the assistant's.

Next: ajet_proxy/core/continuity/splice.py
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.msgpack import Encoder

from ajet_proxy.core.continuity.splice import NO_JOINT, STOP_TOKEN
from ajet_proxy.core.trajectory.call import Captured

EXACT = "exact"
SAME = "same"
FIRST_TURN = "first_turn"
UNSUPPORTED = "unsupported"
UNKNOWN_HISTORY = "unknown_history"
NOTHING_NEW = "nothing_new"
REQUEST_CHANGED = "request_changed"
REASONING_LEFT_OUT = "reasoning_left_out"
WORDS_LEFT_OUT = "words_left_out"
STOP_STRING = "stop_string"
NOT_RENDERED = "not_rendered"
NOT_PROVEN = "not_proven"
TOO_LONG = "too_long"
ENGINE = "engine"
REASONING_PARSER = "reasoning_parser"
REFUSED = "refused"
IGNORED = "ignored"
OUTCOMES: Mapping[str, str] = {
    EXACT: "sent as the exact ids",
    SAME: "the engine's own rendering already begins with the exact ids, so nothing was altered",
    FIRST_TURN: "the history has no answer",
    UNSUPPORTED: "the request is more than a plain turn: images, echo, truncation, a prefilled answer, ids of its own, "
    "or it asks for its prompt's text, which an engine that was sent ids does not have",
    UNKNOWN_HISTORY: "this episode was not given the last answer in the history, or not after this beginning",
    NOTHING_NEW: "nothing follows the last answer",
    REQUEST_CHANGED: "a field that can shape the prompt, such as tools, differs from the turn before",
    REASONING_LEFT_OUT: "the history lacks the reasoning that the client was given with the answer",
    WORDS_LEFT_OUT: "the history lacks what the model said with a tool call",
    STOP_STRING: "the answer before was cut at a stop string, so its tokens say more than its text",
    NOT_RENDERED: "the engine did not render the conversation when it was asked to",
    NOT_PROVEN: "the engine's /tokenize does not render what the chat route was seen to read",
    NO_JOINT: "the template's text between two turns could not be told apart",
    STOP_TOKEN: "the template ends an answer in another way than the engine did, as after a cut tool call",
    TOO_LONG: "the exact prompt and the answer do not fit into the model's context",
    REASONING_PARSER: "the engine's reasoning parser would read the answer differently",
    ENGINE: "the engine does not take prompt ids on this route",
    REFUSED: "the engine refused the exact ids, and answered the plain request",
    IGNORED: "the engine was sent exact ids and reported others",
}
"""What can become of a turn's continuity, with what each word means."""

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


class Known(Struct, frozen=True):
    """A call that the history of a later request may end with. ``lacks`` is the word for what of its answer is not told
    there, empty if it is whole; ``ended`` is how its text came to an end: by a stop token, at the length limit, at a
    stop string; or with a call of a tool, which may be by a stop token or at the limit."""

    call: str
    shape: bytes
    lacks: str
    ended: str


class Sought(NamedTuple):
    """What a request is recognised by: ``end`` is the digest of its history up to its last answer and with it, if there
    is one; ``goes_on`` says whether anything follows; ``shape`` stands for all else that may shape the prompt."""

    shape: bytes
    end: bytes | None
    goes_on: bool


class Outline(Struct, frozen=True):
    """A request by its digests: ``beginnings[k]`` stands for its first k messages, ``sought`` for the call that it goes
    on from. ``answer`` is the place of its last assistant message."""

    fields: Mapping[str, Any]
    beginnings: tuple[bytes, ...]
    answer: int | None
    sought: Sought

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
        return self.rendering(self.fields["messages"])

    def question(self) -> dict[str, Any]:
        """A request of one token on the chat route, whose answer tells how the engine renders this one there."""
        shaping = {name: value for name, value in self.fields.items() if name not in HARMLESS or name in _ASKED}
        return shaping | _ONE

    @property
    def kind(self) -> bytes:
        """What the requests have in common of which it is enough to see once how the engine renders them."""
        return self.sought.shape

    @property
    def signed(self) -> bool:
        """Whether an assistant's message has a name, which is not among its words here."""
        return any(_unsigned(message) != message for message in self.fields["messages"])

    def unsigned(self) -> dict[str, Any]:
        """`whole` without the assistant's names."""
        return self.rendering([_unsigned(message) for message in self.fields["messages"]])

    def asked_before(self) -> dict[str, Any]:
        """`rendering` of what the call that gave the last answer was asked."""
        return self.rendering(self.fields["messages"][: self.answer])

    def with_answer(self, text: str) -> dict[str, Any]:
        """`rendering` with `text` in place of the last answer."""
        messages = list(self.fields["messages"])
        assert self.answer is not None
        messages[self.answer] = {"role": "assistant", "content": text}
        return self.rendering(messages)

    @property
    def reasoned(self) -> bool:
        """Whether an answer in the history came with reasoning."""
        messages = self.fields["messages"]
        return any(message.get("reasoning") or message.get("reasoning_content") for message in messages)

    @property
    def heeds_reasoning(self) -> bool:
        """Whether the answer may depend on where the engine sees reasoning in the prompt. It does in a stream and under
        a grammar; only answers that came with reasoning put any there."""
        forced = self.fields.get("tool_choice") not in (None, "auto", "none")
        return self.reasoned and (forced or any(self.fields.get(name) for name in _HEEDING))

    def first_word(self, token: int, ids: Sequence[int] | None) -> dict[str, Any]:
        """A request for a stream of the one `token` behind this conversation, or behind `ids`."""
        body = self.whole() | {"stream": True, "max_tokens": 1, "allowed_token_ids": [token]}
        return body if ids is None else body | {FIELD: {"prompt_token_ids": list(ids)}}

    def ends(self, answer: Mapping[str, Any]) -> Iterator[tuple[bytes, str]]:
        """The digests by which a history that ends with the message `answer` may be known, and what it then lacks."""
        message = normal({**answer, "role": "assistant"})
        yield digest(self.beginnings[-1], message), ""
        if message.pop("reasoning", None):
            yield digest(self.beginnings[-1], message), REASONING_LEFT_OUT
        if message.get("tool_calls") and message.pop("content", None):
            yield digest(self.beginnings[-1], message), WORDS_LEFT_OUT

    def called(self, answer: Mapping[str, Any]) -> bool:
        """Whether `answer` calls tools."""
        return bool(answer.get("tool_calls"))

    @property
    def room(self) -> int:
        """The tokens that the answer may have, at the least."""
        limit = self.fields.get("max_completion_tokens") or self.fields.get("max_tokens")
        return limit if isinstance(limit, int) else 1


def outline(fields: Mapping[str, Any], *, episode: str, model: str, agent: str) -> Outline | None:
    """The outline of a chat request in its engine's form; None where its prompt is more than its messages."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return None
    if any(map(fields.get, _BEYOND)) or fields.get("add_generation_prompt") is False:
        return None
    try:
        digests = beginnings(digest(b"", [episode, model, agent]), messages)
        shape = shape_of(fields, HARMLESS)
    except RecursionError:
        return None
    answer = last_answer(messages)
    return Outline(
        fields={**fields, "model": model}, beginnings=digests, answer=answer,
        sought=Sought(shape, None if answer is None else digests[answer + 1], answer != len(messages) - 1),
    )


def beginnings(nothing: bytes, messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """The digests of the beginnings of `messages`, that of none of them being `nothing`."""
    digests = [nothing]
    for message in messages:
        digests.append(digest(digests[-1], normal(_unsigned(message))))
    return tuple(digests)


def shape_of(fields: Mapping[str, Any], harmless: frozenset[str]) -> bytes:
    """The digest of what is in `fields` but for the `harmless` ones."""
    shape = [[name, value] for name, value in sorted(fields.items()) if name not in harmless and value is not None]
    return digest(b"", shape)


def last_answer(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The place of the assistant's last message."""
    return max((place for place, message in enumerate(messages) if message.get("role") == "assistant"), default=None)


_packed, _packed_in_order = Encoder().encode, Encoder(order="sorted").encode
_written_in_order = json.JSONEncoder(sort_keys=True).encode


class Memory:
    """The answers that were given, each under the digest of the conversation that ends with it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._ends: dict[str, list[bytes]] = {}
        """What was remembered of each call, though another one's answer may have taken its place since."""

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, ends: Iterable[tuple[bytes, str]], shape: bytes, call: str, ended: str) -> None:
        """`call` was answered; `ends` and `shape` are those of its outline. Of two answers with the same words the
        later one counts, but one that is told whole is not hidden by one that is not."""
        for end, lacks in ends:
            if not lacks or (other := self._known.get(end)) is None or other.lacks:
                self._put(end, Known(call, shape, lacks, ended))

    def recall(self, sought: Sought) -> Known | str:
        """The call that a request goes on from, or the word for why there is none."""
        if sought.end is None:
            return FIRST_TURN
        known = self._known.get(sought.end)
        if known is None:
            return UNKNOWN_HISTORY
        if not sought.goes_on:
            return NOTHING_NEW
        if known.shape != sought.shape:
            return REQUEST_CHANGED
        if known.lacks:
            return known.lacks
        return STOP_STRING if known.ended == "string" else known

    def forget(self, calls: Iterable[str]) -> None:
        """Nothing goes on from `calls` any more."""
        for call in calls:
            for digest in self._ends.pop(call, ()):
                known = self._known.get(digest)
                if known is not None and known.call == call:
                    del self._known[digest]

    def _put(self, digest: bytes, known: Known) -> None:
        self._known[digest] = known
        self._known.move_to_end(digest)
        self._ends.setdefault(known.call, []).append(digest)
        if len(self._known) > self._capacity:
            _, oldest = self._known.popitem(last=False)
            self._ends.pop(oldest.call, None)


def trial(model: str, ids: Sequence[int]) -> dict[str, Any]:
    """A chat request whose answer shows by its one token whether the engine reads the `ids` that it is given."""
    asked = {"model": model, "messages": [{"role": "user", "content": "?"}]}
    return asked | {FIELD: {"prompt_token_ids": list(ids)}} | _ONE


def heard_as(stream: bytes) -> str | None:
    """As what the first word of a chat `stream` came, ``reasoning`` or ``content``; None if there is none."""
    for line in stream.splitlines():
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            delta = json.loads(line.removeprefix(b"data:"))["choices"][0]["delta"]
            for name in ("reasoning", "content"):
                if delta.get(name):
                    return name
    return None


def ended(captured: Captured, called: bool) -> str:
    """How a choice came to its end, as `Known` tells it. The finish reason does not say it of one that `called` tools:
    vLLM has ``tool_calls`` for some that were cut."""
    if captured.stop_string is not None:
        return "string"
    if called:
        return "call"
    return "length" if captured.finish_reason == "length" else "token"


def normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """`message` with everything taken out that is neither text nor structure: what is null or empty is as good as
    missing, one text part is its text, arguments of a call are what they say as JSON, a call's place in the list is not
    told twice, and reasoning goes by one name."""
    out = dict(message)
    other = out.pop("reasoning_content", None)
    out["reasoning"] = out.get("reasoning") or other
    if not isinstance(content := out.get("content"), str):
        out["content"] = _text(content)
    if isinstance(calls := out.get("tool_calls"), list):
        out["tool_calls"] = [_call(call) for call in calls]
    return {
        name: kept for name, value in out.items()
        if value is not None and (kept := _pruned(value)) is not None
    }


def _unsigned(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") != "assistant":
        return message
    return {name: value for name, value in message.items() if name != "name"}


def _text(content: Any) -> Any:
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in parts
    ]
    return texts[0] if len(texts) == 1 else texts


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    with suppress(ValueError, TypeError, RecursionError):  # arguments that are no JSON are compared as they are
        function["arguments"] = ["json", json.loads(function.get("arguments") or "{}")]
    kind = call.get("type")
    return {**call, "function": function, "index": None, "type": None if kind == "function" else kind}


def _pruned(value: Any) -> Any:
    """`value` without what is null or empty; None where nothing is left."""
    if isinstance(value, dict):
        value = {name: kept for name, item in value.items() if (kept := _pruned(item)) is not None}
    return value if value or (value is not None and value not in ("", {}, [])) else None


def digest(before: bytes, value: Any) -> bytes:
    """Of what came `before` and of `value`, a dict in any order of its names; a list has dicts in the order they have.
    """
    in_order = isinstance(value, dict)
    try:
        written = (_packed_in_order if in_order else _packed)(value)
    except (UnicodeEncodeError, OverflowError):  # half a character, or a number of more than 64 bits
        written = (_written_in_order if in_order else json.dumps)(value).encode()
    return hashlib.blake2b(before + written, digest_size=16).digest()
