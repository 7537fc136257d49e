"""What traffic costs: CPU a request with it and without; what users wait for while nobody judges and the backlog is
full; CPU of a judge by function for each episode.

    python -m tests.bench.traffic.cost [--rounds N] [--away MINUTES]

Goals: the medians over rounds in turn differ by less than the rounds of one kind do; users wait at most a fifth longer
(99th percentile), get no error, and the backlog keeps to its cap; a judge takes at most 3 ms.

Users wait twice: for an engine that answers at once, asked as fast as can be, and for one that writes half a second.
With ``--away`` the second goes on for so many minutes, and is all that is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, takewhile
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
WRITTEN = Load(32, 10, chunks=20, gap_ms=25, per_episode=2)
ALL = EPISODES.agents * EPISODES.turns // EPISODES.per_episode
SEALED = ("--traffic", "people", "--traffic-idle", "1", "--traffic-holdout", "0")
CAP = 1000
FILLS = 1 + CAP // ALL
"""So many rounds fill the backlog."""
WAITING = ("--traffic", "people", "--traffic-idle", "1", "--traffic-backlog", str(CAP))
WARM, MOST_MS, LONGER, LIMIT_S = 50, 3.0, 1.2, 600.0
JUDGE = "def score(episode): return {call['call']: 1.0 for call in episode['calls']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--away", type=float, default=0.0, metavar="MINUTES")
    arguments = parser.parse_args()
    rounds, away_s = arguments.rounds, 60 * arguments.away
    rivals.raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        written = partial(waits, Path(folder) / "written", rounds, WRITTEN, "answers of half a second")
        found = [written(away_s)] if away_s else [
            cpu(Path(folder), rounds), waits(Path(folder) / "at-once", rounds, EPISODES, "answers at once"),
            written(), judgements(Path(folder)),
        ]  # fmt: skip
    table.verdicts(found)


def cpu(folder: Path, rounds: int) -> tuple[str, bool]:
    """Measure CPU a request where all is traffic, and where nothing is."""
    (without, _), (within, _) = requests(folder / "all", rounds, ASKED, ("--traffic", "people"))
    shown("CPU microseconds a request", {"no traffic": without, "all is traffic": within})
    added = statistics.median(within) - statistics.median(without)
    scatter = max(statistics.stdev(without), statistics.stdev(within))
    return f"traffic adds {added:+.0f} us a request; a round scatters by {scatter:.0f} us", added < scatter


def waits(folder: Path, rounds: int, asked: Load, what: str, least_s: float = 0.0) -> tuple[str, bool]:
    """Measure how long users wait while nobody judges and the backlog is full, and without traffic."""
    (_, alone), (_, beside) = requests(folder, rounds, asked, WAITING, full=True, least_s=least_s)
    shown(f"Milliseconds of the slowest hundredth, {what}", {"no traffic": alone, f"{CAP} chats wait": beside})
    longer = statistics.median(beside) / statistics.median(alone)
    return f"users wait {longer:.2f} times as long while nobody judges, and get no error: {what}", longer <= LONGER


def shown(title: str, found: Mapping[str, Sequence[float]]) -> None:
    rows = [
        [name, f"{statistics.median(values):.1f}", f"{min(values):.1f} to {max(values):.1f}", str(len(values))]
        for name, values in found.items()
    ]
    table.show(title, ("daemon", "median", "all rounds", "rounds in turn"), rows)


def requests(
    folder: Path, rounds: int, asked: Load, traffic: Sequence[str], *, full: bool = False, least_s: float = 0.0
) -> list[tuple[list[float], list[float]]]:
    """CPU microseconds a request, and the 99th percentile of what requests take in milliseconds, in each round: of a
    daemon without traffic and of one with. The rounds begin once its backlog is `full`, if that is asked for, and go on
    for at least `least_s`."""
    engine, used, waited = free_port(), dict[str, list[float]](), dict[str, list[float]]()
    folder.mkdir()
    with ExitStack() as stack:
        stack.enter_context(server("engine", engine))
        url, kinds = f"http://127.0.0.1:{engine}", list[Rival]()
        for name, options in (("without", ()), ("within", traffic)):
            proxy = stack.enter_context(ProxyProcess(url, folder / name, options=options))
            kinds.append(Rival(name, proxy.port, proxy.pid, f"/e/{{}}{rivals.CHAT}"))
        for number in range(FILLS if full else 1):  # these warm up as well
            for kind in kinds:
                overhead.measure(kind, EPISODES if full else asked, f"{kind.name}-warm-{number}")
        if full:
            reached(proxy, "awaiting", CAP)
        began = time.monotonic()
        for number in takewhile(lambda one: one < rounds or time.monotonic() < began + least_s, count()):
            for kind in kinds if number % 2 else reversed(kinds):
                point = overhead.measure(kind, asked, f"{kind.name}-{number}")
                if +point.errors:
                    raise RuntimeError(f"{kind.name}: {point.errors}")
                used.setdefault(kind.name, []).append(point.cpu)
                waited.setdefault(kind.name, []).append(point.whole[1])
            if full and (awaiting := int(proxy.report()["traffic"]["awaiting"])) > CAP:
                raise RuntimeError(f"{awaiting} await a judgement")
    return [(used[kind.name], waited[kind.name]) for kind in kinds]


def judgements(folder: Path) -> tuple[str, bool]:
    """Measure the CPU of a judge by function for each episode, once it is at work."""
    judge = folder / "judge.py"
    judge.write_text(JUDGE)
    with stub_process() as engine, ProxyProcess(engine, folder / "judged", options=SEALED) as proxy:
        overhead.measure(Rival("judged", proxy.port, proxy.pid, f"/e/{{}}{rivals.CHAT}"), EPISODES, "e")
        reached(proxy, "awaiting", ALL)
        with judging(f"{judge}:score", proxy, folder) as at_work:
            first, before = reached(proxy, "judged", WARM), cpu_seconds(at_work.pid)
            last, after = reached(proxy, "judged", ALL), cpu_seconds(at_work.pid)
    judged = last - first
    ms = 1e3 * (after - before) / judged
    return f"a judge by function takes {ms:.2f} ms of CPU an episode, over {judged}", ms <= MOST_MS


def reached(proxy: ProxyProcess, what: str, least: int) -> int:
    """The number of chats that are `what`, once it is `least`."""
    give_up = time.monotonic() + LIMIT_S
    while (found := int(proxy.report()["traffic"][what])) < least:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{found} of {least} are {what}")
        time.sleep(0.1)
    return found


if __name__ == "__main__":
    main()
