"""The fault harness: real processes, killed and starved again and again, and what they were promised afterwards.

    python -m tests.faults [--seed N] [--kills N] [--others N] [--agents N] [--tears N] [--workers N]
                           [--judges N] [--chats N]

Exits 1 when something acknowledged was lost or doubled, when something incomplete was trained, when the ledger did not
balance or an agent that retries did not succeed; the folder of that run then stays, and is named. 2 on bad usage.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.faults import judges, tears
from tests.faults.agent import MODELS
from tests.faults.audit import Audit
from tests.faults.stage import Stage
from tests.faults.storm import Storm
from tests.faults.trainer import INSTANTS

KILLED = ("proxy", "trainer", "agent", "supervisor", "supervised")
OTHERS = ("write", "full", "freeze", "reset", "clock", "lost", "between")

ROUND = 100
"""For so many kills, each trainer is killed once at each of its instants."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Progress:
    """One line on stderr."""

    def __init__(self) -> None:
        self._began, self._told = time.monotonic(), 0.0

    def __call__(self, line: str, *, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._told > 2.0:
            self._told = now
            sys.stderr.write(f"\r{line}, {now - self._began:.0f} s   " + ("\n" if last else ""))
            sys.stderr.flush()


def storm(
    root: Path, seed: int, kills: int, others: int, agents: int, progress: Progress, counts: Counter[str],
    workers: int = 1,
) -> None:
    """`kills` of each program and `others` of each other kind; `counts` says how many there were, and of what."""
    dice = random.Random(seed)
    stage = Stage(root, seed, agents, workers)
    try:
        audit = Audit(stage, counts)
        killed = KILLED if workers == 1 else (*KILLED, "worker")
        rounds = -(-kills // ROUND)
        instants = {"instant": rounds * len(MODELS) * len(INSTANTS)}
        left = Counter(dict.fromkeys(killed, kills) | dict.fromkeys(OTHERS, others) | instants)
        weather = Storm(stage, audit, dice, left, progress, counts)
        weather.run()
        progress("the storm is over; agents finish", last=True)
        (stage.stops / "agents").touch()
        for worker in stage.agents:
            worker.process.join(900)
            assert worker.process.exitcode == 0, f"an agent ended with {worker.process.exitcode}"
        counts["steps of the supervised run, each made once"] = stage.run.in_the_end(weather.until)
        quiet_down(audit)
        (stage.stops / "trainer").touch()
        for worker in stage.trainers.values():
            worker.process.join(300)
            assert worker.process.exitcode == 0, f"a trainer ended with {worker.process.exitcode}"
        audit.in_the_end()
        assert stage.proxy.stop() == 0
        assert "Traceback" not in stage.proxy.errors(), stage.proxy.errors()[-4000:]
        audit.replayed(stage.proxy.data_dir)
    finally:
        stage.close()


def quiet_down(audit: Audit, limit_s: float = 300.0) -> None:
    """Until the trainers have found nothing to do for a while."""
    give_up, last, since = time.monotonic() + limit_s, None, time.monotonic()
    while time.monotonic() < give_up and time.monotonic() - since < 4.0:
        seen = audit.after_a_fault()
        if seen != last:
            last, since = seen, time.monotonic()
        time.sleep(0.3)


def table(counts: Counter[str]) -> None:
    for name, number in counts.items():
        say(f"{number:>9,}  {name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="The fault harness.")
    parser.add_argument("--seed", type=int, default=1)
    each = "SIGKILLs of each: proxy, trainers, agents, supervisor, its trainer"
    parser.add_argument("--kills", type=int, default=200, help=each)
    parser.add_argument("--others", type=int, default=25, help="of each other fault")
    parser.add_argument("--agents", type=int, default=5, help="at work at a time; two of them are strangers")
    parser.add_argument("--workers", type=int, default=1, help="processes of the proxy; several are killed, too")
    parser.add_argument("--judges", type=int, default=200, help="SIGKILLs of judges, and a tenth of it of their daemon")
    parser.add_argument("--chats", type=int, default=5000, help="of users, which are judged meanwhile; 0: no judges")
    parser.add_argument("--tears", type=int, help="torn tails at most; every byte of the last record of every kind")
    return parser.parse_args()


def main() -> None:
    given, progress = arguments(), Progress()
    logging.getLogger("ajet_proxy").setLevel(logging.ERROR)  # a cut tail is no news here
    root = Path(tempfile.mkdtemp(prefix="ajet-faults-"))
    counts: Counter[str] = Counter()
    (root / "storm").mkdir()
    (root / "tears").mkdir()
    try:
        counts += tears.run(root / "tears", given.seed, given.tears, progress)
        if given.kills or given.others:
            storm(
                root / "storm", given.seed, given.kills, given.others, given.agents, progress, counts, given.workers
            )
        if given.chats:
            told = Counter[str]()
            try:
                judges.storm(root / "judges", given.seed, given.judges, given.judges // 10, given.chats, progress, told)
            finally:
                counts += told
    except BaseException:
        table(counts)
        say(traceback.format_exc())
        say(f"failed with seed {given.seed}; everything is in {root}")
        sys.exit(1)
    table(counts)
    say(f"nothing was lost (seed {given.seed})")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
