"""verl's actor worker and FSDP2 engine on a CPU: registered along with verl's own, two differences in all.

The process group must exist before the worker asks for one: on a CPU verl would ask for ``cpu:gloo,cpu:gloo``, which
torch refuses. A forward-only engine must not pin memory, because pinning needs an accelerator. Importing this module
registers the engine; the worker imports it because its class lives here.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ajet_trainer.verl_backend.worker import ActorWorker


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


def start_gloo() -> None:
    """Starts the process group of this worker, from the addresses that Ray's controller put into the environment."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


class CpuActorWorker(ActorWorker):
    """Our actor, rollout and reference worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        start_gloo()
        super().__init__(*args, **kwargs)
