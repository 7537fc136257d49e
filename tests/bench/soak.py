"""Many scripted agents for a long time: memory, descriptors, CPU and latency, minute by minute.

    python -m tests.bench.soak [--minutes 30] [--agents 1000] [--table FILE]

Goal: memory and descriptors stay flat, and latency does not grow. Agents have episodes of six turns, streamed (40
events 100 ms apart) and not, with pauses, and reward them; groups of eight are leased and acknowledged all the while,
and every half minute the weights change behind the gate. The engine is a canned one.

The first quarter (five minutes at most) is the start: connections open, and the proxy fills what it keeps of ended
episodes. After it a line is fitted to each figure; flat is what grows by less than `FLAT` over the rest of the run.
``--table`` writes the table that stands in docs/reports/soak.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_trainer.doctor import memory
from integrations.quickstart.proof import processor
from tests.bench import load, rivals, table
from tests.bench.rivals import Rival, family
from tests.bench.script import Agent, Minute
from tests.bench.table import verdict
from tests.kit.ports import free_port
from tests.kit.source import ROOT

SAMPLE_S, UPDATE_S, START_S = 5.0, 30.0, 300.0
FLAT = 0.05
COMPACTION = "ajet_proxy.io.storage.compaction"
"""A process that lives for a second or two, whose memory is looked at by itself (docs/reports/soak.md)."""
HEAD = ["minute", "calls", "episodes", "memory MB", "descriptors", "CPU %", "disk MB", "first event ms", "99 %",
        "event under way ms", "99 %", "plain call ms", "99 %", "reward ms", "99 %", "errors"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """The proxy's processes at a moment: bytes in RAM (what they share counts once) and descriptors of those that stay,
    CPU seconds so far of all, bytes on disk."""

    at: float
    memory: int
    files: int
    cpu: float
    disk: int


def look(proxy: Rival, data: Path) -> Sample:
    assert proxy.pid is not None
    memory = files = 0
    for pid in family(proxy.pid):
        folder = Path(f"/proc/{pid}")
        try:
            if COMPACTION in (folder / "cmdline").read_text().split("\0"):
                continue
            kept = (folder / "smaps_rollup").read_text()
            files += len(list((folder / "fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):  # a child that ended just now
            continue
        memory += int(kept.partition("\nPss:")[2].split()[0]) * 1024
    disk = 0
    for name in data.rglob("*"):
        with suppress(FileNotFoundError):  # compacted away just now
            disk += name.stat().st_size
    return Sample(time.monotonic(), memory, files, sum(proxy.processes().values()), disk)


class Soak:
    """The agents at work, and what was seen minute by minute."""

    def __init__(self, proxy: Rival, data: Path) -> None:
        self.proxy, self.data = proxy, data
        self.minutes: list[Minute] = [Minute()]
        self.samples: list[Sample] = [look(proxy, data)]
        self.rows: list[list[str]] = []

    async def run(self, agents: int, minutes: float) -> None:
        over, episodes = asyncio.Event(), itertools.count()
        tasks = [asyncio.create_task(Agent(self.proxy.port, n, episodes, lambda: self.minutes[-1], over).live())
                 for n in range(agents)]  # fmt: skip
        end, mark = self.samples[0].at + minutes * 60, len(self.samples) - 1
        while (now := self.samples[-1].at) < end:
            await asyncio.sleep(SAMPLE_S)
            self.samples.append(await asyncio.to_thread(look, self.proxy, self.data))
            if now - self.samples[mark].at >= 60 - SAMPLE_S:
                self._close_minute(self.samples[mark])
                mark = len(self.samples) - 1
        over.set()
        await asyncio.wait(tasks, timeout=90)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close_minute(self, before: Sample) -> None:
        minute, now = self.minutes[-1], self.samples[-1]
        self.minutes.append(Minute())
        seen = (minute.first, minute.late, minute.plain, minute.reward)
        times = [f"{ms:.1f}" for some in seen for ms in load.spread(some)]
        cpu = (now.cpu - before.cpu) / (now.at - before.at) * 100
        row = [str(len(self.rows) + 1), f"{minute.calls:,}", f"{minute.episodes:,}", f"{now.memory / 1e6:.0f}",
               str(now.files), f"{cpu:.0f}", f"{now.disk / 1e6:.0f}", *times, str(minute.errors.total())]  # fmt: skip
        self.rows.append(row)
        sys.stderr.write(" | ".join(row) + "\n")

    @property
    def errors(self) -> Counter[str]:
        return sum((minute.errors for minute in self.minutes), Counter[str]())


def growth(points: Sequence[tuple[float, float]]) -> float:
    """By how much the line through `points` rises from its beginning to its end, as a share of its beginning."""
    slope, start = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    first, last = points[0][0], points[-1][0]
    return slope * (last - first) / (start + slope * first)


def verdicts(soak: Soak, minutes: float) -> list[str]:
    begin = soak.samples[0].at + min(START_S, minutes * 60 / 4)
    steady = [sample for sample in soak.samples if sample.at >= begin]
    lines = []
    for name, unit, key in (("memory", 1e6, "memory"), ("descriptors", 1, "files")):
        points = [(sample.at, float(getattr(sample, key))) for sample in steady]
        grown = growth(points)
        figure = f"{points[0][1] / unit:,.0f} → {points[-1][1] / unit:,.0f}, line {grown:+.1%}"
        lines.append(verdict(grown < FLAT, f"{name} flat after the start", figure))
    kept = soak.rows[len(soak.rows) // 4 :]
    for column, name in {7: "time to the first event", 9: "an event's way", 11: "a plain call", 13: "a reward"}.items():
        medians = [float(row[column]) for row in kept]
        third = max(1, len(medians) // 3)
        before, after = statistics.median(medians[:third]), statistics.median(medians[-third:])
        figure = f"{before:.1f} → {after:.1f} ms"
        lines.append(verdict(after <= before * 1.25 + 0.5, f"{name} does not grow", figure))
    lines.append(verdict(not soak.errors, "no agent saw an error", str(dict(soak.errors) or "0")))
    return lines


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/ajet/v1/status") as answer:
        return dict(json.load(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description="Scripted agents for a long time.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--table", type=Path, help="write the minutes, the verdict and the date here, as Markdown")
    options = parser.parse_args()
    if options.minutes < 2:
        parser.error("--minutes: 2 at least, the start and something to compare with it")
    rivals.raise_limit()
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-soak-"))) / "data"
        engine = free_port()
        stack.enter_context(rivals.server("engine", engine))
        proxy = stack.enter_context(rivals.ours(data, engine, "--gate-mode=pause"))
        url = f"http://127.0.0.1:{proxy.port}"
        command = [sys.executable, "-m", "tests.bench.consumer", url, str(UPDATE_S)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as consumer:
            soak = Soak(proxy, data)
            asyncio.run(soak.run(options.agents, options.minutes))
            trained, _ = consumer.communicate()
        episodes = status(url)["episodes"]
    balanced = episodes["opened"] == sum(count for state, count in episodes.items() if state != "opened")
    lines = [*verdicts(soak, options.minutes), verdict(balanced, "the ledger balances", json.dumps(episodes)),
             f"the consumer: {trained.strip()}"]  # fmt: skip
    title = f"{options.agents:,} agents for {options.minutes:g} minutes"
    table.show(title, HEAD, soak.rows)
    sys.stdout.write("\n".join(lines) + "\n")
    if options.table:
        where = f"{time.strftime('%Y-%m-%d')}, {processor()}, {(memory('MemTotal') or 0) / 2**30:.0f} GiB"
        text = [f"{title}: {where}", "", *table.markdown(HEAD, soak.rows), "", *(f"- {line}" for line in lines)]
        options.table.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
