"""A learning rate that changes between two steps: the schedule goes on as if it had always been over the new one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from ajet_trainer.backends.verl.counting import over_rate
from ajet_trainer.backends.verl.learner import VerlLearner
from ajet_trainer.config import Config


def schedule(kind: str, rate: float) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    if kind == "constant":
        return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=3)
    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=9)


def forward(one: Any, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        one.optimizer.step()
        one.step()
        rates.append([group["lr"] for group in one.optimizer.param_groups])
    return rates


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("restored", [False, True])
def test_the_schedule_goes_on_over_the_new_rate(kind: str, before: int, restored: bool) -> None:
    changed, plain = schedule(kind, 1e-3), schedule(kind, 5e-4)
    forward(changed, before)
    forward(plain, before)
    if restored:  # a checkpoint brings the rate along that it was made under
        again = schedule(kind, 5e-4)
        again.optimizer.load_state_dict(changed.optimizer.state_dict())
        again.load_state_dict(changed.state_dict())
        assert again.base_lrs == [1e-3, 1e-3]
        changed = again
    over_rate(changed, 5e-4)
    now = [[group["lr"] for group in one.optimizer.param_groups] for one in (changed, plain)]
    assert now[0] == pytest.approx(now[1])
    assert changed.get_last_lr() == pytest.approx(plain.get_last_lr())
    for one, other in zip(forward(changed, 4), forward(plain, 4), strict=True):
        assert one == pytest.approx(other)


def test_what_was_decided_of_rows_stays() -> None:
    """A configuration as it was given leaves them out. Trees would not be dealt to processes as trees."""
    learner, given = VerlLearner.__new__(VerlLearner), Config(model="m", groups=6)
    group = SimpleNamespace(set_learning_rate=lambda rate: [True])
    verl: Any = SimpleNamespace(ours=replace(given, rows="tree"), actor_rollout_wg=group)
    learner._rate, learner._verl = 1e-6, verl
    learner.tune(given)
    assert (learner._verl.ours, learner._verl.updates) == (replace(given, rows="tree"), 1)
    two = replace(given, verl={"actor_rollout_ref.actor.ppo_mini_batch_size": 3})
    learner.tune(two)
    assert (learner._verl.ours.rows, learner._verl.updates) == ("tree", 2)
    learner.tune(replace(given, verl={"actor_rollout_ref.actor.ppo_mini_batch_size": "${data.train_batch_size}"}))
    assert learner._verl.updates == 2, "what refers to another key was read at the start"
