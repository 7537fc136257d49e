"""One whole step on the tiny model: rows through `AjetTrainer` to what verl's worker gets, and on to a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet_trainer.batch import Row
from tests.trainer.engine.test_estimators import stored
from tests.trainer.engine.test_gradient import gradient, step_data

PUT = ("advantages", "response_mask", "rollout_is_weights", "row_weights", "old_log_probs")
"""What the trainer adds to a row, or changes in it."""


def whole_step(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, worker: Any, rows: list[Row], *, estimator: str = "rloo",
    loss: str = "vanilla", mean: str = "token-mean", pack: int = 150, **terms: float | bool,
) -> np.ndarray[Any, Any]:
    """The gradient of a step on `rows`; `terms` are keys of the actor, like ``entropy_coeff``."""
    import torch
    from verl.workers.config import PolicyLossConfig

    beta = {"dro_beta": 0.1} if loss == "dro" else {}
    device = "cuda" if estimator == "gae" else "cpu"
    made = stored(monkeypatch, tiny, rows, device=device, adv_estimator=estimator, mode=mean, loss=loss, **beta)
    data = step_data(rows, [0.0] * len(rows), pack=pack)
    for name in PUT:
        if name in made[rows[0].key]:
            data[name] = torch.nested.as_nested_tensor([made[row.key][name] for row in rows], layout=torch.jagged)
    return gradient(
        worker, data, loss_agg_mode=mean, policy_loss=PolicyLossConfig(loss_mode=loss, **beta), **terms
    )
