"""verl's CPU platform, through verl's own plugin hooks (entry point group ``verl.plugins``).

verl asks a platform object for everything that differs between accelerators. This one answers for a host without any:
torch's CPU device, gloo, and shared memory instead of device IPC. Ray's logical ``GPU`` resource counts the training
processes.

Invariant: the platform is chosen only by ``VERL_PLATFORM=cpu``, never by detection. So installing ajet changes nothing
on a GPU cluster, not even on its head node, which may have no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing, where a CPU need not."""


def zero(*_: Any, **__: Any) -> int:
    """The answer of each of torch.cuda's counters for a device without an allocator of its own."""
    return 0


class CpuDeviceModule:
    """`torch.cpu` with the memory and seed calls that verl makes on `torch.cuda`."""

    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = zero
    empty_cache = reset_peak_memory_stats = ipc_collect = set_device = nothing
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def mem_get_info(self) -> tuple[int, int]:
        """Available and total bytes of the host."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self) -> str:
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """See `PlatformBase` for what each answer means."""

    device_name = vendor_name = "cpu"
    device_module = CpuDeviceModule()
    set_device = synchronize = empty_cache = set_allocator_settings = nothing
    profiler_start = profiler_stop = cudart = nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Asked where ``VERL_PLATFORM`` is not set."""
        return False

    def current_device(self) -> torch.device:
        """A device, not an index: verl hands this to `Tensor.to`, where an index means CUDA."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

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
