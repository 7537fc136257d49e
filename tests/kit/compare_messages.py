"""Whether two answers of ``/v1/messages`` are the same to the agent: all but ids, signatures and what was cached.

In a stream, how many tokens share an event is the engine's whim, so deltas that follow one another in one block are
compared as one, and everything else event by event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.kit.tapes import steady

_DRAWN = (
    (re.compile(rb'"signature":"[0-9a-f]{32}"'), b'"signature":""'),
    (re.compile(rb'"(cache_\w+_input_tokens)":\d+'), rb'"\1":0'),
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
    """The payload of each event; every event must bear the name that its payload tells."""
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        yield payload


def told(body: bytes) -> Iterator[list[Any]]:
    """The events in order and name by name, pieces of one text as one."""
    piece: tuple[dict[str, Any], str] | None = None
    for event in events(body):
        delta = event.get("delta", {})
        name = next((name for name in _TEXTS if name in delta), None)
        said = piece[1] if piece else ""
        shape = event | {"delta": delta | {name: ""}} if name else {}
        if piece and piece[0] != shape:
            yield [*piece[0].items(), said]
            piece, said = None, ""
        if name:
            piece = (shape, said + delta[name])
        else:
            yield list(event.items())
    assert piece is None, "a stream does not end in the middle of a block"


def _made_equal(body: bytes) -> bytes:
    body = steady(body)
    for pattern, replacement in _DRAWN:
        body = pattern.sub(replacement, body)
    return body
