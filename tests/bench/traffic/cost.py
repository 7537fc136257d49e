"""What traffic costs: CPU a request with it and without; what users wait for while nobody judges and the backlog is
full; CPU of a judge by function for each episode.

    python -m tests.bench.traffic.cost [--rounds N]

Goals: the medians over rounds in turn differ by less than the rounds of one kind do; users wait at most a fifth longer
(99th percentile), get no error, and the backlog keeps to its cap; a judge takes at most 3 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
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
CAP = 1000
FILLS = 1 + CAP // ALL
"""So many rounds fill the backlog."""
WAITING = ("--traffic", "people", "--traffic-idle", "1", "--traffic-backlog", str(CAP))
WARM, MOST_MS, LONGER, LIMIT_S = 50, 3.0, 1.2, 600.0
JUDGE = "def score(episode): return {call['call']: 1.0 for call in episode['calls']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    rivals.raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        (without, _), (within, _) = requests(Path(folder) / "all", rounds, ASKED, ("--traffic", "people"))
        (_, alone), (_, beside) = requests(Path(folder) / "full", rounds, EPISODES, WAITING, full=True)
        judged, ms = judgements(Path(folder))
    in_turn = f"{rounds} rounds in turn"
    shown(f"CPU microseconds a request, {in_turn}", {"no traffic": without, "all is traffic": within})
    shown(f"Milliseconds of the slowest hundredth, {in_turn}", {"no traffic": alone, f"{CAP} chats wait": beside})
    added, longer = statistics.median(within) - statistics.median(without), statistics.median(beside)
    scatter = max(statistics.stdev(without), statistics.stdev(within))
    table.verdicts([
        (f"traffic adds {added:+.0f} us a request; a round scatters by {scatter:.0f} us", added < scatter),
        (f"users wait {longer / statistics.median(alone):.2f} times as long while nobody judges, and get no error",
         longer <= LONGER * statistics.median(alone)),
        (f"a judge by function takes {ms:.2f} ms of CPU an episode, over {judged}", ms <= MOST_MS),
    ])  # fmt: skip


def shown(title: str, found: Mapping[str, Sequence[float]]) -> None:
    rows = [
        [name, f"{statistics.median(values):.1f}", f"{min(values):.1f} to {max(values):.1f}"]
        for name, values in found.items()
    ]
    table.show(title, ("daemon", "median", "all rounds"), rows)


def requests(
    folder: Path, rounds: int, asked: Load, traffic: Sequence[str], *, full: bool = False
) -> list[tuple[list[float], list[float]]]:
    """CPU microseconds a request, and the 99th percentile of what requests take in milliseconds, in each round: of a
    daemon without traffic and of one with. The rounds begin once its backlog is `full`, if that is asked for."""
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
                overhead.measure(kind, asked, f"{kind.name}-warm-{number}")
        if full:
            reached(proxy, "awaiting", CAP)
        for number in range(rounds):
            for kind in kinds if number % 2 else reversed(kinds):
                point = overhead.measure(kind, asked, f"{kind.name}-{number}")
                if +point.errors:
                    raise RuntimeError(f"{kind.name}: {point.errors}")
                used.setdefault(kind.name, []).append(point.cpu)
                waited.setdefault(kind.name, []).append(point.whole[1])
            if full and (awaiting := int(proxy.report()["traffic"]["awaiting"])) > CAP:
                raise RuntimeError(f"{awaiting} await a judgement")
    return [(used[kind.name], waited[kind.name]) for kind in kinds]


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
