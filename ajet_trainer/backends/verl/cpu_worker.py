"""verl's workers and FSDP2 engines on a CPU: registered along with verl's own, three differences in all.

The process group must exist before the worker asks for one: on a CPU verl would ask for ``cpu:gloo,cpu:gloo``, which
torch refuses. A forward-only engine must not pin memory, because pinning needs an accelerator. And a critic must load
without flash attention. Importing this module registers the engines; the workers import it because their classes live
here.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForTokenClassification
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from ajet_trainer.backends.verl import VENDOR
from ajet_trainer.backends.verl.forest_engine import ForestRows
from ajet_trainer.backends.verl.worker import ActorWorker, CountingWorker


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuLMHeadEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP2 language model engine. Parameters are on the host already, so the offload policy of a forward-only
    engine has nothing to do."""

    def _build_fsdp_module(self, module: Any) -> Any:
        forward_only = self.engine_config.forward_only
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu", vendor=VENDOR)
class CpuForestEngine(ForestRows, CpuLMHeadEngine):
    """The same, over the forest of its rows."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CpuValueEngine(CpuLMHeadEngine, FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's FSDP2 engine of a critic: the model with a head of one number for each token, which starts at random."""

    def _build_module(self) -> Any:
        model, config = self.model_config, self.model_config.hf_config
        config.num_labels, config.classifier_dropout = 1, 0.0
        module = AutoModelForTokenClassification.from_pretrained(
            model.local_path, config=config, dtype=PrecisionType.to_dtype(self.engine_config.model_dtype),
            attn_implementation="sdpa", trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
        apply_monkey_patch(
            model=module, use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=self.ulysses_sequence_parallel_size,
        )
        if model.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module


def start_gloo() -> None:
    """Starts the process group of this worker. Several meet at the address that Ray's controller put into the
    environment. One alone needs none: somebody may have taken that port by now."""
    if not dist.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.HashStore() if size == 1 else None)


class CpuActorWorker(ActorWorker):
    """Our actor, rollout and reference worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        start_gloo()
        super().__init__(*args, **kwargs)


class CpuCriticWorker(CountingWorker):
    """Our worker of a critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        start_gloo()
        super().__init__(*args, **kwargs)
