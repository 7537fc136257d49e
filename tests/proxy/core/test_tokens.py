"""Token texts against plain lists."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ajet_proxy.core.tokens import (
    are_tokens,
    common_prefix,
    count,
    cut,
    find,
    is_long,
    pack_tokens,
    stands_at,
    unpack_tokens,
)

ids = st.lists(st.one_of(st.integers(0, 3), st.integers(-(2**31), 2**31 - 1)), max_size=40)
few = st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=12)
"""Ids whose bytes look alike when read at the wrong offset."""


def test_what_can_be_packed_is_told_from_what_cannot() -> None:
    for good in ([], [0], [5, 2**31 - 1]):
        assert are_tokens(good) and unpack_tokens(pack_tokens(good)) == tuple(good)
    for bad in (None, 7, "x", (1,), [-1], [2**31], [True], [1.0], ["1"], ["\ud83d"], [None], [[1]]):
        assert not are_tokens(bad)


@given(ids)
def test_what_is_packed_comes_back(values: list[int]) -> None:
    text = pack_tokens(values)
    assert unpack_tokens(text) == tuple(values)
    assert count(text) == len(values)
    assert is_long(text, len(values)) and not is_long(text, len(values) + 1) and not is_long(text + b"x", len(values))


@given(ids, st.integers(0, 45), st.integers(0, 45))
def test_cut_is_a_slice(values: list[int], start: int, end: int) -> None:
    assert unpack_tokens(cut(pack_tokens(values), start, end)) == tuple(values[start:end])


parts = st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=3)


@given(few, parts, st.integers(0, 12), st.integers(0, 12))
@example([256, 0, 1], [1], 0, 3)
def test_find_finds_whole_tokens_only(values: list[int], part: list[int], start: int, end: int) -> None:
    places = [at for at in range(start, min(end, len(values)) - len(part) + 1) if values[at : at + len(part)] == part]
    assert find(pack_tokens(values), pack_tokens(part), start, end) == (places[0] if places else -1)


@given(few, parts, st.integers(0, 12))
def test_what_stands_at_a_position(values: list[int], part: list[int], at: int) -> None:
    assert stands_at(pack_tokens(values), pack_tokens(part), at) == (values[at : at + len(part)] == part)


@given(few, few, few)
def test_common_prefix_is_the_longest(head: list[int], a: list[int], b: list[int]) -> None:
    a, b = head + a, head + b
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(pack_tokens(a), pack_tokens(b)) == expected
