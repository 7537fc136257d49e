"""The cost of a look at a daemon that holds many episodes: CPU time of one answer, without the socket's part.

    python -m tests.bench.control

Goal: ``status`` and metrics stay cheap at 10,000 episodes: at most 2 ms of CPU, and no more than twice of what they
cost at 1,000. Beside them: the overview that ``ajet top`` and the page ask for, the latest episodes, and what the
daemon itself does every second to find the episodes that ran out of time.

Goal: at 10,000 episodes, 100 lanes with shares and 1,000 clients, the choice of a lease of 8 groups takes under 2 ms,
and so does ``wanted``, which every client asks before each episode. A choice grows with what it takes: beside it stands
one of 64 groups.

A third of the episodes is open, a third is ready to be leased, a third was discarded. Every one has two calls, and
shares its task with seven others. A lease that waits looks again whenever an episode became ready or left; it looks at
a daemon of its own, where all episodes are ready, of six calls each, and each group lacks one. A lease of old groups is
of a daemon where all groups are whole, and a trainer with a ``max_staleness`` finds each of them past half of it. The
clients of a swarm have played equally much. Four fifths of their episodes are ready, in whole groups that are a version
older or younger; the others are open. Where a lane is waited for, it is the one that has the eighth turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ajet_proxy.core.control import api
from ajet_proxy.core.ledger.views import made
from ajet_proxy.io.control import gauges
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.limits import MAX_LANES
from ajet_sdk.routes import Lease, SetMix
from tests.bench import table
from tests.kit.control_rig import Caller
from tests.kit.ledger_rig import SETTINGS, LedgerRig
from tests.kit.steps import own_s

SIZES = (100, 1_000, 10_000)
RUNS = 15
GROUP = 8
OURS = replace(SETTINGS, group_size=GROUP)
LIMIT_MS, GROWTH = 2.0, 2.0
CHEAP = ("status", "metrics")
CLIENTS = 1_000
LARGE = "a lease of 64 groups"
LANES = tuple(f"lane-{number:02d}" for number in range(MAX_LANES))


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


def swarm(lanes: Sequence[str], behind: int = 0) -> LedgerRig:
    """The most episodes, of a thousand clients in these of all lanes. The older half is `behind` versions behind."""
    rig = LedgerRig(OURS)
    rig.announce(version=behind)
    shares = dict.fromkeys(LANES, 1 / len(LANES))
    rig.run(rig.commands.leases.set_mix(SetMix(shares, ahead=len(LANES) * 40, group_size=GROUP), at=rig.at))
    clients = [
        rig.join(f"host-{number}", id=f"c{number}", lane=lanes[number % len(lanes)], revision="r", ttl_s=3600.0)
        for number in range(CLIENTS)
    ]
    per_lane = CLIENTS // len(lanes)
    for number in range(SIZES[-1]):
        group = number // GROUP
        row, lane = divmod(group, len(lanes))
        client = clients[lane + len(lanes) * (number % per_lane)]
        episode = rig.open(task=f"task-{row}", client=client, idle_timeout=1e9)
        rig.call(episode, (1, 2), (3,), version=0 if group % 2 else behind)
        if row % 5 != 4:
            rig.reward(episode)
    return rig


def lease(of: LedgerRig, groups: int, **more: Any) -> bytes:
    """The answer to a trainer that asks for so many groups. Nothing comes of it."""
    return repr(of.commands.leases.lease(Lease(groups=groups, group_size=GROUP, **more), batch="b", at=of.at)).encode()


def asked(rig: LedgerRig, path: str, **query: str) -> bytes:
    answer = api.decide(Caller(rig).asked("GET", path, query=query))
    return json.dumps({name: made(part) for name, part in (answer.body() or {}).items()}).encode()


def answers_of_a_swarm() -> Mapping[str, Callable[[], bytes]]:
    """The answers that a trainer and its clients ask of a swarm."""
    rig, old, waiting = swarm(LANES), swarm(LANES, behind=6), swarm((*LANES[:7], *LANES[8:]))
    least = {"min_group_size": 2}
    return {
        "wanted": lambda: asked(rig, "/wanted"),
        "the room of a lane": lambda: repr(rig.state.mixes.room(LANES[7])).encode(),
        "a lease of 8 groups": lambda: lease(rig, 8, **least),
        "a lease of 8 groups, half of them past half of max_staleness": lambda: lease(old, 8, max_staleness=6, **least),
        "a lease of 8 groups that waits for a lane": lambda: lease(waiting, 8, **least),
        LARGE: lambda: lease(rig, 64, **least),
    }


def answers(rig: LedgerRig, ready: LedgerRig, old: LedgerRig) -> Mapping[str, Callable[[], bytes]]:
    """The questions, each as a function that makes the bytes of the answer."""
    gate, metrics = Gatekeeper(is_open=lambda model: True, hold_s=1.0), Metrics()
    engines = Engines({"": ("http://a",)}, rig.state.weights.upstreams, rig.state.weights.models)
    store: Any = SimpleNamespace(state=rig.state, healthy=True, alerts=dict, limits=None)

    def scrape() -> bytes:
        return metrics.render(gauges.read(store, gate, engines, {}, 0)).encode()

    return {
        "status": lambda: asked(rig, "/status"),
        "metrics": scrape,
        "overview": lambda: asked(rig, "/overview"),
        "an episode": lambda: asked(rig, f"/episodes/{next(iter(rig.state.episodes))}"),
        "the latest 100 episodes": lambda: asked(rig, "/episodes", limit="100"),
        "every second": lambda: repr(rig.commands.expire(rig.at)).encode(),
        "a lease that waits": lambda: lease(ready, 4),
        "a lease with max_staleness": lambda: lease(ready, 4, max_staleness=4),
        "a lease of old groups": lambda: lease(old, 4, max_staleness=6),
    }


def measured(ask: Callable[[], bytes]) -> tuple[float, int]:
    """Milliseconds of an answer, the median, and its bytes."""
    return own_s(ask, RUNS) * 1e3, len(ask())


def main() -> None:
    found: dict[str, list[tuple[float, int]]] = {}
    rig, ready, old, before = LedgerRig(OURS), LedgerRig(OURS), LedgerRig(OURS), 0
    for size in SIZES:
        fill(rig, before, size)
        fill_ready(ready, before, size)
        fill_old(old, before, size)
        before = size
        for name, ask in answers(rig, ready, old).items():
            found.setdefault(name, []).append(measured(ask))
    rows = [[name, *(f"{ms:.2f}" for ms, _ in some), f"{some[-1][1]:,}"] for name, some in found.items()]
    head = ["asked for", *(f"CPU ms, {size:,} episodes" for size in SIZES), f"bytes at {SIZES[-1]:,}"]
    table.show(f"Looking at a daemon, medians of {RUNS} runs", head, rows)
    for name in CHEAP:
        *_, (some_ms, _), (many_ms, _) = found[name]
        met = many_ms <= LIMIT_MS and many_ms <= GROWTH * some_ms
        grown = f"{many_ms / some_ms:.1f} × of what it is at 1,000"
        table.verdicts([(f"{name} at 10,000 episodes: {many_ms:.2f} ms, {grown}", met)])
    of_a_swarm = {name: measured(ask) for name, ask in answers_of_a_swarm().items()}
    title = f"A swarm: {SIZES[-1]:,} episodes, {len(LANES)} lanes, {CLIENTS:,} clients"
    table.show(title, ["asked for", "CPU ms"], [[name, f"{ms:.2f}"] for name, (ms, _) in of_a_swarm.items()])
    worst = max(ms for name, (ms, _) in of_a_swarm.items() if name != LARGE)
    table.verdicts([(f"what a swarm asks: {worst:.2f} ms at most", worst < LIMIT_MS)])


if __name__ == "__main__":
    main()
