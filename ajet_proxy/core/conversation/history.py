"""What a request says came before it: how a call is known to continue an earlier one by its words alone.

Idea: after a call, the history that its client keeps ends in a `Mark`, a digest of everything asked and answered so
far. A later request continues the call if its own history begins with exactly that. A chat's history is its messages,
one after another; that of a response is its items, or the response before, where it names one; a text prompt's is its
text; a token prompt's is its ids. Digests are keyed by whoever asks (`scope`), so that equal histories of two clients
have nothing in common, and no words are kept.

What clients change in passing does not count: space around a text, thoughts in ``<think>`` tags, how the arguments of
a tool call are written, the ids of tool calls, and in a system prompt the billing line of Claude Code, which can differ
from request to request. The ids are digested apart, as ``firm``: engines draw them at random, so they tell twins apart
whose words are equal. All of this says which episode a call belongs to and nothing else: whether a timeline goes on,
and what of it is trained, is decided by token ids.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.call import Captured

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SIZE = 12
"""Bytes of a digest."""
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, struct.error, RecursionError)
_BILLING = re.compile(r"^x-anthropic-billing-header[^\n]*\n*", re.MULTILINE)
_ROLES = {"developer": "system", "function": "tool"}
_in_order = json.JSONEncoder(sort_keys=True).encode
_TEXTS = ("text", "input_text", "output_text")


class Mark(NamedTuple):
    """Where a history ends. ``length`` is that of a text in bytes; 0 for messages, which need none to be found."""

    key: str
    length: int = 0
    firm: str = ""


class Beginnings(Protocol):
    """What came before a request."""

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        """The marks that may stand at a beginning of this history, the longest first; `lengths` are those there are."""

    def told(self) -> tuple[Any, ...]:
        """What another process needs to find them, for `retold`."""


class History(Beginnings, Protocol):
    """The history of one request."""

    def after(self, given: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        """The marks behind the answer `given`, which is `captured` in tokens if those are known."""


def retold(told: Sequence[Any]) -> Beginnings:
    """What was `told`."""
    kind, what, scope = told
    return _Text(kind, what, scope) if kind else _Told(tuple(Mark(*mark) for mark in what))


def read(route: str, request: Mapping[str, Any], scope: bytes) -> History | None:
    """The history in a `request` to an engine's `route`; None if there is none that a later request could continue.

    `scope` has at most 64 bytes.
    """
    try:
        if route == CHAT:
            return _Messages(request["messages"], scope)
        if route == RESPONSES:
            return _Response(request, scope)
        if route == COMPLETIONS:
            prompt = request["prompt"]
            return _Text("text", _utf8(prompt), scope) if isinstance(prompt, str) else _Text(
                "ids", pack_tokens(prompt), scope
            )
    except _MALFORMED:
        return None  # it is the engine's to refuse
    return None


class Deferred:
    """What `read` makes of its arguments, once it is asked for."""

    __slots__ = ("_arguments", "_history")

    def __init__(self, route: str, request: Mapping[str, Any], scope: bytes) -> None:
        self._arguments: tuple[str, Mapping[str, Any], bytes] | None = (route, request, scope)
        self._history: History | None = None

    def __call__(self) -> History | None:
        if self._arguments is not None:
            self._history, self._arguments = read(*self._arguments), None
        return self._history


def marks_of(history: History | None, given: Mapping[str, Any] | None, captured: Captured | None) -> tuple[Mark, ...]:
    """The marks behind an answer, if that and the history before it can be told."""
    try:
        return () if history is None or given is None else history.after(given, captured)
    except _MALFORMED:
        return ()


class _Told:
    def __init__(self, marks: tuple[Mark, ...]) -> None:
        self._marks = marks

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        return iter(self._marks)

    def told(self) -> tuple[Any, ...]:
        return "", self._marks, b""


class _Said:
    """The digests of messages: of what they say, and of the ids that they bear."""

    __slots__ = ("_firm", "_loose")

    def __init__(self, loose: blake2b, firm: blake2b) -> None:
        self._loose, self._firm = loose, firm

    def copy(self) -> _Said:
        return _Said(self._loose.copy(), self._firm.copy())

    def add(self, message: Mapping[str, Any]) -> None:
        self._loose.update(_words(message))
        self._firm.update(_ids(message))

    def mark(self) -> Mark:
        return Mark(f"chat:{self._loose.hexdigest()}", firm=self._firm.hexdigest())


class _Messages:
    def __init__(self, messages: Iterable[Mapping[str, Any]], scope: bytes) -> None:
        self._so_far = _Said(blake2b(key=scope, digest_size=SIZE), blake2b(key=scope, digest_size=SIZE))
        self._beginnings: list[Mark] = []
        for message in messages:
            self._so_far.add(message)
            if message["role"] == "assistant":
                self._beginnings.append(self._so_far.mark())

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        return reversed(self._beginnings)

    def after(self, given: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        return self._behind([{**given, "role": "assistant"}])

    def told(self) -> tuple[Any, ...]:
        return _Told(tuple(self.beginnings(()))).told()

    def _behind(self, messages: Iterable[Mapping[str, Any]]) -> tuple[Mark, ...]:
        """The mark behind `messages` that follow this history."""
        longer = self._so_far.copy()
        for message in messages:
            longer.add(message)
        return (longer.mark(),)


class _Response(_Messages):
    """A response goes on from the one before that it names, or from the items that it says again."""

    def __init__(self, request: Mapping[str, Any], scope: bytes) -> None:
        self._scope = scope
        self._previous = request.get("previous_response_id")
        given = request["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        system = {"role": "system", "content": request.get("instructions")}
        super().__init__([system, *_said(items)], scope)

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        return super().beginnings(lengths) if self._previous is None else iter((self._named(self._previous),))

    def after(self, given: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        named = (self._named(given["id"]),)
        return named if self._previous is not None else named + self._behind(_said(given["output"]))

    def _named(self, response: Any) -> Mark:
        return Mark(f"response:{blake2b(_utf8(str(response)), key=self._scope, digest_size=SIZE).hexdigest()}")


def _said(items: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Items of a response as messages of a chat; reasoning, which not all clients keep, is left out."""
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            yield item
        elif kind == "function_call":
            yield {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": item}]}
        elif kind.endswith("_call_output"):
            yield {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        elif kind != "reasoning":
            kept = {name: value for name, value in item.items() if name not in ("id", "call_id", "status")}
            yield {"role": "assistant" if kind.endswith("_call") else kind, "content": [kept]}


def _words(message: Mapping[str, Any]) -> bytes:
    """What `message` says, whoever wrote it down."""
    role = _ROLES.get(message["role"], message["role"])
    text = _text(message.get("content"))
    if role == "assistant":
        text = text.rpartition("</think>")[2].partition("<think>")[0]
    elif role == "system":
        text = _BILLING.sub("", text)
    said = [role, text.strip()]
    for function in _functions(message):
        said += (function["name"], _arguments(function.get("arguments")))
    return _framed(said)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        part["text"] if part.get("type") in _TEXTS else _in_order(part) for part in content
    )


def _functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [*calls, message["function_call"]] if message.get("function_call") else calls


def _arguments(written: Any) -> str:
    """The arguments of a tool call, however they are written."""
    try:
        meant = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        return str(written).strip()
    return _in_order(meant)


def _ids(message: Mapping[str, Any]) -> bytes:
    calls = [call.get("id") for call in message.get("tool_calls") or ()]
    return _framed([str(given) for given in (*calls, message.get("tool_call_id")) if given])


def _framed(parts: Iterable[str]) -> bytes:
    """`parts` so that no other parts make the same bytes."""
    raw = [_utf8(part) for part in parts]
    return b"%d;%b" % (len(raw), b"".join([b"%d:%b" % (len(part), part) for part in raw]))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Text:
    """A prompt that is one text, or one list of token ids."""

    def __init__(self, kind: str, prompt: bytes, scope: bytes) -> None:
        self._kind = kind
        self._prompt = prompt
        self._scope = scope

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        digest, at, found = blake2b(key=self._scope, digest_size=SIZE), 0, []
        for length in sorted(length for length in lengths if 0 < length <= len(self._prompt)):
            digest.update(self._prompt[at:length])
            at = length
            found.append(Mark(f"{self._kind}:{digest.hexdigest()}", length))
        return reversed(found)

    def after(self, given: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        """A prompt that was answered with nothing can only come again, and so is no mark."""
        ends = {}
        if captured is not None and captured.token_ids:
            ends["ids"] = pack_tokens(captured.prompt_token_ids) + pack_tokens(captured.token_ids)
        if self._kind == "text" and given.get("text"):
            ends["text"] = self._prompt + _utf8(given["text"])
        return tuple(
            Mark(f"{kind}:{blake2b(end, key=self._scope, digest_size=SIZE).hexdigest()}", len(end))
            for kind, end in ends.items()
        )

    def told(self) -> tuple[Any, ...]:
        return self._kind, self._prompt, self._scope
