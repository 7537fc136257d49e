"""The distance of a trainer's probabilities from those that tokens were sampled with, before and after `sampling`
looks.

Before: every call is computed at temperature 1 and none is weighted, which is what a trainer does that is told nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ajet_sdk.sample import Batch
from ajet_trainer.admission import admit
from ajet_trainer.batch import Row, to_rows
from ajet_trainer.sampling import Rule, runs_of, tokens_that_are
from tests.kit.learner import old_logprobs
from tests.kit.shaped import SHAPES, ByHand


@dataclass(frozen=True, slots=True)
class Truth:
    """Of a group: what became of it, the mean `Gap` before and after, and how far engine and weights are from what is
    written out by hand."""

    verdict: str
    before: Gap
    after: Gap | None = None
    engine_error: float = 0.0
    weight_error: float = 0.0
    mean_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Over sampled tokens: the mean difference of probabilities, as verl reports it, and of logprobs."""

    probability: float
    logprob: float


def measure(worker: Any, by_hand: ByHand, batch: Batch, rule: Rule) -> Truth:
    """The truth of a leased group, whose task is the way in which it was sampled."""
    shape = SHAPES[batch.groups[0].task]
    samples = [sample for one in batch.groups[0].episodes for sample in one.samples]
    unstated = [replace(one, samples=tuple(replace(sample, sampling=()) for sample in one.samples))
              for one in batch.groups[0].episodes]  # fmt: skip
    plain = to_rows("b", [replace(batch.groups[0], episodes=tuple(unstated))])
    before = gap(plain, old_logprobs(worker, plain))
    admission = admit(batch, rule)
    rows = to_rows("b", admission.groups)
    if not rows:
        return Truth(f"left out: {' '.join(admission.left_out)}", before)
    kinds = [kind for kind in ("exact", "corrected", "unstated") if any(tokens_that_are(kind, one) for one in samples)]
    after = old_logprobs(worker, rows)
    errors = [compared(by_hand, row, old, shape) for row, old in zip(rows, after, strict=True)]
    engine, weights, used = (np.concatenate(column) for column in zip(*errors, strict=True))
    assert all(facts is not None for sample in samples for facts, _ in runs_of(sample))
    worst = float(engine.max()), float(weights.max())
    return Truth(" ".join(kinds), before, gap(rows, after), *worst, float(used.mean()))


def gap(rows: Sequence[Row], found: Sequence[Any]) -> Gap:
    """Between the trainer's probabilities of sampled tokens, whose logprobs were `found`, and the engine's."""
    old = np.concatenate([one.numpy() for one in found])
    mask = np.concatenate([row.mask for row in rows]).astype(bool)
    told = np.concatenate([row.logprobs for row in rows])
    return Gap(float(np.abs(np.exp(old) - np.exp(told))[mask].mean()), float(np.abs(old - told)[mask].mean()))


def compared(by_hand: ByHand, row: Row, old: Any, shape: Any) -> tuple[Any, Any, Any]:
    """For each sampled token: how far the engine's probability is from that by hand, how far verl's weight is from
    p / q by hand, and the weight."""
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    ids = [*row.prompt.tolist(), *row.response.tolist()]
    told, mask = torch.from_numpy(row.logprobs), torch.from_numpy(row.mask)
    weights, _ = compute_rollout_correction_weights((old - told).unsqueeze(0), mask.unsqueeze(0), "token", 2.0)
    places, logits = np.flatnonzero(row.mask), by_hand.logits(ids)
    engine, weight = [], []
    for turn in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        first, last = int(turn[0]), int(turn[-1]) + 1
        start = len(row.prompt)
        pairs = by_hand.logprobs(ids, logits, start + first, start + last, shape)
        for place, (plain, drawn) in zip(range(first, last), pairs, strict=True):
            engine.append(abs(float(told[place].exp()) - np.exp(drawn)))
            weight.append(abs(float(weights[0, place]) - min(np.exp(plain - drawn), 2.0)))
    return np.array(engine), np.array(weight), weights[0].numpy()[places]
