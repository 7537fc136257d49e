"""Everything that an overhead is compared for, started as its own processes in front of one engine.

nginx runs if its program is on PATH (Debian: ``apt-get install nginx-light``), LiteLLM's proxy if `.venv-litellm` is
there (``make bench-litellm``); what is missing is named and left out.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT

LITELLM = ROOT / ".venv-litellm" / "bin" / "litellm"
CHAT = "/v1/chat/completions"
DIRECT, BARE, PROXY, SLOW = "direct", "bare aiohttp relay", "ajet-proxy", "LiteLLM's proxy"
KEEPING = "aiohttp relay that captures in memory"
MAX_FILES = 16384
NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr error; worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/temp; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; keepalive_requests 1000000; client_body_buffer_size 1m;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 2048; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
MODELS = """
model_list:
  - model_name: stub
    litellm_params: {{model: openai/stub, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


@dataclass(frozen=True, slots=True)
class Rival:
    """Where requests go, and whose CPU time counts (none: nobody's)."""

    name: str
    port: int
    pid: int | None = None
    path: str = CHAT

    def processes(self) -> dict[int, float]:
        """CPU seconds of each process: the one that was started and those that it started."""
        return {pid: cpu_seconds(pid) for pid in family(self.pid)} if self.pid else {}


def family(pid: int) -> list[int]:
    """A process and all that it started, and those that these started."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, children.read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Time that all threads of the process have spent on a CPU, to the nanosecond; 0 once it has ended."""
    used = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            used += int(thread.read_text().split()[0])
    return used / 1e9


def raise_limit() -> None:
    """More descriptors for this process and those that it will start."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


@contextmanager
def server(kind: str, *ports: int) -> Iterator[int]:
    """A server of `tests.bench.servers` in a process of its own; its pid."""
    with process([sys.executable, "-m", "tests.bench.servers", kind, *map(str, ports)], ports[0]) as pid:
        yield pid


@contextmanager
def process(command: Sequence[str], port: int, *, wait_s: float = 90.0, log: Path | None = None) -> Iterator[int]:
    """A program that serves HTTP on `port`; its pid, once it answers."""
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        started = subprocess.Popen(command, stdout=out, stderr=out if log else None, cwd=ROOT)
        try:
            _answers(started, port, wait_s)
            yield started.pid
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _answers(started: subprocess.Popen[bytes], port: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while started.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{started.args!r} did not answer")


@contextmanager
def all_of(folder: Path, *, workers: int, quick: bool) -> Iterator[list[Rival]]:
    """Everyone in turn, in front of one canned engine; with `quick` only what the goals are about."""
    engine = free_port()
    with ExitStack() as stack:
        stack.enter_context(server("engine", engine))
        rivals = [Rival(DIRECT, engine)]
        kinds = {BARE: "aiohttp", KEEPING: "keeping"} | ({} if quick else {"bare asyncio relay": "asyncio"})
        for name, kind in kinds.items():
            port = free_port()
            rivals.append(Rival(name, port, stack.enter_context(server(kind, port, engine))))
        if not quick:
            rivals += stack.enter_context(nginx(folder, engine))
            rivals += stack.enter_context(litellm(folder, engine))
        rivals.append(stack.enter_context(ours(folder / "one", engine)))
        if workers and not quick:
            name = f"{PROXY}, {workers} workers"
            rivals.append(stack.enter_context(ours(folder / "several", engine, f"--workers={workers}", name=name)))
        yield rivals


@contextmanager
def ours(data: Path, engine: int, *options: str, name: str = PROXY) -> Iterator[Rival]:
    with ProxyProcess(f"http://127.0.0.1:{engine}", data, options=options) as proxy:
        yield Rival(name, proxy.port, proxy.pid, f"/e/{{}}{CHAT}")


@contextmanager
def nginx(folder: Path, engine: int) -> Iterator[list[Rival]]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        skip("nginx", "there is no nginx on PATH (Debian: apt-get install nginx-light)")
        yield []
        return
    port, config = free_port(), folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, engine=engine, port=port))
    command = [program, "-p", str(folder), "-e", "stderr", "-c", str(config)]
    with process(command, port, log=folder / "nginx.log") as pid:
        yield [Rival("nginx", port, pid)]


@contextmanager
def litellm(folder: Path, engine: int) -> Iterator[list[Rival]]:
    if not LITELLM.exists():
        skip(SLOW, "there is no .venv-litellm (make bench-litellm)")
        yield []
        return
    port, config = free_port(), folder / "litellm.yaml"
    config.write_text(MODELS.format(engine=engine))
    where = ["--host", "127.0.0.1", "--port", str(port)]
    command = [str(LITELLM), "--config", str(config), *where, "--telemetry", "False"]
    with process(command, port, log=folder / "litellm.log") as pid:
        yield [Rival(SLOW, port, pid)]


def skip(name: str, why: str) -> None:
    sys.stdout.write(f"left out: {name}: {why}\n")
    sys.stdout.flush()
