"""verl's workers, which compute each row's logprobs at that row's own temperature where rows have one.

verl's engines take one temperature for all rows, or a tensor with one for each. Its trainer sends the first kind, and
TransferQueue writes that over a field of this name. So rows bring theirs under another, and it is put in place here,
for old, reference and new logprobs alike. Rows that verl pads a batch with are copies of a real one, and have its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict
from torch.optim.lr_scheduler import LambdaLR
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import torch_functional
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from ajet_trainer.backends.verl import (
    compared,
    cross_entropy,
    forest_engine,  # noqa: F401  # registers its engines
)
from ajet_trainer.backends.verl.counting import counted, over_rate, over_top, own_options
from ajet_trainer.backends.verl.steady import SteadyWorker
from ajet_trainer.backends.verl.weights import write_adapter

ROW_TEMPERATURE = "row_temperature"
RUN_WORD = "VERL_AJET_RUN"
"""The variable in which every process of a run finds a word that no other run has."""


class CountingWorker(SteadyWorker):
    """verl's training worker, whose engine counts its updates. That of a critic is nothing more."""

    def __init__(self, config: Any) -> None:
        if get_device_name() == "cuda" and not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
            cross_entropy.stand_in()
        super().__init__(config)
        counted(self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer goes on by the options of this run."""
        with own_options(getattr(self.engine, "lr_scheduler", None)):
            return super().load_checkpoint(*args, **kwargs)


class RowWorker(CountingWorker):
    """verl's training worker, inside the actor or the reference."""

    def infer_batch(self, data: TensorDict) -> Any:
        return super().infer_batch(at_own_temperature(data))

    def train_mini_batch(self, data: TensorDict) -> Any:
        return super().train_mini_batch(at_own_temperature(data))


class ActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's actor, rollout and reference worker. It sends weights to the engine of its own run (`vllm_replica`)."""

    actor_worker_cls = ref_worker_cls = RowWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        super().init_model()
        if (socket := getattr(self.rollout, "zmq_handle", None)) is not None:
            self.rollout.zmq_handle = own_socket(socket, ray.get_runtime_context().get_job_id())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def wrong(self, served: int) -> str:
        """Says what is wrong with rows in the actor or the reference (see `SteadyWorker`)."""
        found = [part.wrong(served) for part in (self.actor, self.ref) if part is not None]
        return next(filter(None, found), "")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    def write_adapter(self, folder: str) -> None:
        """Writes the adapter alone into `folder`, for engines that hold several."""
        write_adapter(self.actor.engine, Path(folder), master=torch.distributed.get_rank() == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def logprobs_of(self, texts: Sequence[compared.Text]) -> list[list[float]] | None:
        """The actor's logprobs of each answer in `texts`."""
        packed = bool(self.config.model.get("use_remove_padding", False))
        return compared.logprobs_of(self.actor, texts, packed=packed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def set_learning_rate(self, rate: float) -> bool:
        """The schedule goes on from where it is, now over `rate`. False where nobody knows how."""
        schedule = getattr(self.actor.engine, "lr_scheduler", None)
        if isinstance(schedule, LambdaLR):
            over_rate(schedule, rate)
        elif hasattr(schedule, "max_lr"):
            over_top(schedule, rate)
        else:
            return False
        return True


def own_socket(socket: str, job: str) -> str:
    """The address of `socket`, which verl names by the id of Ray's `job`, named by the run."""
    return socket.replace(f"-{job}-", f"-{run_word()}-")


def run_word() -> str:
    """The word that tells this run from all others on the host."""
    return os.environ[RUN_WORD]


def at_own_temperature(data: TensorDict) -> TensorDict:
    """`data` with the temperatures of its rows in the place of the one for all, if they have their own."""
    if ROW_TEMPERATURE in data:
        data["temperature"] = data.pop(ROW_TEMPERATURE)
    return data
