"""The cost of the proxy: CPU time for a request and for a paced chunk, and the time it adds, beside other relays.

    python -m tests.bench.overhead [--quick] [--rounds N] [--workers N]

Goals, with capture, journal (fsync) and control plane on, in one run:

- at most 2 × the CPU per request and 1.3 × the CPU per paced chunk of a bare aiohttp relay that captures nothing to
  disk (capture inside mitmproxy stood at 3.7 × and 1.75 ×, LiteLLM at 53 × and 16 ×);
- under 0.6 ms added to the first byte, one at a time;
- 1,000 concurrent paced streams on one process without an error;
- N worker processes give at least 0.8 N.

Beside the bare relay stands one that parses each request and keeps the ids and logprobs of each answer in memory, by
the json module: what any capture costs.

Every round measures each kind in turn, with one load and one canned engine; tables show medians over the rounds. CPU
time is that of the relaying processes alone. An agent keeps its connection; an episode has ten of its calls. A stream's
share of its request is part of its chunks' cost. What a whole request or an event takes to arrive is compared with the
direct connection. How much faster several workers are is told from CPU time, since load, engine and proxy share the
cores here: what the busiest of their processes spends on a request, against what one process spends.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from tests.bench import load, rivals, table
from tests.bench.load import Load
from tests.bench.rivals import BARE, DIRECT, KEEPING, PROXY, SLOW, Rival
from tests.bench.table import verdict

REQUEST, ALONE, FIRST, MANY = "request", "alone", "first byte", "1,000"
FULL: Mapping[str, Load] = {
    REQUEST: Load(32, 40),
    ALONE: Load(1, 100),
    FIRST: Load(1, 100, chunks=3, gap_ms=1),
    "1": Load(1, 1, chunks=200, gap_ms=10),
    "32": Load(32, 1, chunks=200, gap_ms=25, ramp_s=0.5),
    "256": Load(256, 1, chunks=200, gap_ms=50, ramp_s=1.0),
    MANY: Load(1000, 1, chunks=200, gap_ms=100, ramp_s=2.0),
}
QUICK: Mapping[str, Load] = {
    REQUEST: Load(32, 20),
    ALONE: Load(1, 50),
    FIRST: Load(1, 50, chunks=3, gap_ms=1),
    "32": Load(32, 1, chunks=200, gap_ms=15, ramp_s=0.2),
    "256": Load(256, 1, chunks=200, gap_ms=35, ramp_s=0.5),
}
BEYOND = {SLOW: ("256", MANY)}
"""Not asked of LiteLLM: measured to fail at 1,500 chunks a second."""
WARM_UP = (Load(32, 10), Load(32, 1, chunks=20, gap_ms=10))


@dataclass(frozen=True, slots=True)
class Point:
    """One kind under one load in one round: CPU microseconds a request or a chunk, of all and of its busiest process;
    milliseconds (median, 99th percentile) to the first event, to the last byte and of an event under way."""

    cpu: float
    busiest: float
    first: tuple[float, float]
    whole: tuple[float, float]
    late: tuple[float, float]
    errors: Counter[str]


def measure(rival: Rival, some: Load, name: str) -> Point:
    before = rival.processes()
    seen = asyncio.run(load.run(rival.port, some, path=rival.path, name=name))
    used = [seconds - before.get(pid, 0.0) for pid, seconds in rival.processes().items()] or [0.0]
    per = some.agents * some.turns * max(some.chunks, 1) / 1e6
    first, whole, late = (load.spread(values) for values in (seen.first, seen.whole, seen.late))
    return Point(sum(used) / per, max(used) / per, first, whole, late, +seen.errors)


class Results:
    """All points, by kind and load."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, str], list[Point]] = defaultdict(list)

    def add(self, kind: str, what: str, point: Point) -> None:
        self._points[kind, what].append(point)

    def has(self, kind: str, what: str) -> bool:
        return (kind, what) in self._points

    def cpu(self, kind: str, what: str) -> float:
        return statistics.median(point.cpu for point in self._points[kind, what])

    def busiest(self, kind: str, what: str) -> float:
        return statistics.median(point.busiest for point in self._points[kind, what])

    def ratio(self, kind: str, what: str, other: str = BARE) -> float:
        return self.cpu(kind, what) / self.cpu(other, what)

    def ms(self, kind: str, what: str, key: str, place: int = 0) -> float:
        found: list[tuple[float, float]] = [getattr(point, key) for point in self._points[kind, what]]
        return statistics.median(times[place] for times in found)

    def added(self, kind: str, what: str, key: str, place: int = 0) -> float:
        return self.ms(kind, what, key, place) - self.ms(DIRECT, what, key, place)

    def errors(self, kind: str, what: str) -> Counter[str]:
        return sum((point.errors for point in self._points[kind, what]), Counter[str]())


