"""What traffic costs: CPU a request with it and without, and CPU of a judge by function for each episode.

    python -m tests.bench.traffic.cost [--rounds N]

Goals: the medians over rounds in turn differ by less than the rounds of one kind do; a judge takes at most 3 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bench import overhead, rivals, table
from tests.bench.load import Load
from tests.bench.rivals import Rival, cpu_seconds, server
from tests.bench.traffic.run import judging
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess
from tests.kit.stub_process import stub_process

ASKED = Load(32, 40)
EPISODES = Load(16, 50, per_episode=2)
ALL = EPISODES.agents * EPISODES.turns // EPISODES.per_episode
SEALED = ("--traffic", "people", "--traffic-idle", "1", "--traffic-holdout", "0")
WARM, MOST_MS, LIMIT_S = 50, 3.0, 600.0
JUDGE = "def score(episode): return {call['call']: 1.0 for call in episode['calls']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    rivals.raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        without, within = requests(Path(folder), rounds)
        judged, ms = judgements(Path(folder))
    rows = [
        [name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}"]
        for name, values in (("no traffic", without), ("all is traffic", within))
    ]
    table.show(f"CPU microseconds a request, {rounds} rounds in turn", ("daemon", "median", "all rounds"), rows)
    added = statistics.median(within) - statistics.median(without)
    scatter = max(statistics.stdev(without), statistics.stdev(within))
    table.verdicts([
        (f"traffic adds {added:+.0f} us a request; a round scatters by {scatter:.0f} us", added < scatter),
        (f"a judge by function takes {ms:.2f} ms of CPU an episode, over {judged}", ms <= MOST_MS),
    ])  # fmt: skip


def requests(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """CPU microseconds a request, of a daemon without traffic and of one with, in each round."""
    engine, used = free_port(), dict[str, list[float]]()
    with ExitStack() as stack:
        stack.enter_context(server("engine", engine))
        kinds = [
            stack.enter_context(rivals.ours(folder / name, engine, *options, name=name))
            for name, options in (("without", ()), ("within", ("--traffic", "people")))
        ]
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                point = overhead.measure(kind, ASKED, f"{kind.name}-{number}")
                if +point.errors:
                    raise RuntimeError(f"{kind.name}: {point.errors}")
                if number:  # the first one warms up
                    used.setdefault(kind.name, []).append(point.cpu)
    return used["without"], used["within"]


def judgements(folder: Path) -> tuple[int, float]:
    """How many episodes were judged, and the judge's CPU milliseconds for each, once it is at work."""
    judge = folder / "judge.py"
    judge.write_text(JUDGE)
    with stub_process() as engine, ProxyProcess(engine, folder / "judged", options=SEALED) as proxy:
        overhead.measure(Rival("judged", proxy.port, proxy.pid, f"/e/{{}}{rivals.CHAT}"), EPISODES, "e")
        reached(proxy, "awaiting", ALL)
        with judging(f"{judge}:score", proxy, folder) as at_work:
            first, before = reached(proxy, "judged", WARM), cpu_seconds(at_work.pid)
            last, after = reached(proxy, "judged", ALL), cpu_seconds(at_work.pid)
    return last - first, 1e3 * (after - before) / (last - first)


def reached(proxy: ProxyProcess, what: str, least: int) -> int:
    """How much of the traffic is `what`, once that is `least`."""
    give_up = time.monotonic() + LIMIT_S
    while (found := int(proxy.report()["traffic"][what])) < least:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{found} of {least} are {what}")
        time.sleep(0.1)
    return found


if __name__ == "__main__":
    main()
