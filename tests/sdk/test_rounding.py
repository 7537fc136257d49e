from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_sdk.rounding import ROUNDING, differ, leveled, magnitude, slack

NUMBERS = st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=40)


def by_hand(numbers: list[float]) -> float:
    """As an agent adds them up: one after the other."""
    out = 0.0
    for number in numbers:
        out += number
    return out


@given(NUMBERS, st.randoms(use_true_random=False))
def test_sums_of_the_same_numbers_are_equal_in_any_order(numbers: list[float], pick: random.Random) -> None:
    other = pick.sample(numbers, len(numbers))
    sums = [by_hand(numbers), by_hand(other), math.fsum(numbers)]
    assert not differ(sums, slack([magnitude(numbers)]))
    assert len(set(leveled(sums, slack([magnitude(numbers)])))) == 1


@given(NUMBERS, st.randoms(use_true_random=False))
def test_a_total_does_not_depend_on_the_order_of_rewards(numbers: list[float], pick: random.Random) -> None:
    def of(values: list[float]) -> float | None:
        return total(EpisodeReward(str(n), value, None, None, False, None, 0.0) for n, value in enumerate(values))

    assert of(numbers) == of(pick.sample(numbers, len(numbers)))


@pytest.mark.parametrize(("one", "other", "given"), [
    (0.1 + 0.1 + 0.1, 0.3, [0.3]), (0.1 + 0.2 - 0.3, 0.0, [0.0]), (by_hand([0.001] * 9000), 9.0, [9.0]),
    (1000.1 - 1000, 0.1, [1000.1, -1000.0]), (1e12 + 0.1 - 1e12, 0.1, [1e12, 0.1, -1e12]),
    (by_hand([-12.6] * 7), -88.2, [-88.2]),
])  # fmt: skip
def test_what_rounding_left_is_no_difference(one: float, other: float, given: list[float]) -> None:
    assert one != other and not differ([one, other], slack([magnitude(given)]))


@pytest.mark.parametrize(("value", "more"), [(1.0, 1e-6), (0.0, 1e-9), (1000.1, 1e-6), (-12.6, 1e-10), (1e12, 1e3)])
def test_a_real_difference_counts(value: float, more: float) -> None:
    assert differ([value, value + more], slack([magnitude([value])]))
    assert leveled([value + more, value], slack([magnitude([value])])) == [value + more, value]


@given(NUMBERS, st.floats(0, 1e3))
def test_leveled_values_are_equal_or_differ_and_have_moved_by_less_than_the_bound(
    values: list[float], by: float
) -> None:
    found = leveled(values, by)
    assert (len(set(found)) > 1) == differ(values, by)
    assert all(0 <= value - level <= by for value, level in zip(values, found, strict=True))
    assert all(one < other for one, other in itertools.pairwise(sorted(set(found))))
    assert leveled(values, 0.0) == values and ROUNDING < 1e-9
