"""What is recorded of calls is what they have in common, and no more."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.sessions import Call, blocks_of, drawn

CALLS = st.lists(st.integers(0, 2), min_size=1, max_size=8).flatmap(
    lambda tokens: st.integers(1, len(tokens)).map(lambda sampled: (tokens, sampled))
)


def shared(one: Call, other: Call) -> int:
    """With how many equal tokens both begin."""
    pairs = zip(one[0], other[0], strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one[0]), len(other[0])))


@given(st.lists(st.lists(CALLS, max_size=3), max_size=4))
def test_drawn_calls_have_the_lengths_samples_and_common_beginnings_of_the_recorded(episodes: list[list[Call]]) -> None:
    fresh = count()
    again = drawn(blocks_of(episodes), lambda size: [next(fresh) for _ in range(size)])
    assert [len(calls) for calls in again] == [len(calls) for calls in episodes]
    before, after = ([one for calls in mine for one in calls] for mine in (episodes, again))
    assert [len(tokens) for tokens, _ in after] == [len(tokens) for tokens, _ in before]
    assert [sampled for _, sampled in after] == [sampled for _, sampled in before]
    for place, one in enumerate(before):
        assert [shared(after[place], other) for other in after] == [shared(one, other) for other in before]
