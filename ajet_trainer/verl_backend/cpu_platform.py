"""verl's CPU platform, through verl's own plugin hooks (entry point group ``verl.plugins``).

verl asks a platform object for everything that differs between accelerators. This one answers for a host without any:
torch's CPU device, gloo, shared memory instead of device IPC, and Ray's logical ``GPU`` resource as the count of
training processes.

Invariant: the platform is chosen only by ``VERL_PLATFORM=cpu``, never by detection, so that installing ajet changes
nothing on a GPU cluster, not even on its head node that may have no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def nothing(*_: Any, **__: Any) -> None:
    """What a CPU need not do."""


class CpuDeviceModule:
    """`torch.cpu` with the memory and seed calls that verl makes on `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def memory_allocated(self, *_: Any, **__: Any) -> int:
        """No allocator of its own: zero, for every one of torch.cuda's counters."""
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Available and total bytes of the host."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, *_: Any, **__: Any) -> str:
        return "cpu"

    empty_cache = reset_peak_memory_stats = ipc_collect = set_device = nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """See `PlatformBase` for what each answer means."""

    device_name = vendor_name = "cpu"
    device_module = CpuDeviceModule()
    set_device = synchronize = empty_cache = set_allocator_settings = nothing
    profiler_start = profiler_stop = cudart = nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def current_device(self) -> torch.device:
        """A device, not an index: verl hands this to `Tensor.to`, where an index means CUDA."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """Logical: the trainer starts Ray with as many as there are training processes."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield
