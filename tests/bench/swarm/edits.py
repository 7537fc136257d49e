"""A client's reward is edited while the model trains, with ``ajet run --watch``.

The first edit turns the reward round: tokens of the upper half are right from then on. The others change a comment,
which makes another revision as well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integrations.quickstart import plot
from tests.bench import table
from tests.bench.swarm.kills import adds_up
from tests.bench.swarm.stage import CLIENTS, Ran, Site, Training, agent, rewards, tasks

STEPS, AFTER = 16, (4, 8, 10, 12, 14)
"""Of so many steps, those after which the program is edited."""
GROUPS, SIZE, PARALLEL = 2, 8, 16
LIMIT_S = 10.0


def run(site: Site, folder: Path) -> Ran:
    training = Training(site, folder, seed=0, steps=STEPS, groups=GROUPS, size=SIZE)

    def begin(training: Training) -> Callable[[float], None]:
        program = agent(folder)
        client = training.client(CLIENTS[0], program, tasks(folder, "low"), "--watch", parallel=PARALLEL)
        client.start()
        return Editor(training, program)

    return training.play(begin)


class Editor:
    """Called again and again, it edits when it is time, and looks for the first episode after each edit."""

    def __init__(self, training: Training, program: Path) -> None:
        self._training, self._program = training, program
        self._edits: list[dict[str, Any]] = training.notes.setdefault("edits", [])
        self._known: set[str] = set()

    def __call__(self, seconds: float) -> None:
        latest = self._training.ask("GET", "/episodes", params={"limit": 20})["episodes"]
        revisions = [one["revision"] for one in latest]
        waiting = self._edits and "seen_at" not in self._edits[-1]
        if waiting:
            new = [revision for revision in revisions if revision not in self._known]
            if new:
                self._edits[-1] |= {"seen_at": time.time(), "revision": new[0]}
        self._known.update(revisions)
        if not waiting and len(self._edits) < len(AFTER) and len(self._training.times) >= AFTER[len(self._edits)]:
            text = self._program.read_text()
            number = len(self._edits) + 1
            self._program.write_text(text.replace("token < HALF", "token >= HALF") + f"# edit {number}\n")
            self._edits.append({"saved_at": time.time(), "step": len(self._training.times)})


def played(ran: Ran, revision: str) -> float:
    """When the first episode of a revision was played to its end."""
    of_it = (one for one in ran["episodes"] if one["revision"] == revision)
    return float(min(one["sealed_at"] for one in of_it if one["sealed_at"]))


def mixed(ran: Ran) -> int:
    """The number of trained groups that hold two revisions."""
    known = {one["episode"]: one["revision"] for one in ran["episodes"]}
    groups: dict[str, set[str]] = {}
    for rows in ran["rows"].values():
        for group, episode in rows:
            groups.setdefault(group, set()).add(known[episode])
    return sum(len(revisions) > 1 for revisions in groups.values())


def report(ran: Ran, folder: Path) -> bool:
    """The table, the laws and the picture ``swarm-edit.png``."""
    edits, times = ran["notes"]["edits"], ran["times"]
    rows, worst = [], 0.0
    for edit in edits:
        seen, whole = edit["seen_at"] - edit["saved_at"], played(ran, edit["revision"]) - edit["saved_at"]
        after = [at for at in times if at > edit["saved_at"]]
        rows.append([str(edit["step"]), f"{seen:.1f}", f"{whole:.1f}", f"{after[0] - edit['saved_at']:.1f}"])
        worst = max(worst, whole)
    head = ("edited after step", "first episode on disk, s", "and played to its end, s", "next step ended, s")
    table.show("Edits while the model trains", head, rows)
    between = max(later - earlier for earlier, later in itertools.pairwise(times))
    curve(rewards(ran), edits, folder / "swarm-edit.png")
    return table.verdicts([
        (f"the first episode under the new code is on disk within {LIMIT_S:.0f} s, played to its end: {worst:.1f} s at "
         "most", worst <= LIMIT_S and len(edits) == len(AFTER)),
        ("no group mixes two revisions", mixed(ran) == 0),
        (f"one process made all {STEPS} steps, with {between:.1f} s between two of them at most",
         [line["step"] for line in ran["lines"]] == list(range(1, STEPS + 1))),
        ("nothing is trained twice, and all counts add up", adds_up(ran)),
    ])  # fmt: skip


def curve(values: list[float], edits: list[dict[str, Any]], path: Path) -> None:
    title = "A reward that is edited while the model trains"
    with plot.picture(len(values), path, title, "mean reward of each step, by the code that played it") as axes:
        for number, edit in enumerate(edits):
            color = plot.CONTROL if number == 0 else plot.QUIET
            label = ("the reward is turned round", "a comment is edited")[number] if number < 2 else None
            line = {"color": color, "linestyle": (0, (4, 4)), "linewidth": 1.4, "label": label}
            axes.axvline(edit["step"] + 0.5, ymax=0.85, **line)
        axes.plot(range(1, len(values) + 1), values, color=plot.LEARNS, linewidth=2.4, marker="o", markersize=4)
