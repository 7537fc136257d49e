"""Seconds and memory of a training step: a fixed batch through the trainer, its workers and nothing else.

    .venv-engine/bin/python -m tests.bench.step [--model DIR] [--steps N]

The batch is 12 episodes in three groups, of about 250 tokens a row. Every third episode has split, which makes 16 rows.
Ray, TransferQueue and verl's worker are those of a run whose engines stand alone, with the settings that a run has by
default. No daemon is asked, and no weights are pushed. The first step warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from ajet_sdk.sample import Sample
from ajet_trainer.backends import backend
from ajet_trainer.batch import Row, to_row
from ajet_trainer.config import Config
from ajet_trainer.engines.attached import Attached
from ajet_trainer.progress import Progress
from integrations.quickstart.packaged_model import unpack
from tests.bench import table

GROUPS, EPISODES = 3, 4
PARTS = ("old_log_prob", "update_actor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model; by default the quick start's")
    parser.add_argument("--steps", type=int, default=6, help="so many are counted")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = given.model or Path(name) / "smollm2"
        if not model.exists():
            unpack(model)
        rows = batch(json.loads((model / "config.json").read_text())["vocab_size"])
        steps, peaks = run(Path(name), model, rows, given.steps)
    times = [[part, f"{median(step[part] for step in steps):.2f}", f"{min(step[part] for step in steps):.2f}"]
            for part in ("whole", *PARTS)]  # fmt: skip
    said = f"{len(rows)} rows of {sum(row.tokens for row in rows) / len(rows):.0f} tokens, {len(steps)} steps"
    table.show(said, ("part of a step", "seconds, median", "fastest"), times)
    table.show("Memory", ("process", "peak, MB"), [[who, f"{size:,.0f}"] for who, size in peaks.items()])


def run(folder: Path, model: Path, rows: Sequence[Row], count: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The seconds of each step, and the peaks of memory: a worker is the largest process below the trainer."""
    config = Config(model=str(model), run_dir=str(folder / "run"), engine_urls=("http://127.0.0.1:9",),
                    group_size=EPISODES, groups=GROUPS, max_tokens=1024)  # fmt: skip
    steps: list[dict[str, float]] = []
    peaks: dict[str, float] = {}

    engines, progress = Attached(config, folder), Progress(config.run_dir, count, lambda _: None)
    with backend().open(config, engines, progress, lambda: None) as learner:
        for number in range(count + 1):
            start = time.perf_counter()
            figures = learner.train(rows)
            took = {"whole": time.perf_counter() - start} | {part: figures[f"timing_s/{part}"] for part in PARTS}
            sys.stderr.write(f"step {number}: {took['whole']:.2f} s\n")
            steps.append(took)
        peaks["trainer"] = peak(psutil.Process())
        peaks["worker"] = max(map(peak, psutil.Process().children(recursive=True)))
    return steps[1:], peaks


def peak(process: psutil.Process) -> float:
    """The most memory that `process` has held, in MB; 0 if it is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found.group(1)) / 1024 if found else 0.0


def batch(vocabulary: int) -> list[Row]:
    """The same rows each time, of as many different tokens."""
    pick = random.Random(0)
    out = []
    for number in range(GROUPS * EPISODES):
        samples = [sample(pick, vocabulary, calls) for calls in ((2,) if number % 3 else (1, 1))]
        reward = pick.random()
        out += [to_row(f"g{number // EPISODES}", number % EPISODES, index, reward, one)
                for index, one in enumerate(samples)]  # fmt: skip
    return out


def sample(pick: random.Random, vocabulary: int, calls: int) -> Sample:
    """A timeline of `calls`, as likely as any other."""
    lengths: Sequence[int] = [pick.randint(150, 190), *(pick.randint(30, 50) for _ in range(2 * calls - 1))]
    mask = [bit for place, length in enumerate(lengths) for bit in [place % 2] * length]
    ends = [sum(lengths[: place + 1]) for place in range(1, len(lengths), 2)]
    spans = tuple((f"c{end}", end - lengths[2 * place + 1], end) for place, end in enumerate(ends))
    return Sample(
        "s", "e", "t", "policy", "", tuple(pick.randrange(vocabulary) for _ in mask), tuple(mask),
        tuple(-math.log(vocabulary) * bit for bit in mask), ((0, sum(mask)),), tuple(call for call, _, _ in spans),
        spans, ("stop",) * calls, tuple(range(calls)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
