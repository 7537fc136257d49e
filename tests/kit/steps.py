"""How much work something is, on any machine, however busy: in function calls, or in processor time of a program."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def steps(work: Callable[[], object]) -> int:
    """Calls of Python functions, and of C functions from Python, that `work` makes; those of a collection are not."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    return made


def processor_s(run: Callable[[], T]) -> tuple[T, float]:
    """What `run` gives, and the seconds of processor time of the programs that it ran to their end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return given, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
