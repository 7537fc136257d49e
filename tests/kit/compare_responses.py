"""Whether two answers of ``/v1/responses`` are the same to the agent: all but ids, times and what was cached.

In a stream, how many tokens share an event is the engine's whim, so deltas that follow one another are compared as one,
and of their logprobs only whether there were any; the last event tells the whole, and is compared as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.kit.tapes import steady

_CACHE = re.compile(rb'"(cached_tokens|cache_write_tokens)":\d+')


def same_answer(seen: bytes, direct: bytes) -> None:
    """Fails unless `seen` is what an agent would have got in place of `direct`."""
    seen, direct = (_CACHE.sub(rb'"\1":0', steady(body)) for body in (seen, direct))
    if seen == direct:
        return
    assert direct.startswith(b"event: "), f"{seen!r}\nis not\n{direct!r}"
    assert list(told(seen)) == list(told(direct))


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The payload of each event; every event must bear the name that its payload tells."""
    for number, event in enumerate(body.decode().split("\n\n")[:-1]):
        name, data = event.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert (name, payload["sequence_number"]) == (f"event: {payload['type']}", number)
        yield payload


def told(body: bytes) -> Iterator[Any]:
    """The events without their numbers, in order and name by name, pieces of one text as one."""
    piece: dict[str, Any] = {}
    for event in events(body):
        event.pop("sequence_number")
        if event["type"].endswith(".delta"):
            if "logprobs" in event:
                event["logprobs"] = bool(event["logprobs"])
            said = piece.get("delta", "") + event["delta"]
            if piece and piece | {"delta": ""} != event | {"delta": ""}:
                yield list(piece.items())
                said = event["delta"]
            piece = event | {"delta": said}
            continue
        if piece:
            yield list(piece.items())
            piece = {}
        yield list(event.items())


def final(body: bytes) -> Any:
    """The response object that a document or a stream ends with."""
    return list(events(body))[-1]["response"] if body.startswith(b"event: ") else json.loads(body)
