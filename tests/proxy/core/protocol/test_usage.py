"""The tokens of answers that nobody parses, found at their end, however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.usage import LAST, Tail

EMBEDDING = json.dumps({
    "object": "list", "data": [{"embedding": [0.25] * 3000, "index": 0}],
    "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0, "prompt_tokens_details": None},
}).encode()  # fmt: skip


def tokens(*pieces: bytes) -> int:
    tail = Tail()
    for piece in pieces:
        tail.feed(piece)
    return tail.tokens()


@given(st.lists(st.integers(min_value=0, max_value=len(EMBEDDING)), max_size=5))
def test_a_document_may_come_in_any_pieces(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(EMBEDDING)]
    assert tokens(*(EMBEDDING[a:b] for a, b in pairwise(places))) == 7


@pytest.mark.parametrize(("usage", "total"), [
    ({"total_tokens": 9, "prompt_tokens": 4}, 9), ({"prompt_tokens": 4, "completion_tokens": 2}, 6),
    ({"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1}}, 8),
    ({"total_tokens": True, "prompt_tokens": "4"}, 0), ({"total_tokens": -5}, 0), ({"total_tokens": 1e9}, 0), ({}, 0),
    ({"total_tokens": 1 << 64, "prompt_tokens": 4}, 4),
])  # fmt: skip
def test_what_is_no_count_is_none(usage: dict[str, object], total: int) -> None:
    assert tokens(json.dumps({"usage": usage}).encode()) == total


def test_the_last_event_of_a_stream_counts() -> None:
    events = [f'data: {{"n": {n}, "usage": {{"total_tokens": {n}}}}}\n\n'.encode() for n in (1, 2, 3)]
    assert tokens(*events, b"data: [DONE]\n\n") == 3
    assert tokens(*events, b'data: {"usage": null}\n\n') == 3
    assert tokens(*events, b'data: {"usage": {"total_tokens": x}}\n\n') == 3


def test_what_an_answer_quotes_is_not_its_usage() -> None:
    quoted = json.dumps({"text": '{"usage": {"total_tokens": 5}}'}).encode()
    assert tokens(quoted) == 0
    assert tokens(b"no JSON", b"\xff\x00") == tokens() == 0
    assert tokens(b'{"usage": {"total_tokens": 5, "deep": ' + b"[" * 1700 + b"]" * 1700 + b"}}") == 0
    assert tokens(b'{"usage": {"total_tokens": 5}}', b" " * LAST) == 0
