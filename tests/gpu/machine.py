"""Looks at a GPU machine in less than a minute: versions, what can be imported, what the hybrid placement needs.

    python -m tests.gpu.machine [--engine]      --engine: vLLM's parts and its sleep too

Status 1 means that something failed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

PACKAGES = "torch triton transformers verl ray tensordict TransferQueue vllm peft flash-attn".split()
TRAIN = ("verl.trainer.ppo.v1.trainer_base", "verl.workers.engine_workers", "ajet_trainer.backends.verl.trainer",
         "ajet_proxy.cli", "openai")  # fmt: skip
ENGINE = ("vllm.entrypoints.cli.serve", "vllm.v1.worker.gpu_model_runner", "vllm.v1.attention.backends.flash_attn",
          "vllm.device_allocator.cumem", "verl.workers.rollout.vllm_rollout.vllm_async_server",
          "ajet_trainer.backends.verl.vllm_replica")  # fmt: skip
CHILD = """
import pickle, sys, torch
function, given = pickle.load(sys.stdin.buffer)
print(float(function(*given).sum()))
"""


def shared_with_a_process() -> str:
    """Reads memory of the GPU in another process, as the hybrid placement sends weights."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.ones(1 << 20, device="cuda")
    given = pickle.dumps(reduce_tensor(tensor))
    child = subprocess.run([sys.executable, "-c", CHILD], input=given, capture_output=True, timeout=60, check=False)
    if child.stdout.decode().strip() != str(float(1 << 20)):
        raise RuntimeError(child.stderr.decode()[-400:])
    return "works"


def asleep() -> str:
    """Lets vLLM's allocator give memory back and take it again, as between two steps of the hybrid placement."""
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        tensor = torch.full((1 << 28,), 3.0, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    allocator.sleep(offload_tags=("weights",))
    between = torch.cuda.mem_get_info()[0]
    allocator.wake_up()
    if float(tensor.mean()) != 3.0:
        raise RuntimeError("values were lost")
    return f"freed {(between - before) / 1e9:.2f} GB of 1.07, and kept the values"


def compiled() -> str:
    """Compiles flex attention, which takes Triton and a C compiler."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512)
    torch.compile(flex_attention)(q, k, v, block_mask=mask).sum().backward()
    return "forward and backward"


def imported(name: str) -> str:
    importlib.import_module(name)
    return "imported"


def held(name: str, work: Callable[[], str]) -> bool:
    """Says what `work` found; whether it went well."""
    start = time.monotonic()
    try:
        found, well = work(), True
    except (Exception, SystemExit) as error:
        found, well = f"FAILED: {type(error).__name__}: {str(error)[:300]}", False
    sys.stdout.write(f"{name}: {found} [{time.monotonic() - start:.1f} s]\n")
    sys.stdout.flush()
    return well


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def described() -> str:
    """Python, cores, memory, disk, the GPU, and the versions of what is installed, a line each."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    found = shutil.which(query[0])
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if found else "none"
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = {path: shutil.disk_usage(path).free >> 30 for path in ("/tmp", "/dev/shm")}
    return "\n".join([
        f"python {sys.version.split()[0]}, {os.cpu_count()} cores, memory {memory['MemAvailable'].strip()} free",
        f"GPU: {gpu}",
        *(f"{path}: {size} GiB free" for path, size in free.items()),
        "; ".join(f"{name} {version_of(name)}" for name in PACKAGES),
    ])  # fmt: skip


def main() -> None:
    import torch

    engine = "--engine" in sys.argv
    sys.stdout.write(described() + "\n")
    well = [held(name, partial(imported, name)) for name in (*TRAIN, *(ENGINE if engine else ()))]
    if torch.cuda.is_available():
        well += [held("flex attention", compiled), held("memory in another process", shared_with_a_process)]
        if engine:
            well.append(held("sleep and wake", asleep))
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
