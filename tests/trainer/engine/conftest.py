"""verl in this process, on a CPU: no Ray, one training worker, a tiny real model in float32.

What verl, torch and vLLM warn about is not ours to fix, so warnings are no errors in this folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiny_model import build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def verl_here() -> Iterator[None]:
    """This process as rank 0 of 1, with verl's CPU platform."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(wanted, VERL_PLATFORM="cpu", VERL_LOGGING_LEVEL="ERROR")
    import torch.distributed as dist

    from ajet_trainer.verl_backend.cpu_worker import start_gloo

    start_gloo()
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def worker(tiny: Path, verl_here: None) -> Any:
    return training_worker(tiny)


def training_worker(tiny: Path) -> Any:
    """Our training worker, which is verl's, with the tiny model, packing on, everything in float32."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from ajet_trainer.verl_backend.worker import RowWorker

    model = HFModelConfig(
        path=str(tiny),
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        max_token_len_per_gpu=4096,
        infer_max_token_len_per_gpu=4096,
        use_torch_compile=False,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    made = RowWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    return made
