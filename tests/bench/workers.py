"""The gain of worker processes: the CPU time of each process of the daemon, for a request and for a chunk of a stream.

    python -m tests.bench.workers [N …]

Load, engine and daemon share this machine's cores, so requests a second say little of what N workers can do where N + 1
cores are free. What says it is the CPU time of the busiest process: when its core is full, the daemon is. So the table
shows what the ledger's process and the busiest worker spend on a request or chunk of all, and how much less than one
process that does everything the busier of the two spends. Goal: at least 0.8 N. Where the ledger's process is the
busiest, more workers give no more.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench import load, table
from tests.bench.load import Load
from tests.bench.rivals import Rival, ours, raise_limit, server
from tests.kit.ports import free_port

LOADS = {"a request": Load(128, 10), "a streamed chunk": Load(128, 2, chunks=200, gap_ms=0)}
"""So many agents that chance gives no worker many more connections than another."""
ROUNDS = 5
MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """Units a second, and the CPU microseconds a unit: of all processes, the daemon's own, and its busiest worker."""

    rate: float
    all: float
    ledger: float
    worker: float

    @property
    def busiest(self) -> float:
        return max(self.ledger, self.worker)


def measure(rival: Rival, some: Load, name: str) -> Point:
    before, began = rival.processes(), time.perf_counter()
    seen = asyncio.run(load.run(rival.port, some, path=rival.path, name=name))
    took = time.perf_counter() - began
    assert not +seen.errors, seen.errors
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in rival.processes().items()}
    units = some.agents * some.turns * max(some.chunks, 1)
    ledger = used.pop(rival.pid) if rival.pid is not None else 0.0
    cost = [seconds * MICRO / units for seconds in used.values()] or [0.0]
    return Point(units / took, ledger * MICRO / units + sum(cost), ledger * MICRO / units, max(cost))


def main() -> None:
    counts = [int(text) for text in sys.argv[1:]] or [2]
    raise_limit()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        engine = free_port()
        stack.enter_context(server("engine", engine))
        daemons = {n: stack.enter_context(ours(folder / str(n), engine, f"--workers={n}")) for n in (1, *counts)}
        for what, some in LOADS.items():
            points: dict[int, list[Point]] = {n: [] for n in daemons}
            for number in range(ROUNDS + 1):  # the first warms up and is not counted
                for n, rival in daemons.items():
                    points[n].append(measure(rival, some, f"{number}-{some.chunks}"))
            medians = {n: _median(found[1:]) for n, found in points.items()}
            rows = [
                [str(n), f"{p.rate:,.0f}", f"{p.all:.1f}", f"{p.ledger:.1f}", f"{p.worker:.1f}" if n > 1 else "-",
                 f"{medians[1].busiest / p.busiest:.2f}"]
                for n, p in medians.items()
            ]
            head = ["workers", "a second, here", "CPU µs, all", "ledger's process", "busiest worker",
                    "times one process"]  # fmt: skip
            table.show(f"For {what}, medians of {ROUNDS} rounds", head, rows)


def _median(points: list[Point]) -> Point:
    return Point(*(statistics.median(getattr(p, name) for p in points) for name in ("rate", "all", "ledger", "worker")))


if __name__ == "__main__":
    main()
