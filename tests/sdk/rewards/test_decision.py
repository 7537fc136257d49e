"""The fate of an episode: the laws behind the guide's table, whose rows are played in `test_played`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.rewards.decision import (
    UNREWARDED,
    Earns,
    Ended,
    Fails,
    Given,
    Said,
    Stands,
    decide,
    decided,
    given_to,
    lost_to_the_world,
    unanswered_in,
)
from tests.kit.source import ROOT
from tests.kit.who_failed import PAGE, page_table

LOST = "the model never answered (engine_error)"
ENDS = (None, Fails("exit code 75", world=True), Fails("ValueError: no"))
NOTHING_SAID = (None, Fails("nothing printed"), Fails("the grader failed", world=True))
VALUES = st.floats(allow_nan=False, allow_infinity=False)


def every_source(value: float) -> Iterator[Said]:
    yield Earns(value)
    yield Earns(value, fallback=True)


@given(VALUES, VALUES)
def test_no_decision_whether_an_episode_counts_looks_at_its_reward(one: float, other: float) -> None:
    for was, unanswered, ended in product(Given, (None, LOST), ENDS):
        for first, second in zip(every_source(one), every_source(other), strict=True):
            decided, otherwise = (decide(was, unanswered, ended, said) for said in (first, second))
            assert type(decided) is type(otherwise)
            if isinstance(decided, Earns):
                assert (decided, otherwise) == (first, second)
            else:
                assert decided == otherwise


def everything() -> Iterator[tuple[Given, str | None, Fails | None, Said | None]]:
    yield from product(Given, (None, LOST), ENDS, (*NOTHING_SAID, *every_source(1.0)))


def test_a_failure_of_the_world_is_never_trained_as_the_policys() -> None:
    for was, unanswered, ended, said in everything():
        world = unanswered or (ended and ended.world) or (isinstance(said, Fails) and said.world)
        decided = decide(was, unanswered, ended, said)
        if world and was is Given.NOTHING:
            assert isinstance(decided, Fails) and decided.world
        if world:
            assert not isinstance(decided, Earns)
        else:
            assert not isinstance(decided, Fails) or not decided.world


def test_a_reward_that_somebody_gave_stands() -> None:
    for unanswered, ended in product((None, LOST), ENDS):
        assert decide(Given.FINAL, unanswered, ended) == Stands()
        assert decide(Given.FINAL, unanswered, ended, Earns(0.0, fallback=True)) == Stands()
    for said in (Earns(1.0), *NOTHING_SAID):
        assert decide(Given.FINAL, LOST, None, said) == Stands()
    for unanswered in (None, LOST):
        assert decide(Given.STEPS, unanswered, None, Earns(0.0, fallback=True)) == Stands()
        assert decide(Given.STEPS, unanswered) == Stands()


def test_what_has_ended_stays_as_it_is() -> None:
    for _, unanswered, ended, said in everything():
        assert decide(Given.END, unanswered, ended, said) == Stands()


def test_a_judgement_stands_for_a_reward_that_is_lacking_and_changes_nothing_else() -> None:
    for was, unanswered, ended, said in everything():
        plain = decide(was, unanswered, ended, said)
        assert decide(was, unanswered, ended, said, judged=True) == (Stands() if plain == Fails(UNREWARDED) else plain)


def test_steps_alone_are_no_reward_of_an_agent_that_gave_up() -> None:
    """Nor where the final one is to come from elsewhere."""
    for ended in ENDS[1:]:
        assert decide(Given.STEPS, LOST, ended) == Fails(f"{ended.reason}; {LOST}", world=True)
    assert decide(Given.STEPS, None, ENDS[2]) == Fails("ValueError: no")
    assert decide(Given.STEPS, LOST, None, Earns(1.0)) == Fails(LOST, world=True)


def test_where_nothing_failed_the_source_has_its_word() -> None:
    for was in (Given.NOTHING, Given.STEPS, Given.FINAL):
        assert decide(was, None, None, Earns(0.5)) == Earns(0.5)
        silent = decide(was, None, None, Fails("nothing printed"))
        assert silent == (Stands() if was is Given.FINAL else Fails("nothing printed"))
    assert decide(Given.NOTHING, None, None, Earns(0.0, fallback=True)) == Earns(0.0, fallback=True)
    assert decide(Given.NOTHING, None) == Fails("left without a reward")
    assert decide(Given.NOTHING, None, ENDS[1], Earns(1.0)) == ENDS[1]


def test_the_words_of_a_failure_of_the_world() -> None:
    def lost(*reasons: str) -> dict[str, Any]:
        return {"unanswered": [{"at": 1.0, "reason": reason} for reason in reasons]}

    assert unanswered_in({}) is None and unanswered_in(lost()) is None
    assert unanswered_in(lost("held", "held", "refused")) == "the model never answered (held, refused)"
    assert unanswered_in(lost(*"abcd")) == "the model never answered (a, b, c and others)"
    told = {"unanswered": [{"reason": "refused", "detail": "the engine answered 404"}]}
    assert unanswered_in(told) == "the model never answered (refused: the engine answered 404)"
    failed = Fails("the grader failed", world=True)
    assert decide(Given.NOTHING, LOST, None, failed) == Fails(f"the grader failed; {LOST}", world=True)


@pytest.mark.parametrize(
    ("record", "was"),
    [
        ({"state": "open"}, Given.NOTHING), ({"state": "open", "rewards": []}, Given.NOTHING),
        ({"state": "open", "rewards": [{"value": 0.0, "final": False}]}, Given.STEPS),
        ({"state": "open", "rewards": [{"value": 0.0, "final": False}, {"value": 0.0, "final": True}]}, Given.FINAL),
        *(({"state": state}, Given.FINAL) for state in ("sealed", "ready", "leased", "trained", "recorded")),
        ({"state": "discarded", "rewards": [{}]}, Given.END),
    ],
)  # fmt: skip
def test_what_was_given(record: dict[str, Any], was: Given) -> None:
    assert given_to(record) is was


@pytest.mark.parametrize(
    ("record", "world"),
    [
        ({"reason": "aborted"}, False), ({"reason": "aborted", "cause": "infra"}, True),
        ({"reason": "aborted", "unanswered": [{}]}, False), ({"reason": "client_gone"}, True),
        ({"reason": "wall_timeout"}, False), ({"reason": "wall_timeout", "unanswered": [{}]}, True),
        ({"reason": "incomplete_call", "unanswered": [{}]}, True), ({"reason": "incomplete_call"}, False),
    ],
)  # fmt: skip
def test_whose_failure_it_is_that_an_episode_was_discarded(record: dict[str, Any], world: bool) -> None:
    assert lost_to_the_world(record) is world


def test_who_gave_up() -> None:
    assert [Ended(code=code, graded=graded).gave_up for code, graded in ((0, None), (1, -9), (None, 1))] == [None] * 3
    assert Ended(code=0, graded=75).gave_up == Ended(code=75).gave_up == Fails("exit code 75", world=True)
    assert Ended(error=ValueError("no")).gave_up == Fails("ValueError: no")
    assert Ended(error=ValueError("no"), infra=(ValueError,)).gave_up == Fails("ValueError: no", world=True)


def test_a_source_sees_how_the_episode_was_played_and_is_not_asked_of_one_that_was_given_up() -> None:
    def judge(ended: Ended) -> Said:
        return Earns(float(len(ended.record["calls"])))

    record = {"state": "open", "calls": [{}, {}]}
    assert decided(judge, Ended(record)) == Earns(2.0)
    assert decided(judge, Ended({"state": "open"}, code=75)) == Fails("exit code 75", world=True)
    lost = {**record, "unanswered": [{"reason": "engine_error"}]}
    assert decided(judge, Ended(lost), "exit code 3") == Fails(f"exit code 3; {LOST}", world=True)


def test_the_page_has_the_table() -> None:
    assert page_table() in (ROOT / PAGE).read_text()
