"""What a run proved, as numbers (`summary.json`) and as the lines that are printed at its end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_trainer.quickstart.plan import Plan
from ajet_trainer.quickstart.stats import ends, welch
from ajet_trainer.quickstart.watch import identity_holds

PARTS = {
    "wait": "agents play",
    "drain": "gate closes",
    "train": "verl trains",
    "save": "checkpoint",
    "push": "weights to vLLM",
}
"""Parts of a step in the trainer's ``timing``, and what happens in them."""

Metrics = Sequence[Mapping[str, Any]]


def summarize(plan: Plan, metrics: Metrics, status: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Everything of contract §9, and the wall time. `seconds` are those of `Record`; shares are 0 to 1."""
    rewards = [step["reward_mean"] for step in metrics]
    first, last = ends(rewards)
    gain = welch(first, last)
    return {
        "plan": {name: getattr(plan, name) for name in ("steps", "seed", "lr", "groups", "group_size")},
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
        "episodes": {**status["episodes"], "adds_up": identity_holds(status["episodes"])},
        "seconds": {**{name: round(value, 1) for name, value in seconds.items()}, "of the steps": parts(metrics)},
    }


def drift(metrics: Metrics) -> dict[str, float | None]:
    """How far the trainer's probabilities of the sampled tokens are from the engine's."""
    means = [step["rollout_probs_diff_mean"] for step in metrics if step.get("rollout_probs_diff_mean") is not None]
    most = [step["rollout_probs_diff_max"] for step in metrics if step.get("rollout_probs_diff_max") is not None]
    return {"mean": statistics.fmean(means) if means else None, "max": max(most, default=None)}


def staleness(metrics: Metrics) -> dict[str, int]:
    """Weight updates between the sampling of a token and the step that trains on it: 0 is on-policy."""
    # The step that ends in version v starts from the weights of version v - 1.
    lags = [step["step"] - 1 - step["min_policy_version"] for step in metrics]
    return {"max": max(lags, default=0), "steps_with_stale_data": sum(lag > 0 for lag in lags)}


def tokens(metrics: Metrics) -> dict[str, int]:
    """What merging saved: `as_calls` tokens would be trained if each call were a sample of its own."""
    samples = sum(step["samples"] for step in metrics)
    stored = sum(step["sampled_tokens"] + step["prompt_tokens"] for step in metrics)
    return {
        "calls": samples + sum(step["merged_calls"] for step in metrics),
        "samples": samples,
        "as_calls": stored + sum(step["merged_tokens"] for step in metrics),
        "stored": stored,
        "sampled": sum(step["sampled_tokens"] for step in metrics),
    }


def parts(metrics: Metrics) -> dict[str, float]:
    """Seconds that the steps spent in each of `PARTS`."""
    return {name: round(sum(step["timing"].get(name, 0.0) for step in metrics), 1) for name in PARTS}


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
        f"  episodes  {states['opened']} opened = {shown}" + ("" if states["adds_up"] else "  (DOES NOT ADD UP)"),
        "  time      " + ", ".join(f"{name} {clock(value)}" for name, value in outside.items()),
        "            of the steps: " + ", ".join(f"{PARTS[name]} {clock(value)}" for name, value in inside.items()),
    ]


def split(reasons: Mapping[str, int]) -> str:
    """Why conversations became several samples, where some did."""
    named = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()) if count)
    return f"; conversations split: {named}" if named else ""


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"


def signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.3f}"


def clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
