"""verl's vLLM replica, which takes its weights from this run and from no other.

In hybrid placement verl sends weights through a socket in ``/tmp`` that is named by Ray's job id. Each run starts a Ray
of its own, and every Ray calls its first job by the same id. So two runs on one host would share a socket, and an
engine would wait for ever for weights that the other one got. Here the name has a word of the run in its place, on
this side and on that of the workers (`worker.ActorWorker`).

It listens on the loopback address alone if the proxy is on this host: no other machine may reach its control routes. On
a CPU it also loads a worker extension that can take weights a second time.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from ajet_trainer.backends.verl import ADDRESS
from ajet_trainer.backends.verl.worker import run_word

EXTENSION = "ajet_trainer.backends.verl.cpu_vllm_worker.CpuWorkerExtension"


class RunHttpServer(vLLMHttpServer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        os.environ["VERL_RAY_JOB_ID"] = run_word()  # what its vLLM, started later, names the socket by
        if ADDRESS in os.environ:
            self._server_address = os.environ[ADDRESS]


class RunReplica(vLLMReplica):  # type: ignore[misc]
    server: type[RunHttpServer] = RunHttpServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(self.server)


class CpuHttpServer(RunHttpServer):
    def _get_worker_extension_cls(self) -> str:
        return EXTENSION


class CpuReplica(RunReplica):
    server = CpuHttpServer
