"""The figures of a step, as `metrics.jsonl` and loggers have them. The reference of metrics says what each means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_sdk.sample import Batch
from ajet_trainer.admission import Admission, has_signal
from ajet_trainer.advantage import trainable
from ajet_trainer.batch import Row
from ajet_trainer.overlong import Shaping
from ajet_trainer.progress import numbers
from ajet_trainer.sampling import tokens_that_are
from ajet_trainer.turns import ByTurn

Hand = Sequence[tuple[Batch, Admission]]
"""The batches of a step, and what of each is trained."""


def batch_figures(
    hand: Hand, rows: Sequence[Row], by_turn: ByTurn | None, *, compares: bool = True
) -> dict[str, Any]:
    """The figures of the data. Rewards are of all leased episodes, the rest is of what was trained. Without `compares`
    or credit `by_turn`, equal rewards of a group are no lack."""
    leased = [episode for one, _ in hand for group in one.groups for episode in group.episodes]
    rewards = [episode.reward for episode in leased]
    given = {call: sample.reward for episode in leased for sample in episode.samples for call in sample.calls}
    trained = [episode for _, admission in hand for episode in admission.episodes]
    groups = [group for _, admission in hand for group in admission.groups]
    mean = math.fsum(rewards) / len(rewards)
    samples = [sample for episode in trained for sample in trainable(episode)]
    agents: dict[str, list[float]] = {}
    for sample in samples:
        agents.setdefault(sample.agent, []).append(given[sample.calls[0]] or 0.0)
    means = {agent: math.fsum(found) / len(found) for agent, found in agents.items()}
    rows = [row for row in rows if row.sampled]  # the others are only compared
    return {
        "reward_mean": mean,
        **({"reward_by_agent": means} if len(means) > 1 else {}),
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "groups": len(groups),
        "groups_without_signal": sum(
            not has_signal(group, by_turn) for group in groups
            if by_turn is not None or (compares and len(group.compared) > 1)
        ),
        "episodes": len(trained),
        "rejected_episodes": sum(len(admission.rejected) for _, admission in hand),
        "samples": len(rows),
        "sampled_tokens": sum(row.sampled for row in rows),
        "prompt_tokens": sum(row.tokens - row.sampled for row in rows),
        "merged_calls": sum(len(sample.spans) - 1 for sample in samples),
        "merged_tokens": sum(sum(end for _, _, end in sample.spans) - len(sample.token_ids) for sample in samples),
        "min_policy_version": min(row.min_version for row in rows),
        "max_policy_version": max(row.max_version for row in rows),
        "uncertain_tokens": sum(sample.uncertain_tokens for sample in samples),
        "repaired_tokens": sum(sample.repaired_tokens for sample in samples),
        "corrected_tokens": sum(tokens_that_are("corrected", sample) for sample in samples),
        "unstated_tokens": sum(tokens_that_are("unstated", sample) for sample in samples),
        "left_out_calls": dict(sum((admission.left_out for _, admission in hand), Counter[str]())),
    }


def penalty_figure(hand: Hand, shaping: Shaping | None) -> dict[str, float]:
    """The mean punishment for length over the trained episodes, where there is any."""
    found = [penalty for _, admission in hand for penalty in admission.penalties.values()]
    return {} if shaping is None else {"overlong_penalty": math.fsum(found) / len(found)}


def staleness(hand: Hand, version: int) -> dict[str, float]:
    """Counts the updates between the sampling of a step's tokens and the weights of `version`, which it began with."""
    behind = Counter[int]()
    for sample in (sample for _, admission in hand for one in admission.episodes for sample in trainable(one)):
        for sampled, count in sample.policy_versions:
            behind[version - sampled] += count
    mean = sum(lag * count for lag, count in behind.items()) / behind.total()
    return {"staleness_mean": mean, "staleness_max": max(behind)}


LEARNER_FIGURES = {
    "rollout_probs_diff_mean": "training/rollout_probs_diff_mean",
    "rollout_probs_diff_max": "training/rollout_probs_diff_max",
    "rollout_kl": "rollout_corr/kl",
    "fresh_kl": "rollout_corr/fresh_kl",
    "fresh_tokens": "rollout_corr/fresh_tokens",
    "pg_loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "ppo_kl": "actor/ppo_kl",
    "lr": "actor/lr",
    "updates": "updates",
    "skipped_updates": "skipped_updates",
}


NOT_LOGGED = {*LEARNER_FIGURES, "learner", "step"}
"""Figures that loggers do not get from us: verl's own, which they have by verl's names, and what is no curve."""


def logged(metrics: Mapping[str, float], figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures for loggers: the learner's `metrics` by their names, and our `figures` under ``ajet/``."""
    ours = {name: value for name, value in figures.items() if name not in NOT_LOGGED}
    return {**metrics, **{f"ajet/{name}": float(value) for name, value in numbers(ours)}}


def learner_figures(metrics: Mapping[str, float]) -> dict[str, Any]:
    """The learner's best-known figures under short names, and everything else it reported under ``learner``."""
    short = {name: metrics[key] for name, key in LEARNER_FIGURES.items() if key in metrics}
    rest = {k: v for k, v in metrics.items() if k not in LEARNER_FIGURES.values() and not k.startswith("timing_s/")}
    return {**short, "learner": rest}
