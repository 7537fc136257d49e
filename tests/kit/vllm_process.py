"""A real vLLM server as a child process: started with the options that every test shares, stopped with all its workers.

The server takes half a minute to start, so tests share one (see the session fixtures) and keep their requests small.
It runs from `.venv-engine` whatever environment the caller is in.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.kit.ports import free_port
from tests.kit.source import ROOT

VLLM = ROOT / ".venv-engine" / "bin" / "vllm"
HAS_GPU = shutil.which("nvidia-smi") is not None
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
}
if not HAS_GPU:
    ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
ON_GPU = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3")
ON_CPU = (
    "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor",  # starts in half the time
    "--dtype", "float32", "--enforce-eager",
)  # fmt: skip
OPTIONS = (
    *(ON_GPU if HAS_GPU else ON_CPU), "--max-model-len", "2048", "--max-num-seqs", "64",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
HOLDS_TWO = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
"""Options of an engine with two adapters, of the ranks that tests train."""


class VllmFailed(RuntimeError):
    """vLLM ended before it was ready, or was not ready in time; the message ends with its log."""


@contextmanager
def vllm_server(
    model: Path, log: Path, *, name: str = "tiny", options: Sequence[str] = (), ready_s: float = 600.0, port: int = 0
) -> Iterator[str]:
    """The base URL (no ``/v1``) of a vLLM that serves the folder `model` under `name`; its output goes to `log`."""
    port = port or free_port()
    command = [str(VLLM), "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *OPTIONS, *options],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url, log, ready_s)
        yield url
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise VllmFailed(f"vllm exited with {process.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise VllmFailed(f"vllm was not ready after {ready_s:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and its worker processes, which share one process group."""
    for number, grace in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 300.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue
    process.wait(300)


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
