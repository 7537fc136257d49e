"""The results of a run, as numbers (`summary.json`) and as the lines that are printed at its end.

Differences of means come with their 95 % intervals by Student's t. `welch` compares two stretches of one run (their
step means are taken as independent, which ignores that neighbors share weights), `paired` runs of equal seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ajet_sdk.routes import EPISODE_STATES
from integrations.quickstart.plan import Plan

PARTS = {
    "wait": "agents play",
    "drain": "gate closes",
    "train": "verl trains",
    "save": "checkpoint",
    "push": "weights to vLLM",
}
"""Parts of a step in the trainer's ``timing`` that follow each other, and what happens in them."""

Metrics = Sequence[Mapping[str, Any]]


def summarize(plan: Plan, metrics: Metrics, status: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Everything of contract §14, and the wall time. `seconds` are those of `Loop`; shares are 0 to 1."""
    rewards, counts = [step["reward_mean"] for step in metrics], status["episodes"]
    first, last = ends(rewards)
    gain = welch(first, last)
    parts = {name: round(sum(step["timing"].get(name, 0.0) for step in metrics), 1) for name in PARTS}
    adds_up = counts["opened"] == sum(counts[state] for state in EPISODE_STATES)
    return {
        "plan": asdict(plan),
        "reward": {
            "steps": rewards,
            "first_third": statistics.fmean(first),
            "last_third": statistics.fmean(last),
            "gain": gain.value,
            "gain_low": gain.low if math.isfinite(gain.low) else None,
            "gain_high": gain.high if math.isfinite(gain.high) else None,
        },
        "drift": drift(metrics),
        "staleness": staleness(metrics),
        "tokens": {**tokens(metrics), "splits": dict(status.get("drift", {}))},
        "episodes": {**counts, "adds_up": adds_up},
        "seconds": {**{name: round(value, 1) for name, value in seconds.items()}, "of the steps": parts},
    }


def drift(metrics: Metrics) -> dict[str, float | None]:
    """The distance of the trainer's probabilities of the sampled tokens from the engine's."""
    means, most = (
        [step[name] for step in metrics if step.get(name) is not None]
        for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max")
    )
    return {"mean": statistics.fmean(means) if means else None, "max": max(most, default=None)}


def staleness(metrics: Metrics) -> dict[str, int]:
    """Weight updates between the sampling of a token and the step that trains on it: 0 is on-policy."""
    # The step that ends in version v starts from the weights of version v - 1.
    lags = [step["step"] - 1 - step["min_policy_version"] for step in metrics]
    return {"max": max(lags, default=0), "steps_with_stale_data": sum(lag > 0 for lag in lags)}


def tokens(metrics: Metrics) -> dict[str, int]:
    """The savings of merging: `as_calls` tokens would be trained if each call were a sample of its own. The model
    `computed` so many in the updates."""
    samples = sum(step["samples"] for step in metrics)
    each = [step["sampled_tokens"] + step["prompt_tokens"] for step in metrics]
    learner = [step.get("learner", {}) for step in metrics]
    computed = [told.get("actor/computed_tokens", all_) for told, all_ in zip(learner, each, strict=True)]
    stored = sum(each)
    return {
        "calls": samples + sum(step["merged_calls"] for step in metrics),
        "samples": samples,
        "as_calls": stored + sum(step["merged_tokens"] for step in metrics),
        "stored": stored,
        "computed": round(sum(computed)),
        "sampled": sum(step["sampled_tokens"] for step in metrics),
    }


def lines(summary: Mapping[str, Any]) -> list[str]:
    """The printed summary."""
    reward, tok, drifted = summary["reward"], summary["tokens"], summary["drift"]
    states = summary["episodes"]
    shown = ", ".join(f"{states[name]} {name}" for name in states if name not in ("opened", "adds_up") and states[name])
    stale = summary["staleness"]
    inside = summary["seconds"]["of the steps"]
    outside = {name: value for name, value in summary["seconds"].items() if name != "of the steps"}
    return [
        f"  reward    {reward['first_third']:.3f} in the first third of the steps, {reward['last_third']:.3f} in the "
        f"last: {reward['gain']:+.3f}, 95 % interval {signed(reward['gain_low'])} to {signed(reward['gain_high'])}",
        f"  drift     rollout and trainer probabilities of the sampled tokens differ by {number(drifted['mean'])} on "
        f"average, {number(drifted['max'])} at most",
        f"  policy    sampled tokens were at most {stale['max']} weight updates old when trained"
        f" ({stale['steps_with_stale_data']} steps with any)",
        f"  merging   {tok['calls']} calls became {tok['samples']} samples; {tok['as_calls']} tokens of prompts and "
        f"answers became {tok['stored']}, of them {tok['sampled']} sampled" + split(tok["splits"]),
        f"  trees     what samples share is computed once: {tok['computed']} tokens in the updates",
        f"  episodes  {states['opened']} opened = {shown}" + ("" if states["adds_up"] else "  (DOES NOT ADD UP)"),
        "  time      " + ", ".join(f"{name} {clock(value)}" for name, value in outside.items()),
        "            of the steps: " + ", ".join(f"{PARTS[name]} {clock(value)}" for name, value in inside.items()),
    ]


def split(reasons: Mapping[str, int]) -> str:
    """Why conversations became several samples, if some did."""
    named = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()) if count)
    return f"; conversations split: {named}" if named else ""


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"


def signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.3f}"


def clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of means and its 95 % interval; the bounds are infinite where the data cannot give them."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def t_95(freedom: float) -> float:
    """The two-sided 95 % quantile; between whole degrees of freedom the larger one, which is the careful side."""
    whole = math.floor(freedom + 1e-9)
    if whole < 1:
        return math.inf
    return T_95[whole - 1] if whole <= len(T_95) else T_95[-1]


def welch(first: Sequence[float], last: Sequence[float]) -> Difference:
    """``mean(last) - mean(first)``, without assuming equal variances."""
    value = statistics.fmean(last) - statistics.fmean(first)
    if len(first) < 2 or len(last) < 2:
        return Difference(value, -math.inf, math.inf)
    a, b = statistics.variance(first) / len(first), statistics.variance(last) / len(last)
    if a + b == 0:
        return Difference(value, value, value)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(last) - 1))
    margin = t_95(freedom) * math.sqrt(a + b)
    return Difference(value, value - margin, value + margin)


def paired(control: Sequence[float], treatment: Sequence[float]) -> Difference:
    """The mean of ``treatment[i] - control[i]``."""
    return mean([t - c for c, t in zip(control, treatment, strict=True)])


def mean(values: Sequence[float]) -> Difference:
    """The mean, as its difference from 0."""
    value = statistics.fmean(values)
    if len(values) < 2:
        return Difference(value, -math.inf, math.inf)
    margin = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Difference(value, value - margin, value + margin)


def ends(rewards: Sequence[float]) -> tuple[list[float], list[float]]:
    """The first and the last third, at least one step each."""
    third = max(1, len(rewards) // 3)
    return list(rewards[:third]), list(rewards[-third:])


def smoothed(values: Sequence[float], reach: int = 2) -> list[float]:
    """The mean of each value and its neighbors up to `reach` away; at the ends, of those that are there."""
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
