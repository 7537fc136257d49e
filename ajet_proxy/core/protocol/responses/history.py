"""The history of a response: its items as messages of a chat, so that they are known by the same fingerprint; or the
response before, if it names one.

At the level of words each item is a message of its own, and reasoning, which not all clients keep, is left out. At the
level of text they are the messages that vLLM makes of them before a chat template sees them. There, neighboring items
of the assistant are one message: its reasoning, its text and its tool calls. A second text begins another one.

Invariant: items have messages at the level of text only if vLLM reads all of their words in this way. Whether an engine
really does is not taken on trust: `outline` names what there was to read, so that each kind can be tried once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ajet_proxy.core.conversation.history import TEXTS, ChatHistory, Mark, keyed, utf8
from ajet_proxy.core.trajectory.call import Captured

_SAID = frozenset(("type", "role", "content", "id", "status"))
_NOTHING: Mapping[str, Any] = {"text": ""}
Message = Mapping[str, Any]


class Spoken(Struct):
    """One `message`, made of the items from `start` up to `end`; ``parts`` are the names of their fields, in order."""

    message: dict[str, Any]
    start: int
    end: int
    parts: list[str]


class ResponseHistory(ChatHistory):
    """The history of a response: that of the `previous` one, if the request names one, else its `items`. `spoken` are
    these as messages, if the engine is known to read them so."""

    def __init__(self, request: Mapping[str, Any], scope: bytes, *, exact: bool) -> None:
        said, instructions = request["input"], request.get("instructions")
        self.items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not isinstance(self.items, list):
            raise TypeError("no list of items")
        self.previous = request.get("previous_response_id")
        both = [messages_of(item) for item in self.items]
        found = merged(text for _, text in both) if exact else None
        self.spoken = found or []
        system = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*system, *(one.message for one in self.spoken)]
        self._begin(request, messages, scope, exact=found is not None)
        for words in (*system, *(words for words, _ in both if words is not None)):
            self._add_words(words)
        for place, message in enumerate(messages):
            self._add_text(place, message)

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        return super().beginnings(lengths) if self.previous is None else iter((self._named(self.previous),))

    def after(self, answer: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        named = (self._named(answer["id"]),)
        said = [words for words, _ in map(messages_of, answer["output"]) if words is not None]
        return named if self.previous is not None else named + self._marks_behind(said)

    @property
    def kind(self) -> str:
        return "messages" if self.previous is None else f"messages behind {self._named(self.previous).key}"

    def _named(self, response: Any) -> Mark:
        return Mark(f"response:{keyed(utf8(str(response)), self._scope)}")


def messages_of(item: Any) -> tuple[Message | None, dict[str, Any] | None]:
    """The message that `item` is by itself. At the level of words: None if it says nothing there, empty if that cannot
    be told. At the level of text: None if it has none."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        return item, _message(item)
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": item}]}, _call(item)
    if kind == "reasoning":
        return None, _reasoning(item)
    if not isinstance(kind, str):
        return {}, None
    if kind.endswith("_call_output"):
        result = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        return result, _result(result) if kind == "function_call_output" else None
    kept = {name: value for name, value in item.items() if name not in ("id", "call_id", "status")}
    return {"role": "assistant" if kind.endswith("_call") else kind, "content": [kept]}, None


def spoken(items: Iterable[Any]) -> list[Spoken] | None:
    """The messages of `items` at the level of text; None if there is an item that has none."""
    return merged(text for _, text in map(messages_of, items))


def merged(messages: Iterable[dict[str, Any] | None]) -> list[Spoken] | None:
    """`spoken` for items whose own messages at the level of text are known."""
    out: list[Spoken] = []
    for place, found in enumerate(messages):
        if found is None:
            return None
        parts = [name for name in found if name != "role"] if found["role"] == "assistant" else []
        last = out[-1] if parts and out and out[-1].parts else None
        if last is None or (parts[0] in last.message and parts[0] != "tool_calls"):
            out.append(Spoken(found, place, place + 1, parts))
            continue
        last.end = place + 1
        last.parts += parts
        if parts[0] in last.message:
            last.message[parts[0]] += found[parts[0]]  # in place: a list may grow to thousands
        else:
            last.message |= found
    return out


def _call(item: Mapping[str, Any]) -> dict[str, Any] | None:
    name, space = item.get("name"), item.get("namespace") or ""
    function = {"name": f"{space}__{name}" if space else name, "arguments": item.get("arguments")}
    if not all(isinstance(text, str) for text in (name, space, item.get("arguments"), item.get("call_id"))):
        return None
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def _result(result: Mapping[str, Any]) -> dict[str, Any] | None:
    content = _content(result["content"])
    return None if content is None or not isinstance(result["tool_call_id"], str) else {**result, "content": content}


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    role, content = item.get("role"), _content(item.get("content"))
    if not isinstance(role, str) or content is None:
        return None
    if role == "assistant":
        text = content if isinstance(content, str) else _only(content)
        return None if text is None else {"role": role, "content": text}
    return {"role": role, "content": content} if set(item) <= _SAID else None


def _reasoning(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of reasoning vLLM reads the content, or else the summary."""
    summary, content = item.get("summary"), item.get("content") or []
    if item.get("encrypted_content") or not isinstance(summary, list) or not isinstance(content, list):
        return None
    text = _only([part if isinstance(part, Mapping) else {} for part in content or summary or [_NOTHING]])
    return None if text is None else {"role": "assistant", "reasoning": text}


def _content(content: Any) -> str | list[dict[str, Any]] | None:
    """A text, or parts that are texts, as a chat writes them."""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content] if isinstance(content, list) else []
    are_texts = [part.get("type") in TEXTS and isinstance(part.get("text"), str) for part in parts]
    return [{"type": "text", "text": part["text"]} for part in parts] if parts and all(are_texts) else None


def _only(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of the one part there is; of several vLLM reads the first alone."""
    text = parts[0].get("text") if len(parts) == 1 else None
    return text if isinstance(text, str) else None
