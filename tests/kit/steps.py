"""The work that something is, on any machine, however busy: in function calls, or in processor time."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def steps(work: Callable[[], object]) -> int:
    """Calls of Python functions, and of C functions from Python, that `work` makes; those of a collection are not."""
    with counting() as made:
        work()
    return made()


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Tells how many such calls this thread has made since the block began."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        yield lambda: made
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()


def processor_s(run: Callable[[], T]) -> tuple[T, float]:
    """The result of `run`, and the seconds of processor time of the programs that it ran to their end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return given, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def own_s(work: Callable[[], object], runs: int) -> float:
    """The seconds of processor time that `work` takes here, the median of some `runs`."""
    seconds = []
    for _ in range(runs):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def is_within(times: float, small: Callable[[], object], large: Callable[[], object], tries: int = 5) -> bool:
    """Tell whether `large` takes less than so many `times` the processor time of `small` in any of the `tries`. In some
    of them a busy machine may be slower for the one than for the other."""

    def best_s(work: Callable[[], object]) -> float:
        return min(own_s(work, 1) for _ in range(3))

    return any(best_s(large) < times * max(best_s(small), 1e-4) for _ in range(tries))
