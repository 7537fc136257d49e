"""A critic on a CPU: verl's value engine without flash attention, packed rows, and a gradient towards the returns."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorkerConfig
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import response_from_nested

from ajet_trainer.backends.verl.cpu_worker import CpuCriticWorker
from tests.trainer.engine.test_gradient import conversation, rows_of, step_data
from tests.trainer.engine.test_settings import SEED, composed


def critic_worker(folder: Path, seed: int = 42, **optim: Any) -> Any:
    """verl's worker of a critic as the trainer makes it, and its configuration."""
    float32 = {f"critic.fsdp.mixed_precision.{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
    steps = {f"critic.optim.{name}": value for name, value in optim.items()}
    verl = {"algorithm.adv_estimator": "gae", SEED: seed} | steps
    config = omega_conf_to_dataclass(composed(verl | float32, device="cpu", model=str(folder)).critic)
    config.optim.total_training_steps = 10
    config.engine.infer_max_token_len_per_gpu = config.engine.max_token_len_per_gpu = 256
    config.engine.use_dynamic_bsz = True
    made = CpuCriticWorker(
        TrainingWorkerConfig(
            model_type="value_model", model_config=config.model, engine_config=config.engine,
            optimizer_config=config.optim, checkpoint_config=config.checkpoint,
        )
    )
    made.reset()
    return made, config


def values(worker: Any, data: Any) -> Any:
    with worker.engine.eval_mode():
        found = worker.engine.infer_batch(data, loss_function=None)["model_output"]["values"]
    return response_from_nested(found.detach(), data["response_mask"])


def test_a_critics_head_starts_where_the_runs_seed_says(tiny: Path) -> None:
    def head(seed: int) -> Any:
        found = dict(critic_worker(tiny, seed)[0].engine.module.named_parameters())
        return next(one.full_tensor() for name, one in found.items() if "score.weight" in name)

    first = head(7)
    assert first.std() > 0
    assert torch.equal(first, head(7)) and not torch.equal(first, head(8))


def test_a_critic_learns_the_returns_of_packed_rows(tiny: Path) -> None:
    worker, config = critic_worker(tiny, lr=1e-3)
    rows = rows_of([[conversation(seed, turns=2)] for seed in range(4)])
    data, alone = step_data(rows, [0.0] * 4, pack=256), step_data(rows, [0.0] * 4, pack=40)
    start = values(worker, data)
    assert torch.allclose(start.values(), values(worker, alone).values(), atol=1e-5), "packed rows see each other"
    assert start.values().std() > 0
    for each in (data, alone):
        each["values"], each["returns"] = start, 0 * start + 1.0

    def loss() -> float:
        with worker.engine.train_mode():
            found = worker.engine.train_batch(data, loss_function=partial(value_loss, config=config))
        return float(sum(found["metrics"]["critic/vf_loss"].values))

    losses = [loss() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert (values(worker, data).values() - 1).abs().mean() < (start.values() - 1).abs().mean()
