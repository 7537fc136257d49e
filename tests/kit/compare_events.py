"""Compares two answers with named events (``/v1/messages``, ``/v1/responses``) as the agent sees them: all but ids,
times, signatures and what was cached.

In a stream, how many tokens share an event is the engine's whim, so deltas that follow one another in one block are
compared as one, and of their logprobs only whether there were any. Everything else is compared event by event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.kit.tapes import steady

_DRAWN = (
    (re.compile(rb'"signature":"[0-9a-f]{32}"'), b'"signature":""'),
    (re.compile(rb'"(cached_tokens|cache_\w+_tokens)":\d+'), rb'"\1":0'),
)
_TEXTS = ("text", "thinking", "partial_json")


def same_answer(seen: bytes, direct: bytes) -> None:
    """Fails unless `seen` is what an agent would have got in place of `direct`."""
    seen, direct = _made_equal(seen), _made_equal(direct)
    if seen == direct:
        return
    assert direct.startswith(b"event: "), f"{seen!r}\nis not\n{direct!r}"
    assert list(told(seen)) == list(told(direct))


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The payload of each event; every event must bear the name that its payload tells, and the number if it does."""
    for number, event in enumerate(body.decode().split("\n\n")[:-1]):
        name, data = event.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert (name, payload.get("sequence_number", number)) == (f"event: {payload['type']}", number)
        yield payload


def told(body: bytes) -> Iterator[list[Any]]:
    """The events without their numbers, in order and name by name, pieces of one text as one."""
    before, said = None, ""
    for event in events(body):
        event.pop("sequence_number", None)
        shape, text = _parted(event)
        if before is not None and (text is None or shape != before):
            yield [*before.items(), said]
            before, said = None, ""
        if text is None:
            yield list(event.items())
        else:
            before, said = shape, said + text
    assert before is None, "a stream does not end in the middle of a block"


def _parted(event: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """An event without its piece of text, and that piece."""
    delta = event.get("delta")
    if isinstance(delta, str):
        return event | {"delta": ""} | ({"logprobs": bool(event["logprobs"])} if "logprobs" in event else {}), delta
    name = next((name for name in _TEXTS if name in (delta or {})), None)
    return (event, None) if delta is None or name is None else (event | {"delta": delta | {name: ""}}, delta[name])


def final(body: bytes) -> Any:
    """The response object that a document or a stream ends with."""
    return list(events(body))[-1]["response"] if body.startswith(b"event: ") else json.loads(body)


def _made_equal(body: bytes) -> bytes:
    body = steady(body)
    for pattern, replacement in _DRAWN:
        body = pattern.sub(replacement, body)
    return body