def show(results: Results, kinds: Sequence[str], loads: Mapping[str, Load], rounds: int) -> None:
    rows = []
    for kind in kinds:
        cpu = [f"{results.cpu(kind, REQUEST):.0f}", f"{results.ratio(kind, REQUEST):.2f}"]
        lone, first = results.added(kind, ALONE, "whole"), results.added(kind, FIRST, "first")
        rows.append([kind, *(cpu if kind != DIRECT else ["-", "-"]), plain(lone), plain(first),
                     str(errors(results, kind, (REQUEST, ALONE, FIRST)))])  # fmt: skip
    head = ["", "CPU µs a request", "× aiohttp relay", "ms added to a lone request", "ms added to the first event",
            "errors"]  # fmt: skip
    title = f"Requests: documents, {loads[REQUEST].agents} at once, and one at a time; medians of {rounds} rounds"
    table.show(title, head, rows)
    head = ["", "CPU µs a chunk", "× aiohttp relay", "ms added to first event: median", "99 %",
            "ms added to each event: median", "99 %", "errors"]  # fmt: skip
    for what in (name for name in loads if name[0].isdigit()):
        some, rows = loads[what], []
        for kind in (kind for kind in kinds if results.has(kind, what)):
            cpu = [f"{results.cpu(kind, what):.1f}", f"{results.ratio(kind, what):.2f}"]
            times = [results.added(kind, what, key, place) for key in ("first", "late") for place in (0, 1)]
            rows.append([kind, *(cpu if kind != DIRECT else ["-", "-"]), *map(plain, times),
                         str(errors(results, kind, (what,)))])  # fmt: skip
        title = f"{what} streams at once, {some.chunks} chunks each, one every {some.gap_ms} ms"
        table.show(title, head, rows)


def plain(ms: float) -> str:
    return "-" if isnan(ms) else f"{ms:.2f}"


def errors(results: Results, kind: str, loads: Sequence[str]) -> int:
    return sum(results.errors(kind, what).total() for what in loads if results.has(kind, what))


def verdicts(results: Results, kinds: Sequence[str], loads: Mapping[str, Load]) -> list[str]:
    """A line for each goal: met or not, with its figure."""
    chunks = {what: results.ratio(PROXY, what) for what in loads if what[0].isdigit() and what != "1"}
    worst = max(chunks, key=lambda what: chunks[what])
    request, first = results.ratio(PROXY, REQUEST), results.added(PROXY, FIRST, "first")
    lines = [
        verdict(request <= 2, "at most 2 × the CPU per request", f"{request:.2f} ×"),
        verdict(chunks[worst] <= 1.3, "at most 1.3 × the CPU per paced chunk", f"{chunks[worst]:.2f} ×, at {worst}"),
        verdict(first < 0.6, "under 0.6 ms added to the first byte, one at a time", f"{first:.2f} ms"),
    ]
    if results.has(PROXY, MANY):
        failed = results.errors(PROXY, MANY)
        figure = str(dict(failed) or "0 errors")
        lines.append(verdict(not failed, "1,000 concurrent paced streams on one process without an error", figure))
    for kind in kinds:
        if kind.startswith(f"{PROXY}, "):
            count = int(kind.removeprefix(f"{PROXY}, ").split()[0])
            gain = results.busiest(PROXY, REQUEST) / results.busiest(kind, REQUEST)
            goal = f"{count} worker processes give at least {0.8 * count:g} ×"
            lines.append(verdict(gain >= 0.8 * count, goal, f"{gain:.2f} ×"))
    beside = {what: f"{results.ratio(PROXY, what, KEEPING):.2f} ×" for what in (REQUEST, *chunks)}
    streams = ", ".join(f"{beside[what]} at {what}" for what in chunks)
    lines.append(f"besides: of a relay that captures in memory, {beside[REQUEST]} a request, a chunk {streams}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="The proxy's overhead beside other relays.")
    parser.add_argument("--quick", action="store_true", help="only what the goals are about; under 90 s")
    parser.add_argument("--rounds", type=int, help="rounds to take medians of (3; 2 with --quick)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the last kind")
    options = parser.parse_args()
    rivals.raise_limit()
    loads, rounds = QUICK if options.quick else FULL, options.rounds or (2 if options.quick else 3)
    results = Results()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        everyone = stack.enter_context(rivals.all_of(folder, workers=options.workers, quick=options.quick))
        for rival in everyone:
            for number, some in enumerate(WARM_UP):
                measure(rival, some, f"warm-{number}")
        for number in range(rounds):
            for what, some in loads.items():
                for rival in everyone:
                    if what not in BEYOND.get(rival.name, ()):
                        results.add(rival.name, what, measure(rival, some, f"{number}-{some.agents}-{some.chunks}"))
            sys.stderr.write(f"round {number + 1} of {rounds} done\n")
    kinds = [rival.name for rival in everyone]
    show(results, kinds, loads, rounds)
    sys.stdout.write("\n".join(verdicts(results, kinds, loads)) + "\n")


if __name__ == "__main__":
    main()
