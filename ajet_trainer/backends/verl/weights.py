"""Weights from verl's workers to the engines, and the watchdog over their way.

*Hybrid*: verl streams them from each training process to the vLLM worker on the same device (CUDA IPC, or shared memory
on a CPU). That sender waits for its receiver without a limit, so `wait` sets one. A push that takes too long, or whose
engine died, ends in an `EngineLost` that says so.

*Attached*: training process 0 writes them as safetensors into a folder that trainer and engines see. The engines read
them there (`ajet_trainer.engines`).
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from ajet_trainer.engines import EngineLost
from ajet_trainer.engines.weights import PUSH_S

BACKEND = "ajet_folder"
POLL_S = 2.0


def wait(references: Sequence[Any], alive: Callable[[], str | None], timeout_s: float = PUSH_S) -> None:
    """Waits for Ray `references`. `alive` is asked every few seconds and names what died, if anything did.

    Raises `EngineLost` after `timeout_s` seconds, or as soon as something died.
    """
    give_up = time.monotonic() + timeout_s
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise EngineLost(f"the weight push failed: {type(cause).__name__}: {str(cause).strip()}") from error
        if not pending:
            return
        dead = alive()
        if dead is not None:
            raise EngineLost(f"the weight push cannot finish: {dead}")
        if time.monotonic() > give_up:
            raise EngineLost(f"the weight push did not finish within {timeout_s:g} s")


@CheckpointEngineRegistry.register(BACKEND)
class SharedFolder:
    """verl's checkpoint engine for the attached placement: process 0 writes the tensors, every process gathers them.

    This is its sending half alone, since an engine that stands alone receives by itself.
    """

    def __init__(self, bucket_size: int, is_master: bool, folder: str, dtype: str | None = None) -> None:
        """Numbers are written in `dtype` (as ``bfloat16``), or as they come."""
        self._is_master, self._folder = is_master, Path(folder)
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Writes ``FOLDER/GLOBAL_STEPS/model.safetensors``; gathering is collective, so every process iterates."""
        tensors = {}
        for name, tensor in weights:
            if self._is_master:
                dtype = self._dtype if tensor.is_floating_point() else None
                tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()  # tied ones must share nothing
        if self._is_master:
            target = self._folder / str(global_steps)
            target.mkdir(parents=True, exist_ok=True)
            file = target / "model.safetensors"
            file.unlink(missing_ok=True)
            room_for(sum(tensor.nbytes for tensor in tensors.values()), target)
            save(tensors, file)


def room_for(size: int, folder: Path) -> None:
    """Raises `OSError` unless `folder` has room for `size` bytes. A write into memory that is short of it may end the
    process without a word."""
    free = shutil.disk_usage(folder).free
    if size > free:
        said = f"weights of {size / 1e9:.1f} GB do not fit into {folder}, which has {free / 1e9:.1f} GB free"
        raise OSError(errno.ENOSPC, f"{said}: set weights_dir, or make /dev/shm larger")


def write_adapter(engine: Any, folder: Path, *, master: bool) -> None:
    """Writes the adapter of verl's training `engine` into `folder`, as PEFT does. Gathering is collective: every
    process takes part, and the `master` writes."""
    found, _ = engine.get_per_tensor_param(base_sync_done=True)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in found}
    if master:
        folder.mkdir()
        save(tensors, folder / "adapter_model.safetensors")
        module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
        module.peft_config["default"].save_pretrained(folder)


def save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes `tensors` for an engine, which may be another user's. Their library lets us alone read a file."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)
