"""A training process and its share of the rows: alone with all of them, or as one of two.

    RANK=0 python -m tests.trainer.engine.one_of_two MODEL DIR

writes what each of `PARTS` finds into ``DIR/PART.RANK.npz``, and a checkpoint whose weights are 1.5 times those of the
model, as that of step 1 of a run in ``DIR``. Steps are plain gradient descent: Adam divides by the size
of a gradient, and that of some weights (biases of attention's keys) is nothing but rounding.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import value_loss

from ajet_trainer.backends.verl.cpu_worker import start_gloo
from ajet_trainer.backends.verl.refused import MEANS
from ajet_trainer.backends.verl.worker import at_own_temperature
from ajet_trainer.batch import Row
from tests.kit.learner import forest_worker, old_logprobs, training_worker
from tests.trainer.engine.saving import save
from tests.trainer.engine.test_adapters import adapted, served
from tests.trainer.engine.test_corrections import losses as all_losses
from tests.trainer.engine.test_critic import critic_worker, values
from tests.trainer.engine.test_estimators import a_trainer, group, padding, passed
from tests.trainer.engine.test_forest_engine import grown
from tests.trainer.engine.test_functions import FILE, by_turn, data_of_turns
from tests.trainer.engine.test_gradient import DESCENT, FULL, gradient, loss_of, one_step, step_data
from tests.trainer.engine.test_temperature import FOUR, data_of, four
from tests.trainer.engine.whole_step import BETA, put

Found = dict[str, np.ndarray[Any, Any]]


def rows_in_order() -> list[Row]:
    """Episodes, every other one split into one row a call, and two rows of padding."""
    return [*group(True), padding(0), padding(1)]


def share_of(rows: list[Row]) -> slice:
    """The rows of this process: its equal part of them, as verl's workers get them."""
    size = len(rows) // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def temperatures(folder: Path) -> Found:
    """The gradient of rows at temperatures of their own."""
    worker, mine = training_worker(folder), share_of(four())
    rows = four()[mine]
    data = at_own_temperature(data_of(rows, FOUR))
    data["old_log_probs"] = torch.nested.as_nested_tensor(old_logprobs(worker, rows), layout=torch.jagged)
    return {"gradient": gradient(worker, data, loss_agg_mode="token-mean")}


def ppo(folder: Path) -> Found:
    """A step of PPO: the critic's values, what it learns of them, and what the actor does."""
    rows = rows_in_order()
    mine = share_of(rows)
    data = step_data(rows[mine], [0.0] * len(rows), pack=256)
    critic, config = critic_worker(folder, **DESCENT)
    said = [row.clone() for row in values(critic, data).unbind()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    pairs = zip(rows, (one for part in everyone for one in part), strict=True)
    trainer = a_trainer(folder, adv_estimator="gae", gamma=0.99, lam=0.95)
    made = passed(trainer, rows, values={row.key: one for row, one in pairs})
    for name in ("values", "returns", "advantages"):
        data[name] = torch.nested.as_nested_tensor([made[row.key][name] for row in rows[mine]], layout=torch.jagged)
    critics, metrics = one_step(critic, data.copy(), partial(value_loss, config=config), len(rows))
    actors, _ = one_step(training_worker(folder, **DESCENT), data, loss_of(), len(rows))
    loss = np.array(metrics["critic/vf_loss"])
    return {"values": torch.cat(said).numpy(), "loss": loss, "critic": critics, "actor": actors}


def adapter(folder: Path) -> Found:
    """A step that moves an adapter alone, and what engines are then served: the model with it, and itself apart."""
    rows = rows_in_order()
    data = step_data(rows[share_of(rows)], [1.0, -2.0, 0.5, 0.7], pack=256)
    worker = adapted(folder, **DESCENT)
    start = {name: tensor.float() for name, tensor in served(worker)}
    moved, _ = one_step(worker, data, loss_of(), len(rows))
    out = {name: tensor.float().numpy() for name, tensor in served(worker)}
    worker.engine.model_config.lora["merge"] = False
    apart, _ = worker.engine.get_per_tensor_param(base_sync_done=True)
    out |= {f"apart {name}": tensor.numpy() for name, tensor in apart}
    return {"adapter": moved, **out, **{f"start {name}": tensor.numpy() for name, tensor in start.items()}}


def turns(folder: Path) -> Found:
    """The gradient of a loss of the user's own, of rows that have an advantage for each call."""
    worker, rows = training_worker(folder), by_turn()
    data = data_of_turns(worker, rows[share_of(rows)])
    own = PolicyLossConfig(loss_mode=f"{FILE}:unclipped")
    return {"gradient": gradient(worker, data, loss_agg_mode="token-mean", policy_loss=own)}


def losses(folder: Path) -> Found:
    """The gradient of each loss with each mean, of rows that the trainer has prepared for it."""
    worker, rows, out = training_worker(folder), rows_in_order(), dict[str, np.ndarray[Any, Any]]()
    mine = rows[share_of(rows)]
    for mean in MEANS:
        made = passed(a_trainer(folder, adv_estimator="rloo", mode=mean), rows)
        data = step_data(mine, [0.0] * len(rows), pack=256)
        tu.assign_non_tensor(data, global_batch_size=len(rows))
        put(data, made, mine)
        for loss in all_losses():
            choice = PolicyLossConfig(loss_mode=loss, dro_beta=BETA)
            found = gradient(worker, data.copy(), loss_agg_mode=mean, policy_loss=choice)
            out[f"{loss} {mean}"] = found.astype(np.float32)
    return out


def trees(folder: Path) -> Found:
    """The gradient over a forest. The first half of the rows are short, and those of the other are cut into parts."""
    rows = forests()
    data = step_data(rows[share_of(rows)], [0.3 * number - 2 for number in range(len(rows))], pack=110)
    tu.assign_non_tensor(data, global_batch_size=len(rows))
    return {"gradient": gradient(forest_worker(folder), data, loss_agg_mode="seq-mean-token-mean", **FULL)}


def forests() -> list[Row]:
    both = grown(1, 8, length=5), grown(2, 8, length=60)
    return [replace(row, session=number) for number, row in enumerate(chain.from_iterable(both))]


PARTS = {part.__name__: part for part in (temperatures, ppo, adapter, turns, losses, trees)}


def main(folder: Path, out: Path) -> None:
    start_gloo()
    for name, part in PARTS.items():
        np.savez(out / f"{name}.{os.environ['RANK']}.npz", **part(folder))  # type: ignore[arg-type]
    save(training_worker(folder), out / "checkpoints" / "global_step_1", 1.5)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
