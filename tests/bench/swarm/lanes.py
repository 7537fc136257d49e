"""Two kinds of task that share one model, while one kind is stopped and started again."""

from __future__ import annotations

import signal
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from integrations.quickstart import plot
from tests.bench import table
from tests.bench.swarm.kills import adds_up
from tests.bench.swarm.stage import CLIENTS, Ran, Site, Training, agent, tasks

SHARES = {"low": 0.5, "even": 0.5}
STEPS = 16
STOPPED, STOPS, STARTS = "even", 4, 8
"""The lane's client is stopped after the first and started after the second of so many steps."""
WAIT_S = 5.0
GROUPS, SIZE, PARALLEL = 4, 6, 12


def run(site: Site, folder: Path) -> Ran:
    training = Training(site, folder, seed=0, steps=STEPS, groups=GROUPS, size=SIZE, mix=SHARES)

    def begin(training: Training) -> Callable[[float], None]:
        training.ask("PUT", "/mix", json={"lane_wait_s": WAIT_S})
        for host, lane in zip(CLIENTS, SHARES, strict=False):
            training.client(host, agent(folder), tasks(folder, lane), parallel=PARALLEL).start()
        client = training.clients[list(SHARES).index(STOPPED)]
        notes = training.notes

        def tick(seconds: float) -> None:
            if len(training.times) >= STOPS and "stopped" not in notes:
                client.signal(signal.SIGTERM)
                notes["stopped"] = len(training.times)
            if len(training.times) >= STARTS and "started" not in notes:
                notes["before"] = training.ask("GET", "/mix")["lanes"]
                client.start()
                notes["started"] = len(training.times)
            notes["mix"] = training.ask("GET", "/mix")["lanes"]

        return tick

    return training.play(begin)


def by_step(ran: Ran) -> list[tuple[Counter[str], dict[str, float]]]:
    """For each step the groups of each lane, and the mean reward of its trained episodes."""
    known = {one["episode"]: one for one in ran["episodes"]}
    out = []
    for rows in (ran["rows"][key] for key in sorted(ran["rows"], key=int)):
        lanes = {group: known[episode]["lane"] for group, episode in rows}
        gained: dict[str, list[float]] = {}
        for _, episode in rows:
            gained.setdefault(known[episode]["lane"], []).append(known[episode]["reward"])
        out.append((Counter(lanes.values()), {lane: statistics.fmean(some) for lane, some in gained.items()}))
    return out


def report(ran: Ran, folder: Path) -> bool:
    """The table, the laws and the picture ``swarm-lanes.png``."""
    steps, notes = by_step(ran), ran["notes"]
    total, rows, off = Counter[str](), [], list[float]()
    for number, (groups, gained) in enumerate(steps, 1):
        total += groups
        off.append(max(abs(total[lane] - share * total.total()) for lane, share in SHARES.items()))
        cells = [f"{groups[lane]} groups, {gained[lane]:.2f}" if groups[lane] else "0 groups" for lane in SHARES]
        rows.append([str(number), *cells, f"{off[-1]:.1f}"])
    table.show("Two lanes", ("step", *SHARES, "groups off the shares, so far"), rows)
    lent = {lane: one["owed"] for lane, one in notes["before"].items() if lane in SHARES}
    owed = {lane: one["owed"] for lane, one in notes["mix"].items() if lane in SHARES}
    curves(steps, notes, folder / "swarm-lanes.png")
    return table.verdicts([
        (f"up to step {notes['stopped']} each lane is within one group of its share", max(off[: notes["stopped"]]) < 1),
        (f"when {STOPPED} starts again, it has lent at most one batch: {lent}", 0 < lent[STOPPED] <= GROUPS),
        (f"in the end, nothing is owed: {owed}", not any(owed.values())),
        ("nothing is trained twice, and all counts add up", adds_up(ran)),
    ])  # fmt: skip


def curves(steps: list[tuple[Counter[str], dict[str, float]]], notes: dict[str, int], path: Path) -> None:
    title, subtitle = "Two kinds of task that share one model", "mean reward of the trained episodes of each lane"
    with plot.picture(len(steps), path, title, subtitle) as axes:
        axes.axvspan(notes["stopped"] + 0.5, notes["started"] + 0.5, color=plot.QUIET, alpha=0.12, linewidth=0,
                     label=f"{STOPPED} is stopped")  # fmt: skip
        for lane, color in zip(SHARES, (plot.LEARNS, plot.CONTROL), strict=True):
            points = [(number, gained[lane]) for number, (_, gained) in enumerate(steps, 1) if lane in gained]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=2.4, marker="o", markersize=4, label=lane)
