"""The quick start by trees and by timelines: is the learning curve the same, and is the step no slower?

    .venv-engine/bin/python -m tests.bench.curve [--seeds N] [--steps N] [--out DIR]

Each seed is played twice, with ``rows = "tree"`` and with ``rows = "timeline"``, one after the other, in turns. The
gradient is the same for the same episodes. But an engine's answers do not repeat, so the curves of two runs differ by
chance. Runs are paired by seed, which fixes the secrets. Goals:

1. The 95 % interval of the mean difference holds 0, for the mean reward over all steps and for the gain.
2. The median of a step's seconds is no higher with trees.

A finished run is kept in ``--out`` and never repeated. `make proof` finds those of trees in its folder ``tree``. The
picture is ``curve.png``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from integrations.quickstart import figures, plot, session
from integrations.quickstart.plan import Plan
from integrations.quickstart.screen import Screen
from tests.bench import table

FORMS = ("timeline", "tree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/curve"))
    given = parser.parse_args()
    runs: dict[str, list[Path]] = {form: [] for form in FORMS}
    for seed in range(given.seeds):
        for form in FORMS if seed % 2 == 0 else reversed(FORMS):
            folder = given.out / form / f"seed-{seed}-learning"
            once(Plan(steps=given.steps, seed=seed, rows=form), folder)
            runs[form].append(folder)
    sys.exit(not report(runs, given.out))


def once(plan: Plan, folder: Path) -> None:
    """Runs `plan` in `folder`, unless it has."""
    if session.finished(plan, folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
        session.one_run(plan, folder, keep=False, screen=Screen(tty=False))


def report(runs: Mapping[str, Sequence[Path]], out: Path) -> bool:
    """Prints the table and the goals; whether they are met."""
    rewards = {form: [read(folder)["reward"] for folder in folders] for form, folders in runs.items()}
    every = {form: [fmean(reward["steps"]) for reward in mine] for form, mine in rewards.items()}
    gains = {form: [reward["gain"] for reward in mine] for form, mine in rewards.items()}
    times = {form: [seconds(folder) for folder in folders] for form, folders in runs.items()}
    table.show("Each run", ("seed", "rows", "mean reward", "gain", "seconds a step", "of these verl"), [
        (str(seed), form, f"{every[form][seed]:.3f}", f"{gains[form][seed]:+.3f}", *map("{:.1f}".format, took))
        for seed, all_took in enumerate(zip(*times.values(), strict=True))
        for form, took in zip(FORMS, all_took, strict=True)
    ])  # fmt: skip
    (step, ours), (step_flat, flat) = (
        [median(parts) for parts in zip(*times[form], strict=True)] for form in FORMS[::-1]
    )
    mean, gain = (figures.paired(*(found[form] for form in FORMS)) for found in (every, gains))
    plot.compared(
        {form: [reward["steps"] for reward in mine] for form, mine in rewards.items()}, out / "curve.png",
        "The quick start by timelines and by trees", f"mean reward of trees less that of timelines: {mean} (95 %)",
    )  # fmt: skip
    return table.verdicts([
        (f"mean reward of trees less that of timelines: {mean}", mean.low <= 0 <= mean.high),
        (f"gain of trees less that of timelines: {gain}", gain.low <= 0 <= gain.high),
        (f"a step takes {step:.1f} s with trees and {step_flat:.1f} s with timelines, verl's part {ours:.1f} and "
         f"{flat:.1f} s", step <= step_flat),
    ])  # fmt: skip


def read(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def seconds(folder: Path) -> tuple[float, float]:
    """The median of a step, and of verl's part in it."""
    steps = [json.loads(line)["timing"] for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]
    whole = median(sum(step.get(part, 0.0) for part in figures.PARTS) for step in steps)
    return whole, median(step["train"] for step in steps)


if __name__ == "__main__":
    main()
