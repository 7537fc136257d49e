"""Timelines of one text become one: laws 1, 3, 4 and 6 hold, and the text is the one that was read."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.repair import COMPARED, join, replaced, with_same_text
from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_proxy.core.trajectory.timeline import merge
from ajet_sdk.sample import Call
from tests.kit.engine_tokens import IM_END, WORDS, decode, encode
from tests.kit.strategies import make_call, tangled_calls
from tests.proxy.core.trajectory.test_samples import check_masks


def text(_model: str, ids: tuple[int, ...]) -> str:
    return decode(ids, skip_chat_marks=False)


@st.composite
def drifting(draw: st.DrawFn) -> list[Call]:
    """The turns of one conversation; the engine reads some of its history as other tokens than it sampled."""
    calls: list[Call] = []
    history: list[int] = []
    for index in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            history = encode(text("m", tuple(history)), merged=True)
        history += encode(" ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=2))))
        sampled = [*encode("".join(draw(st.lists(st.sampled_from((*WORDS, " ", "x")), max_size=3)))), IM_END]
        calls.append(make_call(f"c{index}", history, sampled, at=float(index)))
        history = [*history, *sampled]
    return calls


@given(drifting(), st.randoms(use_true_random=False))
def test_a_conversation_is_one_sample_of_its_text_whatever_was_read(calls: list[Call], dice: random.Random) -> None:
    strict = merge_calls(calls)
    shuffled = [*calls]
    dice.shuffle(shuffled)
    (sample,) = merge_calls(with_same_text(shuffled, text), "repair")
    check_masks((sample,), calls)
    assert sample.calls == tuple(call.call for call in calls)
    assert text("m", sample.token_ids) == text("m", (*calls[-1].prompt_token_ids, *calls[-1].token_ids))
    assert sample.broken_by is None
    assert (sample.repaired_tokens == 0) == (len(strict) == 1)
    assert merge_calls(with_same_text(calls, text)) == strict, "what is known of texts counts for repair alone"
    assert len(merge_calls(with_same_text(calls, text), "off")) == len(calls)


@given(tangled_calls(), st.data())
def test_whatever_calls_say_each_sampled_token_counts_once(calls: list[Call], data: st.DataObject) -> None:
    names = st.sampled_from([*(call.call for call in calls), "nobody"])
    said = [replace(call, same_text=data.draw(st.none() | st.tuples(names, st.integers(1, 6)))) for call in calls]
    samples = merge_calls(said, "repair")
    check_masks(samples, calls)
    assert samples == merge_calls(said[::-1], "repair")
    assert len(samples) <= len(merge_calls(calls))


def joined(*calls: Call) -> list[tuple[tuple[str, ...], tuple[int, ...], int, str | None]]:
    return [(s.calls, s.token_ids, s.repaired_tokens, s.broken_by) for s in merge_calls(calls, "repair")]


FIRST = make_call("a", (1,), (2, 3), at=1.0)
SECOND = replace(make_call("b", (1, 9, 4), (5,), at=2.0), same_text=("a", 2))


def test_what_was_sampled_stays_and_what_was_read_in_its_place_is_counted() -> None:
    assert joined(FIRST, SECOND) == [(("a", "b"), (1, 2, 3, 4, 5), 1, None)]
    (timeline,) = join(merge((FIRST, SECOND), "repair"))
    assert [(turn.start, turn.end) for turn in timeline.turns] == [(1, 3), (4, 5)]


def test_a_difference_is_counted_once_and_later_ones_besides() -> None:
    """The third call read the first answer as the second did, and the second's otherwise."""
    third = replace(make_call("c", (1, 9, 4, 8, 6), (7,), at=3.0), same_text=("b", 4))
    assert joined(FIRST, SECOND, third) == [(("a", "b", "c"), (1, 2, 3, 4, 5, 6, 7), 2, None)]


@pytest.mark.parametrize(
    "second",
    [
        replace(SECOND, same_text=("z", 2)), replace(SECOND, same_text=("a", 4)), replace(SECOND, same_text=("b", 2)),
        replace(SECOND, agent="other"), replace(SECOND, model="other"),
    ],
    ids=["unknown", "longer than its prompt", "itself", "another agent", "another model"],
)
def test_what_does_not_fit_joins_nothing(second: Call) -> None:
    assert len(joined(FIRST, second)) == 2


def test_only_the_last_call_of_a_timeline_is_gone_on_from_and_only_once() -> None:
    later = replace(make_call("c", (1, 8, 4), (6,), at=3.0), same_text=("a", 2))
    assert [item[0] for item in joined(FIRST, SECOND, later)] == [("a", "b"), ("c",)]
    goes_on = make_call("x", (1, 2, 3, 4), (7,), at=1.5)
    assert [item[0] for item in joined(FIRST, goes_on, SECOND)] == [("a", "x"), ("b",)]


def test_calls_that_say_to_follow_each_other_are_no_circle() -> None:
    one = replace(make_call("a", (1, 2), (3,), at=1.0), same_text=("b", 1))
    other = replace(make_call("b", (1, 9), (4,), at=2.0), same_text=("a", 1))
    assert [item[0] for item in joined(one, other)] == [("b", "a")]


@given(*[st.lists(st.integers(0, 3), max_size=8)] * 2)
def test_no_more_tokens_stand_in_both_in_one_order(read: list[int], kept: list[int]) -> None:
    def is_in(few: Sequence[int], many: Iterable[int]) -> bool:
        rest = iter(many)
        return all(token in rest for token in few)

    best = max(n for n in range(len(read) + 1) if any(is_in(few, kept) for few in combinations(read, n)))
    assert replaced(pack_tokens(read), pack_tokens(kept)) == (len(read) - best or len(kept) - best)


def test_an_answer_that_repeats_itself_is_counted_within_moments() -> None:
    read, kept = [1, 2, 3, 5] * (COMPARED // 4), [4, 3, 6, 5] * (COMPARED // 4)
    assert replaced(pack_tokens(read), pack_tokens(kept)) == len(read) // 2


def test_a_long_stretch_counts_whole() -> None:
    read = [7, *[1] * COMPARED, 7]
    assert replaced(pack_tokens(read), pack_tokens([8, *[1] * COMPARED, 8])) == len(read)
