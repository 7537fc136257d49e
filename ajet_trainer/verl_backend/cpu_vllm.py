"""verl's vLLM replica on a CPU: verl's own, told to load a worker extension that can take weights a second time."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

EXTENSION = "ajet_trainer.verl_backend.cpu_vllm_worker.CpuWorkerExtension"


class CpuHttpServer(vLLMHttpServer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Uses the loopback address: no other machine may reach the engine and its control routes."""
        super().__init__(*args, **kwargs)
        self._server_address = "127.0.0.1"

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION


class CpuReplica(vLLMReplica):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuHttpServer)
