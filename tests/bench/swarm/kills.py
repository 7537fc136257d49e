"""Three clients, of which one is killed every ten seconds, against three that nobody disturbs.

Each client plays a copy of one data set, so groups hold episodes of several clients. A killed one comes back after two
seconds under its name, and goes on where it was. Every fourth comes back under another name, as on another machine:
what the dead one had open is then given up only when its time is over. Clients are killed in turn.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from integrations.quickstart import figures, plot
from tests.bench import table
from tests.bench.swarm.stage import CLIENTS, Ran, Site, Training, agent, rewards, tasks

EVERY_S, BACK_S, STRANGER = 10.0, 2.0, 4
TTL_S = 30.0
GROUPS, SIZE, PARALLEL = 2, 8, 8
ARMS = ("kills", "control")


def run(site: Site, folder: Path, arm: str, seed: int, steps: int) -> Ran:
    """One run; the seed is that of the weights that it begins with."""
    training = Training(site, folder, seed=seed, steps=steps, groups=GROUPS, size=SIZE)

    def begin(training: Training) -> Callable[[float], None]:
        for host in CLIENTS:
            training.client(host, agent(folder), tasks(folder, "low"), parallel=PARALLEL).start()
        return Killer(training) if arm == "kills" else lambda seconds: None

    return training.play(begin)


class Killer:
    """Called again and again, it kills and starts what is due."""

    def __init__(self, training: Training) -> None:
        self._clients, self._due, self._back = training.clients, EVERY_S, math.inf
        self._kills: list[float] = training.notes.setdefault("kills", [])

    def __call__(self, seconds: float) -> None:
        number = len(self._kills)
        if seconds >= self._back:
            client, self._back = self._clients[(number - 1) % len(self._clients)], math.inf
            client.start(f"{client.host}-{number}" if number % STRANGER == 0 else None)
        if seconds >= self._due and self._back == math.inf:
            self._clients[number % len(self._clients)].signal(signal.SIGKILL)
            self._kills.append(seconds)
            self._due, self._back = self._due + EVERY_S, seconds + BACK_S


def longest_wait(ran: Ran) -> float:
    """Seconds for which a step waited for episodes, at most. The first one waits for the first client, too, and that
    does not count."""
    first, *others = (line["timing"].get("wait", 0.0) for line in ran["lines"])
    return float(max(first - min(one["joined_at"] for one in ran["clients"]) + ran["began"], *others))


def slowest(ran: Ran) -> float:
    """Seconds of the slowest episode that was played to its end."""
    played = [one["sealed_at"] - one["opened_at"] for one in ran["episodes"] if one["sealed_at"]]
    return float(max(played))


def trained(ran: Ran) -> list[str]:
    """The episodes of each step."""
    return [episode for rows in ran["rows"].values() for _, episode in rows]


def lost(ran: Ran) -> Counter[str]:
    """Episodes that were rewarded and discarded, by the reason."""
    rewarded = (one for one in ran["episodes"] if one["reward"] is not None)
    return Counter(one["reason"] for one in rewarded if one["state"] == "discarded")


def whole(ran: Ran) -> bool:
    """Tell whether no rewarded episode is lost, but those that nobody brought a group to."""
    return lost(ran).keys() <= {"incomplete_group"}


def adds_up(ran: Ran) -> bool:
    """Tell whether the ledger, its records and the trained rows say the same, and everything trained was so once."""
    rows, states = trained(ran), Counter(one["state"] for one in ran["episodes"])
    counts = ran["status"]["episodes"]
    same = counts["opened"] == len(ran["episodes"]) and all(counts[state] == states[state] for state in states)
    known = {one["episode"] for one in ran["episodes"] if one["state"] == "trained"}
    return same and len(rows) == len(set(rows)) and set(rows) == known


def gone_within(ran: Ran) -> float:
    """Seconds after the last sign of life in which silent clients were gone, at most."""
    return max((one["gone_at"] - one["heard_at"] for one in ran["clients"] if one.get("reason") == "silent"), default=0)


def report(runs: dict[str, list[Ran]], folder: Path) -> bool:
    """Tables, laws and the picture ``swarm.png``; `runs` are those of each arm, by seed."""
    seeds = range(len(runs["kills"]))
    rows = []
    for seed in seeds:
        for arm in ARMS:
            ran = runs[arm][seed]
            first, last = (statistics.fmean(part) for part in figures.ends(rewards(ran)))
            episodes = ran["status"]["episodes"]
            rows.append([
                str(seed), arm, str(len(ran["notes"].get("kills", ()))), f"{ran['times'][-1] - ran['began']:.0f}",
                f"{longest_wait(ran):.1f}", f"{slowest(ran):.1f}", str(episodes["opened"]), str(episodes["trained"]),
                str(ran["status"]["discarded"].get("client_gone", 0)), str(lost(ran)["incomplete_group"]),
                f"{first:.3f}", f"{last:.3f}",
            ])  # fmt: skip
    head = ("seed", "clients", "kills", "seconds", "longest wait, s", "slowest episode, s", "opened", "trained",
            "given up with a client", "left alone", "reward, first third", "last third")  # fmt: skip
    table.show("Kill the clients", head, rows)
    control, disturbed = ([rewards(ran) for ran in runs[arm]] for arm in ("control", "kills"))
    bands = [figures.mean([run[step] for run in control]) for step in range(len(control[0]))]
    means = [statistics.fmean(values) for values in zip(*disturbed, strict=True)]
    inside = sum(band.low <= mean <= band.high for mean, band in zip(means, bands, strict=True))
    gains = [[statistics.fmean(figures.ends(run)[1]) for run in some] for some in (control, disturbed)]
    difference = figures.paired(*gains)
    picture(control, disturbed, bands, folder / "swarm.png", f"{len(seeds)} seeds · last third {difference} (95 %)")
    kills, everything = runs["kills"], [*runs["kills"], *runs["control"]]
    silent = max(map(gone_within, kills))
    return table.verdicts([
        (f"no step waits longer than {TTL_S:.0f} s + the slowest episode",
         all(longest_wait(ran) <= TTL_S + slowest(ran) for ran in kills)),
        (f"a silent client is gone within {TTL_S:.0f} + 1 s: {silent:.1f} s at most", silent <= TTL_S + 1),
        ("nothing that was rewarded is lost, but what is left alone of a task", all(map(whole, everything))),
        ("nothing is trained twice, and all counts add up", all(map(adds_up, everything))),
        (f"the learning curve is within the control's interval: {inside} of {len(means)} steps", inside == len(means)),
        (f"last third, kills less control: {difference}", difference.low <= 0 <= difference.high),
    ])  # fmt: skip


def picture(
    control: Sequence[Sequence[float]], disturbed: Sequence[Sequence[float]], bands: Sequence[figures.Difference],
    path: Path, subtitle: str,
) -> None:
    steps = range(1, len(bands) + 1)
    with plot.picture(len(bands), path, "Clients that are killed, and clients that are not", subtitle) as axes:
        low, high = ([min(1.02, max(0.0, getattr(one, side))) for one in bands] for side in ("low", "high"))
        if len(control) > 1:
            shown = {"color": plot.CONTROL, "alpha": 0.15, "linewidth": 0, "label": "95 % of the control"}
            axes.fill_between(steps, low, high, **shown)
        for runs, color, label in (
            (control, plot.CONTROL, "control"), (disturbed, plot.LEARNS, "one of three clients killed every 10 s"),
        ):
            plot.draw(axes, label, runs, color)
