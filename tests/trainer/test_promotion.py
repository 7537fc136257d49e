"""Which candidates may serve: the decision alone, and how often it is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ajet_trainer.promotion import decide


def played(*rewards: float | None, tokens: float = 10.0, task: str = "") -> list[dict[str, Any]]:
    """An evaluation in which each reward is that of a task of its own, unless all are of one `task`."""
    return [{"task": task or f"t{place}", "reward": reward, "tokens": tokens} for place, reward in enumerate(rewards)]


SIMULATED, TASKS = 2000, 128
"""Evaluations, and the tasks of each."""


@pytest.mark.parametrize(("change", "least", "most"), [
    (-0.20, 0.0, 0.01), (-0.10, 0.0, 0.12), (0.0, 0.65, 1.0), (0.10, 0.95, 1.0),
])  # fmt: skip
def test_a_worse_candidate_is_seldom_promoted_and_a_better_one_almost_always(
    change: float, least: float, most: float
) -> None:
    """Rewards are 0 or 1. Some tasks are harder than others, for the candidate too. What serves has a mean of 0.5."""
    chance = random.Random(f"of the gate {change}")

    def evaluated() -> bool:
        levels = [chance.betavariate(2, 2) for _ in range(TASKS)]
        others = [1 - (1 - one) * (1 - 2 * change) if change > 0 else one * (1 + 2 * change) for one in levels]
        ours, theirs = ([float(chance.random() < one) for one in each] for each in (others, levels))
        found = decide(played(*ours), played(*theirs), 0.1)
        return found is not None and found.promoted

    share = sum(evaluated() for _ in range(SIMULATED)) / SIMULATED
    assert least <= share <= most


def test_the_lower_end_of_the_interval_is_what_counts() -> None:
    incumbent = played(*[0.0, 1.0] * 50)
    found = decide(played(*[0.0, 1.0] * 49, 0.0, 0.0), incumbent, 0.1)
    assert found is not None and found.promoted and found.pairs == 100
    assert found.difference == pytest.approx(-0.01) and found.lowest == pytest.approx(-0.01 - 1.2816 * 0.01, abs=1e-4)
    assert decide(played(*[0.0, 1.0] * 49, 0.0, 0.0), incumbent, 0.02) == found._replace(promoted=False)


@pytest.mark.parametrize(("tokens", "promoted"), [
    (4.9, False), (5.0, True), (20.0, True), (20.1, False), (0.0, False),
])  # fmt: skip
def test_answers_of_another_length_are_not_promoted_however_good_they_are(tokens: float, promoted: bool) -> None:
    found = decide(played(1.0, 1.0, 1.0, tokens=tokens), played(0.0, 0.0, 0.0), 0.1)
    assert found is not None and found.promoted is promoted


def test_who_said_nothing_before_may_go_on_so_and_not_begin_to_speak() -> None:
    found = [decide(played(0.0, 0.0, tokens=tokens), played(0.0, 0.0, tokens=0.0), 0.1) for tokens in (0.0, 5.0)]
    assert [one is not None and one.promoted for one in found] == [True, False]


def test_pairs_are_of_one_task_in_whatever_order_it_was_played() -> None:
    candidate, incumbent = played(0.0, 0.25, 0.5, 0.75), played(0.0, 0.25, 0.5, 0.75)
    found = decide(candidate, incumbent[::-1], 0.1)
    assert found is not None and (found.difference, found.lowest, found.pairs) == (0.0, 0.0, 4)
    again = decide(played(1.0, 0.0, task="t"), played(1.0, 0.0, task="t"), 0.1)
    assert again is not None and again.lowest == 0.0, "the first of a task goes with the first"


@pytest.mark.parametrize(("candidate", "incumbent"), [
    (played(1.0), played(1.0)),
    (played(1.0, 1.0, 1.0, 1.0, 1.0), played(0.0, 0.0)),
    (played(1.0, None, None, 1.0, 1.0), played(1.0, 1.0, 1.0, None, 1.0)),
    (played(1.0, 1.0, task="a"), played(1.0, 1.0, task="b")),
], ids=["one pair", "tasks that the other did not play", "without rewards", "other tasks"])  # fmt: skip
def test_too_few_pairs_decide_nothing(candidate: Sequence[Any], incumbent: Sequence[Any]) -> None:
    assert decide(candidate, incumbent, 0.1) is None


@pytest.mark.parametrize(("rewarded", "beside", "promoted"), [
    (18, 20, True), (17, 20, False), (2, 20, False), (0, 20, False), (12, 13, True), (17, 17, True), (5, 6, None),
])  # fmt: skip
def test_what_has_no_reward_is_no_way_to_be_promoted(rewarded: int, beside: int, promoted: bool | None) -> None:
    """Of 20 plays each. If what serves has as few, nothing is decided."""
    candidate, incumbent = (played(*[1.0] * count, *[None] * (20 - count)) for count in (rewarded, beside))
    found = decide(candidate, incumbent, 0.1)
    assert (found is None) if promoted is None else (found is not None and found.promoted is promoted)
    assert found is None or promoted or "have no reward" in found.why
