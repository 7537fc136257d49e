"""The differential fuzz: what a client sees through the proxy, against what it would have seen without.

    python -m tests.fuzz [--seed N] [--count N] [--case NAME]

Each case follows from its name, ``SEED/NUMBER``, alone, so that one line repeats a failure. Most are played in the core
(`core_cases`), some over real sockets (`socket_cases`). Exits 1 when a case failed, and 2 on bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fuzz import core_cases, socket_cases
from tests.fuzz.core_cases import Case

LIMIT_S = 300.0
"""A case that takes longer hangs."""
SHOWN = 10


@dataclass(slots=True)
class Tally:
    """The outcome of the cases so far."""

    cases: int = 0
    failed: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[Case]:
        """The case `name`; if it fails, that is noted."""
        case = Case(name, counts=self.counts)
        self.cases += 1
        try:
            yield case
        except (Exception, Hang) as error:
            self.failed.append(name)
            if len(self.failed) <= SHOWN:
                say(f"\nfailed: {name}; to repeat it alone: make fuzz CASE={name}")
                for line in (*case.notes, *traceback.format_exception(error)):
                    say(f"  {line[:4000]}")


class Hang(BaseException):
    """A case does not come to an end. No `Exception`, so that nothing on the way can take it for its own."""


@contextlib.contextmanager
def limit() -> Iterator[None]:
    """Raise `Hang` in code that takes too long."""

    def late(_number: int, _frame: object) -> None:
        raise Hang(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def play(name: str, tally: Tally) -> None:
    """One case of the core."""
    with tally.case(name) as case, limit():
        core_cases.run(case)


async def play_over_sockets(names: list[str], tally: Tally) -> None:
    """The cases `names`, one after another, through one proxy."""
    async with socket_cases.Wire() as wire:
        for name in names:
            with tally.case(name) as case:
                async with asyncio.timeout(LIMIT_S):
                    await wire.play(case)


def run(seed: int, count: int, sockets: int) -> Tally:
    """`count` cases in all, `sockets` of them over sockets."""
    tally = Tally()
    for number in range(count - sockets):
        play(f"{seed}/{number}", tally)
    asyncio.run(play_over_sockets([f"{seed}/s{number}" for number in range(sockets)], tally))
    return tally


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="The differential fuzz.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100_000, help="cases in all, a fortieth over sockets")
    parser.add_argument("--case", help="play this one alone, by the name that a failure printed")
    given = parser.parse_args()
    logging.getLogger("ajet_proxy").setLevel(logging.ERROR)  # engines that break off are no news here
    if given.case is not None:
        tally = Tally()
        if given.case.partition("/")[2].startswith("s"):
            asyncio.run(play_over_sockets([given.case], tally))
        else:
            play(given.case, tally)
    else:
        tally = run(given.seed, given.count, given.count // 40)
    for name, number in sorted(tally.counts.items()):
        say(f"{number:>9,}  {name}")
    seconds = time.monotonic() - tally.began
    say(f"{tally.cases:,} cases in {seconds:.0f} s, {len(tally.failed)} failed (seed {given.seed})")
    sys.exit(1 if tally.failed else 0)


if __name__ == "__main__":
    main()
