"""The comparison of two streams sees what an agent sees, and not how many tokens shared an event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit.compare import same_answer


def stream(*choices: dict[str, Any]) -> bytes:
    events = [{"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, **one}]} for one in choices]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


OPENS = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
SAYS = {"delta": {"content": "he"}, "finish_reason": None, "token_ids": None}
ENDS = {"delta": {"content": "l"}, "finish_reason": "stop", "token_ids": None}
ALL = {"delta": {"content": "hel"}, "finish_reason": "stop", "token_ids": None}


def test_tokens_may_share_an_event() -> None:
    same_answer(stream(OPENS, ALL), stream(OPENS, SAYS, ENDS))
    same_answer(stream(OPENS, ALL), stream(OPENS, SAYS, SAYS | {"delta": {"content": "l"}}, ENDS | {"delta": {}}))
    letters = [SAYS | {"delta": {"content": letter}} for letter in "he"]
    same_answer(stream(OPENS, SAYS, ENDS), stream(OPENS, *letters, ENDS))


@pytest.mark.parametrize("seen", [
    stream(OPENS, SAYS, ENDS | {"delta": {"content": "x"}}),
    stream(OPENS, {key: SAYS[key] for key in ("delta", "finish_reason")}, ENDS),
    stream(OPENS, SAYS | {"token_ids": [1]}, ENDS),
    stream(OPENS, SAYS, {**ENDS, "stop_reason": "lo"}),
    stream(SAYS, ENDS),
])  # fmt: skip
def test_anything_else_is_seen(seen: bytes) -> None:
    with pytest.raises(AssertionError):
        same_answer(seen, stream(OPENS, SAYS, ENDS))
