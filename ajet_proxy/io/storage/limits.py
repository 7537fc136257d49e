"""Limits on the disk and memory that the daemon uses, and the requests that are told to come back later.

What counts on disk is the journal and the archive; in memory, what the process really holds (its resident set). Both
are measured on every tick, not on every request. The core then decides which events there is no room for.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.retention import NEARLY, closed_to
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.runtime.process import give_memory_back
from ajet_proxy.io.storage.data_dir import ARCHIVE
from ajet_proxy.io.storage.journal import folder_of
from ajet_sdk.errors import NotReady

RETRY_AFTER_S = 10.0
TIGHT = 0.8
"""Of the memory that is allowed: less than `NEARLY`, so that users are answered while a backlog goes."""
RELIEF_S = 60.0
"""The backlog makes room at most so often, since it takes a while until that is seen."""
COLLECT_S = 60.0
"""Garbage is collected at most so often, because that may hold everybody up for a second."""
STATM = "/proc/{}/statm"


class DaemonLimits:
    """Measures with `measure`. `disk` and `memory` are the bytes used; `closed` tells what each limit that is reached
    keeps out. A limit of 0 is none."""

    def __init__(
        self, data_dir: Path, *, max_disk: int, max_memory: int, metrics: Metrics,
        resident: Callable[[], int] | None = None, measured: Callable[[int], None] = lambda left: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measured` is told each time how many bytes of memory are left, if they are limited. `now` is in seconds."""
        self.disk, self.memory = 0, 0
        self._data_dir = data_dir
        self._limits = {"disk": max_disk, "memory": max_memory}
        self._metrics = metrics
        self._resident = resident or resident_bytes
        self._measured = measured
        self._now, self._collected_at, self._relieved_at = now, -math.inf, -math.inf
        self.tight = False
        """True for once if some of what awaits a judgement has to make room, before anybody is refused."""
        self.measure()

    def measure(self) -> None:
        """Measure again. Before memory keeps anything out, garbage is collected, unless it was just now."""
        self.disk, self.memory = disk_bytes(self._data_dir), self._resident()
        limit = self._limits["memory"]
        if limit and self.memory >= NEARLY * limit:
            if self._now() - self._collected_at >= COLLECT_S:
                gc.collect()
                self._collected_at = self._now()
            give_memory_back()
            self.memory = self._resident()
        if limit:
            self._measured(limit - self.memory)
        self.tight = bool(limit) and self.memory >= TIGHT * limit and self._now() - self._relieved_at >= RELIEF_S
        if self.tight:
            self._relieved_at = self._now()
        closed = {name: closed_to(getattr(self, name), limit) for name, limit in self._limits.items()}
        self.closed = {name: kinds for name, kinds in closed.items() if kinds}

    def refused(self) -> dict[str, list[str]]:
        """For each limit that is reached, the events that are not taken in."""
        return {name: [kind.__name__ for kind in kinds] for name, kinds in self.closed.items()}

    def check(self, events: Sequence[Event]) -> None:
        """`NotReady` if a limit has no room for one of `events`."""
        for name, kinds in self.closed.items():
            if any(isinstance(event, kinds) for event in events):
                self._metrics.inc("ajet_refused_total", reason=name)
                raise NotReady(
                    f"the proxy uses {getattr(self, name)} of the {self._limits[name]} bytes of {name} that it may: "
                    "come back when the trainer has taken some episodes", code=f"{name}_limit",
                    retry_after=RETRY_AFTER_S,
                )


def disk_bytes(data_dir: Path) -> int:
    """The size of the journal and the archive."""
    total = 0
    for path in (*data_dir.glob(f"{ARCHIVE}*"), *folder_of(data_dir).glob("*")):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def resident_bytes(process: str = "self") -> int:
    """The bytes that a process, this one or another, holds in memory; 0 where the system does not say."""
    try:
        return int(Path(STATM.format(process)).read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
