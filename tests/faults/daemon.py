"""The real daemon on a bad machine: ``python -m tests.faults.daemon CONDITIONS ajet-proxy serve …``.

What runs is `ajet_proxy.cli` as it is, and its compactions. Only the machine under it is worse, and busier:

- a file ``pwrite``, ``fdatasync`` or ``fsync`` in the folder CONDITIONS makes these calls fail with the error it names;
- a file ``clock`` holds the seconds by which the wall clock is wrong;
- each lease is noted in the file ``leases`` there, as it is applied or read from the journal again;
- so is in ``dropped`` what a discard takes of an episode that others train;
- each request that a gate held is noted in ``holds``, unless worker processes take the requests;
- segments are small and few ended episodes stay in memory, so that journal and archive turn over all the time;
- a worker process that was killed is replaced soon, however often that happens.

Worker processes are those that users have. It leads a process group of its own, so that it can be killed alone or with
all that it started.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ajet_proxy import cli
from ajet_proxy.core.ledger import retention
from ajet_proxy.core.ledger.events import BatchLeased, EpisodeDiscarded, Event, GateOpened
from ajet_proxy.core.ledger.looks import count
from ajet_proxy.core.ledger.model_queue import Demand
from ajet_proxy.core.ledger.state import State
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.storage import compaction, compactor
from ajet_proxy.io.storage.journal import Journal
from ajet_proxy.io.workers import processes as workers
from tests.faults.notes import appending

SEGMENT_BYTES = 48 << 10
KEPT_EPISODES = 10
RETRY_S = 0.2
TURN_S = 0.1
WAITS_S = (0.1, 0.5)
FAILING = ("pwrite", "fdatasync", "fsync")


def failing(real: Callable[..., Any], order: Path) -> Callable[..., Any]:
    """`real`, which fails while the file `order` says so. A refused write has first taken some bytes."""

    def call(*given: Any) -> Any:
        try:
            number = getattr(errno, order.read_text())
        except FileNotFoundError:
            return real(*given)
        if order.name == "pwrite":
            real(given[0], memoryview(given[1])[:7], given[2])
        raise OSError(number, os.strerror(number))

    return call


def worsen(conditions: Path) -> None:
    for name in FAILING:
        setattr(os, name, failing(getattr(os, name), conditions / name))
    right = time.time

    def wrong() -> float:
        return right() + float((conditions / "clock").read_text())

    time.time = wrong


Listener = Callable[[State, Event], None]


def noting(real: Listener, path: Path) -> Listener:
    """`real`, which applies an event to a state, and a note of each lease. A group has as many as are compared. Some of
    them may have been leased before."""
    add = appending(path)

    def call(state: State, event: Event) -> None:
        if not isinstance(event, BatchLeased):
            real(state, event)
            return
        size = state.mixes.of(event.model).mix.group_size or state.settings.group_size
        queue = state.seats.queues.of(event.model)
        had = count(queue, event.model, Demand(1, size))
        groups = []
        for _, names in event.groups:
            keys = sorted({state.episodes[name].group_key for name in names})
            compared = len(names) + len(queue.compared(names))
            groups.append((keys, max(len(names), min(size, compared))))
        number = state.batches.leases
        real(state, event)
        credit = state.mixes.of(event.model).credit
        note = {
            "number": number, "batch": event.batch, "model": event.model, "groups": groups, "had": had,
            "episodes": [name for _, names in event.groups for name in names], "dealt": credit.dealt,
            "owed": credit.owed,
        }
        add(note)

    return call


def dropping(real: Listener, path: Path) -> Listener:
    """`real`, which applies an event to a state, and a note of each discard where other models keep their shares."""
    add = appending(path)

    def call(state: State, event: Event) -> None:
        if isinstance(event, EpisodeDiscarded) and event.models:
            add({"episode": event.episode, "models": event.models, "reason": event.reason})
        real(state, event)

    return call


class Holds:
    """The time for which each request was held, and the part of it in which the gate of its own model was open. Only
    the time counts in which the loop turned: the machine may stand still."""

    def __init__(self, path: Path) -> None:
        self._add = appending(path)
        self._state: State | None = None
        self._opened = defaultdict[str, float](float)
        self._turned = 0.0
        self._turning: asyncio.Task[None] | None = None

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self._turned += TURN_S

    def of(self, real: Listener) -> Listener:
        """`real`, which applies an event to a state."""

        def call(state: State, event: Event) -> None:
            self._state = state
            if isinstance(event, GateOpened):
                self._opened[event.model] = self._turned
            real(state, event)

        return call

    def held(self, real: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """`real`, which holds a request."""

        async def call(keeper: Gatekeeper, passable: Callable[[], bool], model: Callable[[], str], who: str) -> None:
            if self._turning is None:
                self._turning = asyncio.create_task(self._turn())
            state, name, began = self._state, model(), self._turned
            assert state is not None
            shut = state.gates.of(name).shut
            try:
                await real(keeper, passable, model, who)
            finally:
                now = self._turned
                since = self._opened[name] if shut else began
                free = 0.0 if state.gates.of(name).shut else now - max(began, since)
                self._add({"model": name, "held_s": now - began, "free_s": free})

        return call


def note_all(conditions: Path) -> None:
    holds = Holds(conditions / "holds")
    apply = noting(dropping(holds.of(State.apply), conditions / "dropped"), conditions / "leases")
    State.apply = apply  # type: ignore[assignment,method-assign]
    Gatekeeper._hold = holds.held(Gatekeeper._hold)  # type: ignore[assignment,method-assign]


def main() -> None:
    conditions, program = sys.argv[1:3]
    worsen(Path(conditions))
    if program == "compaction":
        compaction.main(sys.argv[3:])
        return
    os.setpgid(0, 0)
    note_all(Path(conditions))
    defaults = Journal.__init__.__kwdefaults__
    assert defaults is not None
    defaults |= {"segment_bytes": SEGMENT_BYTES, "retry_s": RETRY_S}
    compactor.COMMAND = ("-m", "tests.faults.daemon", conditions, "compaction")  # type: ignore[assignment]
    compactor.RETRY_S = RETRY_S
    retention.KEPT_EPISODES = KEPT_EPISODES
    workers.WAITS_S = WAITS_S
    sys.argv = sys.argv[2:]
    cli.main()


if __name__ == "__main__":
    main()
