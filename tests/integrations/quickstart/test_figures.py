from __future__ import annotations

import json
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.quickstart import figures
from integrations.quickstart.figures import T_95, ends, paired, smoothed, t_95, welch
from integrations.quickstart.plan import Plan

STATUS = {
    "episodes": {
        "opened": 97, "open": 0, "sealed": 0, "ready": 0, "leased": 0, "trained": 96, "recorded": 0, "discarded": 1,
    },
    "drift": {"retokenized": 2},
}  # fmt: skip


def step(number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "step": number, "reward_mean": reward, "samples": 16, "sampled_tokens": 300, "prompt_tokens": 1200,
        "merged_calls": 40, "merged_tokens": 2000, "min_policy_version": number - 1, "rollout_probs_diff_mean": 0.001,
        "rollout_probs_diff_max": 0.01 * number, "timing": {"wait": 5.0, "train": 7.5, "step": 99.0},
        "learner": {"actor/computed_tokens": 800.0}, **more,
    }  # fmt: skip


def summary(*steps: dict[str, Any]) -> dict[str, Any]:
    return figures.summarize(Plan(steps=len(steps)), steps, STATUS, {"proxy start": 1.234})


RISING = [step(n, r) for n, r in enumerate([0.1, 0.2, 0.4, 0.5, 0.8, 0.9], 1)]


def test_the_figures_by_hand() -> None:
    found = summary(*RISING)
    assert found["reward"]["first_third"] == pytest.approx(0.15)
    assert found["reward"]["gain"] == pytest.approx(0.7)
    assert found["tokens"] == {
        "calls": 336, "samples": 96, "as_calls": 21000, "stored": 9000, "sampled": 1800, "computed": 4800,
        "splits": {"retokenized": 2},
    }  # fmt: skip
    assert found["drift"] == {"mean": 0.001, "max": 0.06}
    assert found["staleness"] == {"max": 0, "steps_with_stale_data": 0}
    assert found["episodes"]["adds_up"]
    assert found["seconds"]["of the steps"]["train"] == 45.0
    assert json.loads(json.dumps(found)) == found


def test_old_data_shows() -> None:
    found = summary(*RISING[:5], step(6, 0.9, min_policy_version=3))
    assert found["staleness"] == {"max": 2, "steps_with_stale_data": 1}


def test_a_ledger_that_does_not_add_up_shows() -> None:
    broken = {"episodes": {**STATUS["episodes"], "trained": 95}}
    found = figures.summarize(Plan(steps=6), RISING, broken, {})
    assert "DOES NOT ADD UP" in "\n".join(figures.lines(found))


def test_unmeasured_drift_is_unknown_and_not_zero() -> None:
    found = summary(*[step(n, 0.5, rollout_probs_diff_mean=None, rollout_probs_diff_max=None) for n in (1, 2, 3)])
    assert "differ by unknown" in "\n".join(figures.lines(found))


def test_too_few_steps_have_no_interval_and_the_summary_stays_json() -> None:
    found = summary(*RISING[:3])
    json.dumps(found, allow_nan=False)
    assert "95 % interval unknown" in "\n".join(figures.lines(found))


def test_the_lines_name_every_figure() -> None:
    text = "\n".join(figures.lines(summary(*RISING)))
    for words in (
        "0.150 in the first third",
        "+0.700",
        "336 calls became 96",
        "96 trained, 1 discarded",
        "2 retokenized",
    ):
        assert words in text


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
