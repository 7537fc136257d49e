from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_trainer.quickstart.stats import T_95, ends, paired, smoothed, t_95, welch


def test_the_quantiles_fall_towards_the_normal_one() -> None:
    assert len(T_95) == 30
    assert list(T_95) == sorted(T_95, reverse=True)
    assert t_95(2.9) == T_95[1]
    assert t_95(0.5) == math.inf
    assert t_95(500) == T_95[-1]


def test_paired_by_hand() -> None:
    difference = paired([0.0, 0.1, 0.2], [0.5, 0.5, 0.8])
    assert difference.value == pytest.approx(0.5)
    assert difference.high - difference.value == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)


def test_one_pair_has_no_interval() -> None:
    assert paired([0.0], [1.0]).low == -math.inf


def test_welch_with_equal_groups_is_the_textbook_t() -> None:
    first, last = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    margin = t_95(4) * math.sqrt(2 * 0.01 / 3)
    difference = welch(first, last)
    assert (difference.low, difference.high) == (pytest.approx(0.3 - margin), pytest.approx(0.3 + margin))


def test_welch_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(400):
        difference = welch([rng.gauss(0, 1) for _ in range(8)], [rng.gauss(0.5, 2) for _ in range(8)])
        covered += difference.low <= 0.5 <= difference.high
    assert 0.92 <= covered / 400 <= 0.99


def test_constant_rewards_give_a_point() -> None:
    difference = welch([0.5, 0.5], [0.75, 0.75])
    assert (difference.low, difference.value, difference.high) == (0.25, 0.25, 0.25)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_thirds_and_smoothing_stay_within_the_data(rewards: list[float]) -> None:
    first, last = ends(rewards)
    assert first == rewards[: len(first)]
    assert last == rewards[-len(last) :]
    assert len(first) == len(last) == max(1, len(rewards) // 3)
    smooth = smoothed(rewards)
    assert len(smooth) == len(rewards)
    assert min(rewards) - 1e-9 <= min(smooth) <= max(smooth) <= max(rewards) + 1e-9
    assert smoothed(rewards, reach=len(rewards))[0] == pytest.approx(statistics.fmean(rewards))
