"""Optimizer updates are counted where they are made; schedules go on by steps that made one, and begin above 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verl.workers.utils.losses import value_loss

from ajet_trainer.attempts import NoUpdate
from ajet_trainer.backends.verl import learner as module
from ajet_trainer.backends.verl.counting import counted, over_top
from ajet_trainer.backends.verl.learner import VerlLearner
from tests.kit.learner import training_worker
from tests.trainer.engine.test_critic import critic_worker
from tests.trainer.engine.test_estimators import a_trainer, group
from tests.trainer.engine.test_gradient import conversation, loss_of, one_step, rows_of, step_data

BAD = [float("nan"), float("inf")]


def moved(worker: Any, advantages: list[float], *, size: int = 0) -> tuple[bool, Any]:
    """Tells whether updates of `size` rows each move the weights, and the metrics."""
    rows = rows_of([[conversation(seed, turns=1)] for seed in range(len(advantages))])
    change, metrics = one_step(worker, step_data(rows, advantages), loss_of(), size or len(rows))
    return bool(np.abs(change).max() > 0), metrics


@pytest.mark.parametrize("value", BAD)
def test_an_update_whose_gradient_is_not_finite_is_not_counted_and_moves_no_schedule(value: float, tiny: Path) -> None:
    worker = training_worker(tiny, lr_warmup_steps=4)
    assert moved(worker, [value, -1.0])[1]["updates"] == [0.0]
    went, metrics = moved(worker, [value, -1.0])
    assert (went, metrics["updates"], metrics["lr"]) == (False, [0.0], [pytest.approx(1e-3 / 4)])
    went, metrics = moved(worker, [1.0, -1.0])
    assert (went, metrics["updates"], metrics["lr"]) == (True, [1.0], [pytest.approx(1e-3 / 4)])
    assert moved(worker, [1.0, -1.0])[1]["lr"] == [pytest.approx(1e-3 / 2)]


def test_of_several_updates_the_finite_ones_are_made(tiny: Path) -> None:
    worker = training_worker(tiny, lr_warmup_steps=4)
    went, metrics = moved(worker, [1.0, -1.0, float("nan"), -1.0], size=2)
    assert (went, metrics["updates"], metrics["lr"]) == (True, [1.0, 0.0], [pytest.approx(1e-3 / 4)])
    assert moved(worker, [1.0, -1.0])[1]["lr"] == [pytest.approx(1e-3 / 2)]


@pytest.mark.parametrize(("optim", "rates"), [
    ({"lr_warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    ({"lr_warmup_steps_ratio": 0.2}, [0.5, 1.0, 1.0]),
    ({"lr_warmup_steps": 2, "lr_scheduler_type": "cosine"}, [0.5, 1.0, 1.0, 0.9619397662556434]),
    ({}, [1.0, 1.0]),
])  # fmt: skip
def test_a_warm_up_begins_above_0_and_the_line_has_the_rate_that_was_used(
    optim: dict[str, Any], rates: list[float], tiny: Path
) -> None:
    worker = training_worker(tiny, **optim)
    for rate in rates:
        used = worker.engine.optimizer.param_groups[0]["lr"]
        went, metrics = moved(worker, [1.0, -1.0])
        assert went and metrics["lr"] == [used] == [pytest.approx(1e-3 * rate)]


def test_a_resumed_run_has_the_options_of_its_own_optimizer(tiny: Path, tmp_path: Path) -> None:
    """A checkpoint brings those along that it was made under. The schedule goes on from where it was."""
    first = training_worker(tiny, lr_warmup_steps=4)
    moved(first, [1.0, -1.0])
    first.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    again = training_worker(tiny, lr_warmup_steps=4, lr=4e-3, weight_decay=0.5, betas=[0.5, 0.9])
    again.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    [options] = again.engine.optimizer.param_groups
    assert (options["weight_decay"], options["betas"], options["lr"]) == (0.5, (0.5, 0.9), pytest.approx(4e-3 / 2))
    assert again.engine.optimizer.state and moved(again, [1.0, -1.0])[1]["lr"] == [pytest.approx(4e-3 / 2)]


def test_a_critic_counts_its_updates_too(tiny: Path) -> None:
    worker, config = critic_worker(tiny, lr=1e-3, lr_warmup_steps=2)
    rows = rows_of([[conversation(seed, turns=1)] for seed in range(2)])
    data = step_data(rows, [0.0] * 2)
    for name in ("values", "returns"):
        data[name] = data["advantages"]
    _, metrics = one_step(worker, data, partial(value_loss, config=config), 2)
    assert (metrics["updates"], metrics["lr"]) == ([1.0], [pytest.approx(5e-4)])


class Engine:
    """As much of an engine as `counted` takes hold of; its gradients have these `norms`."""

    def __init__(self, strategy: str, norms: list[float], scale: float = 0.0) -> None:
        self.engine_config, self.norms, self.scale = SimpleNamespace(strategy=strategy), norms, scale
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
        self.scaler = SimpleNamespace(get_scale=lambda: self.scale) if scale else None
        self.lr_scheduler, self.steps = object(), 0

    def initialize(self) -> None:
        pass

    def optimizer_step(self) -> float:
        self.scale /= 2
        return self.norms.pop(0)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        return {"metrics": {"grad_norm": self.optimizer_step()}}

    def lr_scheduler_step(self) -> float:
        self.steps += 1
        return 0.25


def test_an_engine_that_may_make_such_an_update_ends_the_step() -> None:
    engine: Any = Engine("megatron", [1.0, float("nan")])
    counted(engine)
    assert engine.train_batch({}, None)["metrics"]["updates"] == [1.0]
    assert (engine.lr_scheduler_step(), engine.lr_scheduler_step(), engine.steps) == (0.5, 0.5, 1)
    with pytest.raises(FloatingPointError, match="may have made an update of it"):
        engine.train_batch({}, None)


def test_a_loss_that_was_scaled_too_much_is_computed_again() -> None:
    nan = float("nan")
    for norms, made, left in (([nan, nan, 1.0, 2.0], 1.0, [2.0]), ([nan] * 5, 0.0, [nan])):
        engine: Any = Engine("fsdp", list(norms), scale=8.0)
        counted(engine)
        assert engine.train_batch({}, None)["metrics"]["updates"] == [made]
        assert len(engine.norms) == len(left)


def test_megatrons_schedule_takes_a_new_rate() -> None:
    groups = [{"lr": 0.5, "max_lr": 1.0}, {"lr": 0.5}]
    schedule = SimpleNamespace(max_lr=1.0, optimizer=SimpleNamespace(param_groups=groups), steps=[])
    schedule.step = schedule.steps.append
    over_top(schedule, 0.25)
    assert (schedule.max_lr, groups[0]["max_lr"], "max_lr" in groups[1], schedule.steps) == (0.25, 0.25, False, [0])


@pytest.mark.parametrize(("said", "made"), [
    ({"actor/updates": 0.0}, None), ({"actor/updates": 0.5}, (1, 1)), ({"actor/updates": 1.0}, (2, 0)),
    ({"actor/updates": 0.0, "critic/updates": 1.0}, (6, 2)), ({"critic/updates": 1.0}, (6, 0)), ({}, None),
])  # fmt: skip
def test_a_step_without_an_update_is_no_step(
    said: dict[str, float], made: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """A critic's update counts, also in steps in which the actor has none."""
    trainer, cleared = a_trainer(tiny, adv_estimator="gae"), []
    trainer.config.critic.ppo_epochs = 3
    trainer.global_steps, trainer.updates = 4, 2
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    trainer.step = lambda metrics, _: metrics.update(said) or SimpleNamespace(keys=["k"], partition_id="train")
    trainer._compute_metrics = lambda *_, **__: None
    learner: Any = VerlLearner(trainer, None, pytest.fail)
    learner._keep = lambda *_: None
    monkeypatch.setattr(module, "put_rows", lambda *_: None)
    monkeypatch.setattr(module, "tq", SimpleNamespace(kv_clear=lambda **cleared_of: cleared.append(cleared_of)))
    if made is None:
        with pytest.raises(NoUpdate, match="not finite"):
            learner.train(group(False))
    else:
        found = learner.train(group(False))
        assert (found["updates"], found["skipped_updates"]) == made
    assert learner.version == (4 if made is None else 5) and len(cleared) == 1
