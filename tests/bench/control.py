"""What it costs to look at a daemon that holds many episodes: CPU time of one answer, without the socket's part.

    python -m tests.bench.control

Goal: ``status`` and metrics stay cheap at 10,000 episodes: at most 2 ms of CPU, and no more than twice of what they
cost at 1,000. Beside them: the overview that ``ajet top`` and the page ask for, the latest episodes, and what the
daemon itself does every second to find the episodes that ran out of time.

A third of the episodes is open, a third is ready to be leased, a third was discarded. Every one has two calls, and
shares its task with seven others. A lease that waits looks again whenever an episode became ready or left; it looks at
a daemon of its own, where all episodes are ready, of six calls each, and each group lacks one. A lease of old groups is
of a daemon where all groups are whole, and a trainer with a ``max_staleness`` finds each of them past half of it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ajet_proxy.core.control.api import Request, handle
from ajet_proxy.core.identity.keys import EVERYTHING
from ajet_proxy.io.control import gauges
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.routes import Lease
from tests.bench import table
from tests.kit.ledger_rig import LedgerRig, matched

SIZES = (100, 1_000, 10_000)
RUNS = 15
GROUP = 8
LIMIT_MS, GROWTH = 2.0, 2.0
CHEAP = ("status", "metrics")


def fill(rig: LedgerRig, before: int, wanted: int) -> None:
    """From `before` to `wanted` episodes."""
    for number in range(before, wanted):
        episode = rig.open(task=f"task-{number // 24}", idle_timeout=1e9)
        rig.call(episode, (1, 2), (3,))
        rig.call(episode, (1, 2, 3, 4), (5, 6))
        if number % 3 == 1:
            rig.reward(episode)
        elif number % 3 == 2:
            rig.abort(episode)


def fill_ready(rig: LedgerRig, before: int, wanted: int) -> None:
    """From `before` to `wanted` episodes that are ready."""
    for number in range(before, wanted):
        episode = rig.open(task=f"task-{number // (GROUP - 1)}")
        for turn in range(6):
            rig.call(episode, range(2 * turn + 1), (1, 2))
        rig.reward(episode)


def fill_old(rig: LedgerRig, before: int, wanted: int) -> None:
    """From `before` to `wanted` ready episodes of whole groups, which are four, five or six versions behind."""
    rig.announce(version=6)
    for number in range(before, wanted):
        rig.ready(f"task-{number // GROUP}", version=number // GROUP % 3)


def answers(rig: LedgerRig, ready: LedgerRig, old: LedgerRig) -> Mapping[str, Callable[[], bytes]]:
    """What is asked, each as a function that makes the bytes of the answer."""
    gate, metrics = Gatekeeper(is_open=lambda model: True, hold_s=1.0), Metrics()
    engines = Engines({"": ("http://a",)}, rig.state.upstreams, rig.state.models)
    store: Any = SimpleNamespace(state=rig.state, healthy=True, alerts=dict, limits=None)

    def asked(path: str, **query: str) -> bytes:
        request = Request(*matched("GET", path), query, None, EVERYTHING)
        answer = handle(rig.commands, request, at=rig.at, new_id=rig.id, keys=lambda *_: "", base="")
        return json.dumps(answer.body()).encode()

    def scrape() -> bytes:
        return metrics.render(gauges.read(store, gate, engines, {})).encode()

    def look(max_staleness: int | None = None) -> bytes:
        body = Lease(groups=4, group_size=GROUP, max_staleness=max_staleness)
        return repr(ready.commands.lease(body, batch="b", at=ready.at)).encode()

    def lease_of_old() -> bytes:
        body = Lease(groups=4, group_size=GROUP, max_staleness=6)
        return repr(old.commands.lease(body, batch="b", at=old.at)).encode()

    return {
        "status": lambda: asked("/status"),
        "metrics": scrape,
        "overview": lambda: asked("/overview"),
        "an episode": lambda: asked(f"/episodes/{next(iter(rig.state.episodes))}"),
        "the latest 100 episodes": lambda: asked("/episodes", limit="100"),
        "every second": lambda: repr(rig.commands.expire(rig.at)).encode(),
        "a lease that waits": look,
        "a lease with max_staleness": lambda: look(max_staleness=4),
        "a lease of old groups": lease_of_old,
    }


def main() -> None:
    found: dict[str, list[tuple[float, int]]] = {}
    rig, ready, old, before = LedgerRig(), LedgerRig(), LedgerRig(), 0
    for size in SIZES:
        fill(rig, before, size)
        fill_ready(ready, before, size)
        fill_old(old, before, size)
        before = size
        for name, ask in answers(rig, ready, old).items():
            seconds = []
            for _ in range(RUNS):
                began = time.process_time()
                answer = ask()
                seconds.append(time.process_time() - began)
            found.setdefault(name, []).append((statistics.median(seconds) * 1e3, len(answer)))
    rows = [[name, *(f"{ms:.2f}" for ms, _ in some), f"{some[-1][1]:,}"] for name, some in found.items()]
    head = ["asked for", *(f"CPU ms, {size:,} episodes" for size in SIZES), f"bytes at {SIZES[-1]:,}"]
    table.show(f"Looking at a daemon, medians of {RUNS} runs", head, rows)
    for name in CHEAP:
        *_, (some_ms, _), (many_ms, _) = found[name]
        met = many_ms <= LIMIT_MS and many_ms <= GROWTH * some_ms
        sys.stdout.write(f"{'met    ' if met else 'NOT MET'}  {name} at 10,000 episodes: {many_ms:.2f} ms, "
                         f"{many_ms / some_ms:.1f} × of what it is at 1,000\n")  # fmt: skip


if __name__ == "__main__":
    main()
