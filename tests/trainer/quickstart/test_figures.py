from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_trainer.quickstart import figures
from ajet_trainer.quickstart.plan import Plan

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
        "rollout_probs_diff_max": 0.01 * number, "timing": {"wait": 5.0, "train": 7.5, "step": 99.0}, **more,
    }  # fmt: skip


def summary(*steps: dict[str, Any]) -> dict[str, Any]:
    return figures.summarize(Plan(steps=len(steps)), steps, STATUS, {"proxy start": 1.234})


RISING = [step(n, r) for n, r in enumerate([0.1, 0.2, 0.4, 0.5, 0.8, 0.9], 1)]


def test_the_figures_by_hand() -> None:
    found = summary(*RISING)
    assert found["reward"]["first_third"] == pytest.approx(0.15)
    assert found["reward"]["gain"] == pytest.approx(0.7)
    assert found["tokens"] == {
        "calls": 336, "samples": 96, "as_calls": 21000, "stored": 9000, "sampled": 1800, "splits": {"retokenized": 2},
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
