"""A team of two models that learns in one episode: both learn, or only one of them, or only the other one.

    .venv-engine/bin/python -m tests.bench.team [--seeds N] [--steps N] [--out DIR]

The game (`game.py`) cannot be won while either model stays as it is. Two vLLM serve all runs, each with the weights
that its trainer gives it. A finished run is kept in ``--out`` and never repeated. The picture is ``team.png`` there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from integrations.quickstart import figures, plot
from tests.bench import table
from tests.bench.swarm.stage import Ran
from tests.bench.team.models import MODELS, RECEIVER, SENDER
from tests.bench.team.stage import engines, run

ARMS: Mapping[str, Sequence[str]] = {
    "both": MODELS, "only the sender": (SENDER,), "only the receiver": (RECEIVER,),
}  # fmt: skip
COLORS = (plot.LEARNS, plot.CONTROL, plot.QUIET)
CHANCE, NEAR, LEARNED = 0.5, 0.1, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of each trainer")
    parser.add_argument("--out", type=Path, default=Path("runs/team"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # two trainers share the cores, and threads that wait for each other spin
    sys.exit(not report(every(given.seeds, given.steps, given.out), given.out))


def every(seeds: int, steps: int, out: Path) -> dict[str, list[Ran]]:
    """The runs of each arm, by seed."""
    found: dict[str, list[Ran]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        urls: Mapping[str, str] = {}
        for seed in range(seeds):
            for arm, learn in ARMS.items():
                path = out / f"{arm.replace(' ', '-')}-{seed}.json"
                if not path.exists():
                    urls = urls or stack.enter_context(engines(folder))
                    began = time.monotonic()
                    path.write_text(json.dumps(run(urls, folder / path.stem, learn, seed, steps)))
                    sys.stderr.write(f"{path.stem}: {time.monotonic() - began:.0f} s\n")
                found[arm].append(json.loads(path.read_text()))
    return found


def scores(ran: Ran) -> list[float]:
    """The mean reward of each step of the sender's trainer."""
    return [line["reward_mean"] for line in ran["lines"][SENDER]]


def end(ran: Ran) -> float:
    """The mean over its last third."""
    return statistics.fmean(figures.ends(scores(ran))[1])


def adds_up(ran: Ran) -> bool:
    """Tell whether each trainer has trained what the ledger says, each episode once. Rows are known of its last
    steps."""
    counts, known = ran["status"]["episodes"], {one["episode"]: one for one in ran["episodes"]}
    if counts["opened"] != len(known):
        return False
    for model in MODELS:
        rows = [episode for step in ran["rows"][model] for episode in step]
        said = {name for name, one in known.items() if (one["shares"] or {}).get(model) == "trained"}
        trained = sum(line["episodes"] for line in ran["lines"][model])
        if len(rows) != len(set(rows)) or not set(rows) <= said or len(said) != trained:
            return False
    both = {name for name, one in known.items() if one["state"] == "trained"}
    return all(set((known[name]["shares"] or {}).values()) == {"trained"} for name in both)


def report(runs: Mapping[str, list[Ran]], folder: Path) -> bool:
    """The table, the laws and the picture."""
    rows = [
        [
            str(seed), arm, *(f"{statistics.fmean(part):.3f}" for part in figures.ends(scores(ran))),
            str(ran["status"]["episodes"]["opened"]), str(ran["status"]["episodes"]["trained"]),
            f"{ran['seconds']['start']:.0f}", f"{ran['seconds']['steps']:.0f}", f"{ran['memory'] / 1e9:.1f}",
        ]
        for arm, some in runs.items() for seed, ran in enumerate(some)
    ]  # fmt: skip
    head = ("seed", "who learns", "reward, first third", "last third", "opened", "trained", "start, s", "steps, s",
            "memory, GB")  # fmt: skip
    table.show("A team", head, rows)
    ends = {arm: [end(ran) for ran in some] for arm, some in runs.items()}
    both, *alone = ends.values()
    gains = [figures.paired(one, both) for one in alone]
    picture(runs, folder / "team.png", f"{len(both)} seeds · last third: {_words(ends)}")
    everything = [ran for some in runs.values() for ran in some]
    seen = Counter[str]()
    for ran in everything:
        for name, number in ran["gates"].items():
            seen[name.partition(": ")[2]] += number
    shut, waited = seen["another's gate is shut"], seen["and requests wait"]
    return table.verdicts([
        (f"both learn: {LEARNED:g} or more in each last third", min(both) >= LEARNED),
        *((f"{arm} learns: within {NEAR:g} of chance, {statistics.fmean(ends[arm]):.3f}",
           abs(statistics.fmean(ends[arm]) - CHANCE) <= NEAR) for arm in list(ends)[1:]),
        *((f"both less {arm}: {gain}", gain.low > 0) for arm, gain in zip(list(ends)[1:], gains, strict=True)),
        ("each episode trains each model once, and all shares add up",
         all(map(adds_up, everything))),
        (f"nobody waits for another's update: while its gate was shut, {waited} of {shut} looks saw a request held",
         shut > 0 and not waited),
    ])  # fmt: skip


def _words(ends: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{arm} {statistics.fmean(values):.2f}" for arm, values in ends.items())


def picture(runs: Mapping[str, list[Ran]], path: Path, subtitle: str) -> None:
    """Every run thin, and the mean over seeds thick."""
    curves: dict[str, list[list[float]]] = {arm: [scores(ran) for ran in some] for arm, some in runs.items()}
    steps = min(len(one) for some in curves.values() for one in some)
    with plot.picture(steps, path, "A sender and a receiver, each with a trainer of its own", subtitle) as axes:
        axes.axhline(CHANCE, color=plot.QUIET, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
        for (arm, some), color in zip(curves.items(), COLORS, strict=True):
            plot.draw(axes, arm, [one[:steps] for one in some], color)


if __name__ == "__main__":
    main()
