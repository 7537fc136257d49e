"""verl's training worker in this process or a few like it, on a CPU or a GPU: what tests compute gradients with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ajet_trainer.config import Config
from tests.kit.ports import free_port


@contextmanager
def verl_here(device: str = "cpu") -> Iterator[None]:
    """This process as rank 0 of 1, with verl's platform for `device`."""
    wanted = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    platform = "cpu" if device == "cpu" else "nvidia"
    os.environ.update(wanted, MASTER_PORT=str(free_port()), VERL_PLATFORM=platform, VERL_LOGGING_LEVEL="ERROR")
    import torch.distributed as dist

    from ajet_trainer.backends.verl.cpu_worker import start_gloo

    if device == "cpu":
        start_gloo()
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)  # as verl does
    yield
    dist.destroy_process_group()


def forest_worker(folder: Path, attention: str = "sdpa", **more: Any) -> Any:
    """The same as `training_worker`, with the engine that computes shared tokens once."""
    from ajet_trainer.backends.verl import VENDOR

    with patch.dict(os.environ, VERL_ENGINE_VENDOR=VENDOR):
        return training_worker(folder, attention, **more)


def training_worker(
    folder: Path, attention: str = "sdpa", *, lora: int = 0, dtype: str = "fp32", checkpointing: bool = False,
    packed: bool = True, tokenizer: bool = True, **optim: Any,
) -> Any:
    """Ours, which is verl's, with the model in `folder`, and with its `tokenizer` if it has one. Rows are `packed` or
    padded. `lora` is the rank of an adapter, `optim` are the optimizer's options. Weights are float32, and layers
    compute in `dtype`."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from ajet_trainer.backends.verl.worker import RowWorker

    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=packed,
        load_tokenizer=tokenizer,
        enable_gradient_checkpointing=checkpointing,
        lora_rank=lora,
        target_modules="all-linear",
        override_config={"attn_implementation": attention},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        max_token_len_per_gpu=4096,
        infer_max_token_len_per_gpu=4096,
        use_torch_compile=False,
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    made = RowWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": 10} | optim),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    return made


def old_logprobs(worker: Any, rows: Any, *, limit: int = 4096) -> list[Any]:
    """Of each row's response, as verl's trainer has them computed: packed, at the rows' temperatures."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.workers.utils.padding import response_from_nested

    from ajet_trainer.backends.verl.rows import row_fields
    from ajet_trainer.backends.verl.worker import ROW_TEMPERATURE

    data = list_of_dict_to_tensordict([row_fields(row) for row in rows])
    for name in ("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask"):  # if equally long
        data[name] = torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged)
    data[ROW_TEMPERATURE] = torch.tensor([row.temperature for row in rows])
    tu.assign_non_tensor(
        data, temperature=1.0, pad_token_id=0, use_remove_padding=True, use_dynamic_bsz=True,
        max_token_len_per_gpu=limit, use_fused_kernels=False, calculate_entropy=True, compute_loss=False,
    )  # fmt: skip
    found = worker.infer_batch(data)
    return list(response_from_nested(found["log_probs"], data["response_mask"]).unbind())


def verl_learner(
    tree: Any, *, engines: Any = None, say: Callable[[str], None] = lambda line: None, **trainer: Any
) -> Any:
    """A `VerlLearner` over a trainer that has the configuration `tree`, these attributes, and nothing else."""
    from ajet_trainer.backends.verl.learner import VerlLearner

    usual = {"use_critic": False, "vocabulary": None, "ours": Config()}
    made: Any = SimpleNamespace(config=tree, **usual | trainer)
    return VerlLearner(made, engines, say)
