"""The exact prompt: history token for token, then what the engine writes behind an answer; else a word why not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.continuity.splice import begins_with, joined

STOP, START = 100, 101
MARK = (7, 8, 9, 10)
ASKED = (START, 1, 1, STOP, START)
words = st.lists(st.integers(0, 6), max_size=6).map(tuple)


def exact(
    sampled: tuple[int, ...], said: tuple[int, ...], tail: tuple[int, ...], *, ended: str = "token",
    placeholder: tuple[int, ...] = MARK, marked: tuple[int, ...] | None = None,
) -> tuple[int, ...] | str:
    """The prompt behind `sampled`, which the template writes as `said`."""
    return joined(
        history=(*ASKED, *sampled), ended=ended, rendered=(*ASKED, *said, *tail), placeholder=placeholder,
        marked=(*ASKED, *MARK, *tail) if marked is None else marked,
    )  # fmt: skip


@given(sampled=words, said=words, between=words, new=words)
def test_the_prompt_is_the_history_with_the_templates_tail(
    sampled: tuple[int, ...], said: tuple[int, ...], between: tuple[int, ...], new: tuple[int, ...]
) -> None:
    tail = (STOP, *between, START, *new, START)
    prompt = exact((*sampled, STOP), said, tail)
    assert prompt == (*ASKED, *sampled, *tail)
    assert not isinstance(prompt, str)
    assert begins_with(prompt, (*ASKED, *sampled, STOP))


@given(sampled=words.filter(bool), said=words, new=words)
def test_an_answer_that_was_cut_at_its_limit_gets_the_whole_tail(
    sampled: tuple[int, ...], said: tuple[int, ...], new: tuple[int, ...]
) -> None:
    for tail in ((STOP, *new, START), (sampled[-1], *new, START)):
        assert exact(sampled, said, tail, ended="length") == (*ASKED, *sampled, *tail)


@given(sampled=words, said=words, new=words, before=words)
def test_a_call_that_was_cut_goes_on_only_behind_the_token_that_closes_it(
    sampled: tuple[int, ...], said: tuple[int, ...], new: tuple[int, ...], before: tuple[int, ...]
) -> None:
    closing, tail = 60, (STOP, *new, START)
    written = (*said, *before, closing)
    assert exact((*sampled, closing), written, tail, ended="call") == (*ASKED, *sampled, closing, *tail)
    assert exact((*sampled, closing, STOP), written, tail, ended="call") == (*ASKED, *sampled, closing, *tail)
    assert exact((*sampled, 50), written, tail, ended="call") == "stop_token"
    assert exact((*sampled, closing), written, tail) == "stop_token"


def test_a_rendering_that_is_all_tail_closes_no_call() -> None:
    tail = (STOP, 3, START)
    told = {"ended": "call", "rendered": tail, "marked": (*MARK, *tail), "placeholder": MARK}
    assert joined(history=(1, 60), **told) == "stop_token"  # type: ignore[arg-type]


def test_another_stop_token_than_the_templates_is_not_joined() -> None:
    assert exact((1, 2, 50), (1, 2), (STOP, 3, START)) == "stop_token"


def test_the_first_half_of_the_mark_may_merge_with_what_stands_before_it() -> None:
    tail = (STOP, 3, START)
    assert exact((1, STOP), (1,), tail, marked=(*ASKED, 55, *MARK[2:], *tail)) == (*ASKED, 1, *tail)


def test_what_cannot_be_told_apart_is_no_joint() -> None:
    tail = (STOP, 3, START)
    merged = (*ASKED, *MARK[:3], 77, 3, START)
    assert exact((1, STOP), (1,), tail, marked=merged) == "no_joint"
    twice = (*ASKED, *MARK, *tail, *MARK, STOP)
    assert exact((1, STOP), (1,), tail, marked=twice) == "no_joint"
    other = (*ASKED, *MARK, STOP, 4, START)
    assert exact((1, STOP), (1,), tail, marked=other) == "no_joint"
    assert exact((1, STOP), (1,), tail, marked=(*ASKED, *MARK)) == "no_joint"
    assert exact((1, STOP), (1,), tail, placeholder=()) == "no_joint"


def test_a_prompt_begins_with_its_history_or_does_not() -> None:
    assert begins_with([1, 2, 3], (1, 2))
    assert begins_with((1, 2), [1, 2])
    assert not begins_with((1, 3), (1, 2))
    assert not begins_with((1,), (1, 2))
