"""The items of a response as messages of a chat, which is what vLLM makes of them before a chat template sees them.

So a history that is told in items is known by the same words as one that is told in messages, and the engine can be
asked to render it (``POST /tokenize``). Neighbouring items of the assistant are one message: its reasoning, its text,
and its calls of tools; a second text begins another message.

Invariant: items have messages here only if vLLM reads all of their words in this way. Whether an engine really does is
not taken on trust: `kinds` names what there was to read, so that each of them can be tried once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXTS = ("input_text", "output_text", "text")
_SAID = frozenset(("type", "role", "content", "id", "status"))
_NOTHING: Mapping[str, Any] = {"text": ""}
_UNFINISHED = ("in_progress", "incomplete")
_DESCRIBED = ("name", "description", "parameters", "strict", "defer_loading")
_OPTIONAL = ("strict", "defer_loading")


@dataclass(frozen=True, slots=True)
class Spoken:
    """One `message`, which is the items from `start` up to `end`; ``parts`` are their fields' names in order."""

    message: Mapping[str, Any]
    start: int
    end: int
    parts: tuple[str, ...] = ()


def spoken(items: Sequence[Any]) -> list[Spoken] | None:
    """The messages of `items`; None if there is an item that has none."""
    begun: list[tuple[int, dict[str, Any], list[str]]] = []
    message: dict[str, Any] = {}
    parts: list[str] = []
    for place, item in enumerate(items):
        found = _message(item) if isinstance(item, Mapping) else None
        if found is None:
            return None
        part = "" if found["role"] != "assistant" else next(name for name in found if name != "role")
        if not part or not parts or (part in message and part != "tool_calls"):
            message, parts = found, [part] if part else []
            begun.append((place, message, parts))
            continue
        parts.append(part)
        if part in message:
            message[part] += found[part]  # in place: a list may grow to thousands
        else:
            message[part] = found[part]
    ends = [*(start for start, _, _ in begun[1:]), len(items)]
    return [Spoken(made, start, end, tuple(of)) for (start, made, of), end in zip(begun, ends, strict=False)]


def is_unfinished(items: Sequence[Any]) -> bool:
    """Whether the engine would go on with the last of `items` in place of beginning a new turn."""
    last = items[-1] if items and isinstance(items[-1], Mapping) else {}
    return last.get("status") in _UNFINISHED and last.get("type", "message") in ("message", "reasoning")


def kinds(said: Sequence[Spoken]) -> list[Any]:
    """What kinds of messages there are in `said`, each once: by whom, of which parts, and what of it is empty."""
    found = {(one.message["role"], _runs(one.parts), _shapes(one.message)) for one in said}
    return sorted(found)


def functions(tools: Any) -> list[dict[str, Any]] | None:
    """The functions among the `tools` of a response, as a chat's tools: those that the model is told of, by the names
    that it is told. None where that cannot be said."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return None if tools else []
    out = []
    for tool in tools:
        within = tool.get("tools") if tool.get("type") == "namespace" else [tool]
        if not isinstance(within, list) or not all(isinstance(inner, Mapping) for inner in within):
            return None
        head = f"{tool.get('name')}__" if within is tool.get("tools") else ""
        for inner in within:
            if inner.get("type") == "function":
                told = {
                    name: inner.get(name) for name in _DESCRIBED
                    if name not in _OPTIONAL or inner.get(name) is not None
                }
                out.append({"type": "function", "function": told | {"name": f"{head}{inner.get('name')}"}})
    return out


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """The message that `item` is by itself."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return _call(item)
    if kind == "function_call_output":
        content = _content(item.get("output"))
        told = content is not None and isinstance(item.get("call_id"), str)
        return {"role": "tool", "content": content, "tool_call_id": item["call_id"]} if told else None
    if kind == "reasoning":
        return _reasoning(item)
    role, content = item.get("role"), _content(item.get("content"))
    if kind != "message" or not isinstance(role, str) or content is None:
        return None
    if role == "assistant":
        text = content if isinstance(content, str) else _only(content)
        return None if text is None else {"role": role, "content": text}
    return {"role": role, "content": content} if set(item) <= _SAID else None


def _call(item: Mapping[str, Any]) -> dict[str, Any] | None:
    name, space = item.get("name"), item.get("namespace") or ""
    function = {"name": f"{space}__{name}" if space else name, "arguments": item.get("arguments")}
    if not all(isinstance(text, str) for text in (name, space, item.get("arguments"), item.get("call_id"))):
        return None
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


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
    parts = content if isinstance(content, list) else [None]
    texts = list(_text_parts(parts))
    return texts if texts and len(texts) == len(parts) else None


def _text_parts(parts: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}


def _only(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of the one part there is; of several vLLM reads the first alone."""
    text = parts[0].get("text") if len(parts) == 1 else None
    return text if isinstance(text, str) else None


def _runs(parts: Sequence[str]) -> tuple[str, ...]:
    """`parts` without immediate repetitions."""
    return tuple(part for place, part in enumerate(parts) if place == 0 or part != parts[place - 1])


def _shapes(message: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}:{type(value).__name__}:{bool(value)}" for name, value in sorted(message.items()))
