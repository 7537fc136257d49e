"""Compares two answers to one request as the agent sees them: all but ids, times and how tokens shared an event.

The engine itself puts one or several tokens in an event, as time allows, so two streams are compared by what they tell:
per choice the joined text, tool calls, ids and logprobs, the end, and every shape of event, key by key and in order. If
one event tells all of a choice, there are none between its first and its last to compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.kit.tapes import steady


def same_answer(seen: bytes, direct: bytes) -> None:
    """Fails unless `seen` is what an agent would have got in place of `direct`."""
    seen, direct = steady(seen), steady(direct)
    if seen == direct:
        return
    assert direct.startswith(b"data: "), f"{seen!r}\nis not\n{direct!r}"
    (ours, *between), (theirs, *as_direct) = told(seen), told(direct)
    alike = all(one == other or not one or not other for one, other in zip(between, as_direct, strict=True))
    assert ours == theirs and alike, f"{seen!r}\nis not\n{direct!r}"


def events(body: bytes) -> Iterator[Any]:
    for event in body.decode().split("\n\n"):
        if event:
            data = event.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def told(body: bytes) -> tuple[Any, set[Any], set[Any]]:
    """A stream without the accident of how many tokens shared an event: per choice the joined text, the tool calls and
    the end, with every shape of event that opened or ended one, key by key; the shapes of all other events; and what
    came in words."""
    choices: dict[int, dict[str, Any]] = {}
    shapes: set[Any] = set()
    between: set[Any] = set()
    words: set[Any] = set()
    tail = []
    for event in events(body):
        if event == "[DONE]" or not event.get("choices"):
            tail.append(event)
            continue
        event.pop("usage", None)
        for choice in event["choices"]:
            blank: dict[str, Any] = {"text": "", "thought": "", "calls": "", "rows": [], "offsets": [], "ids": []}
            known = choices.setdefault(choice["index"], blank)
            delta = choice.get("delta", {})
            known["text"] += delta.get("content") or choice.get("text") or ""
            known["thought"] += delta.get("reasoning") or ""
            known["offsets"] += offsets(choice.get("logprobs"))
            known["rows"] += rows(choice.get("logprobs"))
            known["ids"] += choice.get("token_ids") or []
            for call in delta.get("tool_calls") or ():
                known["calls"] += f"{call.get('type', '')}{call['function'].get('name', '')}"
                known["calls"] += call["function"].get("arguments", "")
            for key in ("finish_reason", "stop_reason"):
                known[key] = choice.get(key)
            opens = "role" in delta
            kept = shapes if opens or choice.get("finish_reason") else between
            (shapes if opens else words).update(("delta", key) for key in delta)
            kept.add((tuple(event), tuple(choice), choice.get("logprobs") is None, choice.get("token_ids") is None))
    return (choices, shapes, tail), between, words


def offsets(logprobs: dict[str, Any] | None) -> list[int]:
    """None where tokens are told as ``token_id:7``: vLLM counts those letters within an event and not from one to the
    next, so that the offsets say which tokens shared an event."""
    if not logprobs or any(token.startswith("token_id:") for token in logprobs.get("tokens", ())):
        return []
    return list(logprobs.get("text_offset", ()))


def rows(logprobs: dict[str, Any] | None) -> list[float]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [row["logprob"] for row in logprobs["content"]]
    return list(logprobs["token_logprobs"])
