"""What the proxy costs: its CPU time for a request and for a streamed chunk, and the time it adds, beside plain relays.

    python -m tests.bench.overhead

Every round measures each of the four in turn, with one load and one canned engine; the table shows medians over the
rounds. CPU time is that of the relaying process alone. The proxy captures, checks and
journals (with fsync) all the while.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench import load, table
from tests.bench.servers import CHUNKS
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess

ROUNDS = 5
REQUESTS, STREAMS, SINGLES, CONNECTIONS = 400, 32, 100, 16


@contextmanager
def server(kind: str, *ports: int) -> Iterator[int]:
    """A server of `tests.bench.servers` in a process of its own; its pid."""
    command = [sys.executable, "-m", "tests.bench.servers", kind, *map(str, ports)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        yield process.pid
    finally:
        process.terminate()
        process.communicate()


def cpu_seconds(pid: int) -> float:
    """Time that all threads of the process have spent on a CPU, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def measure(port: int, pid: int | None, path: str) -> dict[str, float]:
    """CPU microseconds of `pid` for a request and for a chunk; milliseconds for a request that is alone."""
    out = {}
    for name, stream, requests, per in (
        ("request", False, REQUESTS, REQUESTS),
        ("chunk", True, STREAMS, STREAMS * CHUNKS),
    ):
        before = cpu_seconds(pid) if pid else 0.0
        asyncio.run(load.run(port, path=path, stream=stream, requests=requests, connections=CONNECTIONS))
        out[name] = ((cpu_seconds(pid) if pid else 0.0) - before) / per * 1e6
    seconds = asyncio.run(load.run(port, path=path, stream=False, requests=SINGLES, connections=1))
    return out | {"alone": statistics.median(seconds) * 1e3}


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        engine, plain, heavy = free_port(), free_port(), free_port()
        stack.enter_context(server("engine", engine))
        proxy = ProxyProcess(f"http://127.0.0.1:{engine}", folder / "data")
        stack.enter_context(proxy)
        targets = {
            "direct": (engine, None, "/v1/chat/completions"),
            "bare asyncio relay": (
                plain,
                stack.enter_context(server("asyncio", plain, engine)),
                "/v1/chat/completions",
            ),
            "bare aiohttp relay": (
                heavy,
                stack.enter_context(server("aiohttp", heavy, engine)),
                "/v1/chat/completions",
            ),
            "ajet-proxy": (proxy.port, proxy.pid, "/e/bench-{round}-{{}}/v1/chat/completions"),
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
        for number in range(ROUNDS + 1):  # the first round warms everything up and is not counted
            for name, (port, pid, path) in targets.items():
                rounds[name].append(measure(port, pid, path.replace("{round}", str(number)).replace("{{}}", "{}")))
    medians = {
        name: {key: statistics.median(item[key] for item in items[1:]) for key in items[0]}
        for name, items in rounds.items()
    }
    base = medians["bare aiohttp relay"]
    rows = [
        [
            name,
            f"{m['request']:.0f}" if m["request"] else "-",
            f"{m['request'] / base['request']:.2f}" if m["request"] else "-",
            f"{m['chunk']:.1f}" if m["chunk"] else "-",
            f"{m['chunk'] / base['chunk']:.2f}" if m["chunk"] else "-",
            f"{m['alone'] - medians['direct']['alone']:.2f}",
        ]
        for name, m in medians.items()
    ]
    head = ["", "CPU µs a request", "× aiohttp relay", "CPU µs a chunk", "× aiohttp relay", "added ms, alone"]
    table.show(
        f"Proxy overhead, medians of {ROUNDS} rounds, {CONNECTIONS} connections, {CHUNKS}-chunk streams", head, rows
    )


if __name__ == "__main__":
    main()
