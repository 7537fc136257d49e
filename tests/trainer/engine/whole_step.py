"""One whole step on the tiny model: rows through `AjetTrainer` to what verl's worker gets, and on to a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.workers.config import PolicyLossConfig

from ajet_trainer.batch import Row
from tests.kit.learner import old_logprobs
from tests.trainer.engine.test_estimators import a_trainer, group, padding, passed
from tests.trainer.engine.test_gradient import close, gradient, step_data, still

PUT = ("advantages", "response_mask", "rollout_is_weights", "row_weights", "old_log_probs")
"""The fields that the trainer adds to a row, or changes in it."""
BETA = 0.1
"""The penalty without which `dro` does not run."""
TERMS = {"entropy_coeff": 0.01}


def put(data: Any, made: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> None:
    """Puts into `data` what the trainer has `made` of each of its `rows`."""
    for name in PUT:
        if name in made[rows[0].key]:
            data[name] = torch.nested.as_nested_tensor([made[row.key][name] for row in rows], layout=torch.jagged)


class Steps:
    """Steps of one `estimator` and these `options`; the loss and the mean may change from step to step. The old
    logprobs are the engine's, or the model's `own`."""

    def __init__(
        self, tiny: Path, worker: Any, estimator: str = "rloo", *, own: bool = False, mode: str = "token-mean",
        **options: Any,
    ) -> None:
        self.worker, self.own, self.mean = worker, own, mode
        self.trainer = a_trainer(tiny, adv_estimator=estimator, mode=mode, **options)

    def put(self, rows: list[Row]) -> dict[str, dict[str, Any]]:
        """The fields of each row that the worker gets."""
        old = zip(rows, old_logprobs(self.worker, rows), strict=True) if self.own else ()
        return passed(self.trainer, rows, old={row.key: found for row, found in old})

    def gradient(
        self, rows: list[Row], *, loss: str = "vanilla", mean: str | None = None, at_rest: bool = False
    ) -> np.ndarray[Any, Any]:
        """The gradient of a step on `rows`. `at_rest` it is the first update, whose ratios are all 1."""
        mean = mean or self.mean
        for key, value in (("loss_agg_mode", mean), ("policy_loss.loss_mode", loss)):
            OmegaConf.update(self.trainer.config, f"actor_rollout_ref.actor.{key}", value)
        data = step_data(rows, [0.0] * len(rows), pack=150)
        put(data, self.put(rows), rows)
        if at_rest:
            data = still(self.worker, data)
        choice = PolicyLossConfig(loss_mode=loss, dro_beta=BETA)
        return gradient(self.worker, data, loss_agg_mode=mean, policy_loss=choice, **TERMS)

    def seen(self, *, at_rest: bool = False, **choice: str) -> float:
        """The distance by which the gradient moves, relative to its size, when episodes split and the batch is filled
        up."""
        one = self.gradient(group(False), at_rest=at_rest, **choice)
        assert np.isfinite(one).all() and np.linalg.norm(one) > 0
        return close(one, self.gradient([*group(True), padding(0), padding(1)], at_rest=at_rest, **choice))


LIMIT = 5e-6
"""The distance by which a gradient may move that is called equal."""
EQUAL, AT_REST, SEES = "equal", "equal while nothing has moved", "sees rows"
CHOOSING, CHOOSES = ("clip_cov", "kl_cov"), "chooses in a micro-batch"
"""Losses that treat some tokens of a micro-batch otherwise: `test_gradient` shows what that comes to."""


def verdict(steps: Steps, loss: str, mean: str) -> tuple[str, float]:
    """One of the four words, and how far the gradient moved at the word's condition."""
    if loss in CHOOSING:
        return CHOOSES, steps.seen(loss=loss, mean=mean, at_rest=True)
    moved = steps.seen(loss=loss, mean=mean)
    if moved < LIMIT:
        return EQUAL, moved
    first = steps.seen(loss=loss, mean=mean, at_rest=True)
    return (AT_REST, first) if first < LIMIT else (SEES, first)
