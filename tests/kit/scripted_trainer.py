"""A trainer that looks to a supervisor like `ajet-trainer run --watch --config FILE`, with steps of some milliseconds.

A step is one rename: the checkpoint, with the process and the learning rate. Then it stands in ``history``, and if
a kill comes in between, after the next start. What ``model_name`` says, it does otherwise: ``refused`` cannot be used,
``dying`` dies before its first step, ``deaf`` takes a while to end, ``slow`` takes ten times as long for a step, and
``stubborn`` keeps its learning rate.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from ajet_sdk.output import say
from ajet_sdk.runs import LEARNING_RATE
from ajet_trainer.config import digest, load
from ajet_trainer.live import Live
from ajet_trainer.progress import Progress
from ajet_trainer.run_folder import PRIVATE, put

STEP_S = 0.02


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def main() -> None:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    path = Path(sys.argv[-1])
    config = load(str(path), (), os.environ)
    folder = Path(config.run_dir)
    live = Live(path, lambda: load(str(path), (), os.environ), say)
    progress = Progress(folder, config.total_steps, say, digest(config))
    saved, history = folder / "checkpoint", folder / "history"
    made = saved.read_text() if saved.exists() else ""
    step = json.loads(made)[1] if made else 0
    if made and not (history.exists() and history.read_text().endswith(made)):
        append(history, made)
    progress.phase("looking for the proxy")
    if config.model_name == "refused":
        say("ajet-trainer: this cannot be used")
        sys.exit(2)
    if config.model_name == "dying":
        say("ajet-trainer: the engine is gone")
        sys.exit(1)
    progress.resume_at(step)
    while not asked and not 0 < config.total_steps <= step:
        before, config = config, live(config)
        if config is not before and config.model_name == "stubborn":
            progress.refused, config = "the rate stays", replace(config, verl=before.verl)
        progress.total_steps, progress.config = config.total_steps, digest(config)
        progress.phase("training", quiet=True)
        time.sleep(STEP_S * (10 if config.model_name == "slow" else 1))
        step += 1
        rate = config.verl.get(LEARNING_RATE)
        made = json.dumps([os.getpid(), step, rate]) + "\n"
        put(saved, made, PRIVATE)
        append(history, made)
        progress.record({"step": step, "config": digest(config), "rate": rate, "timing": {}})
    if config.model_name == "deaf":
        time.sleep(1.0)
    progress.phase("stopped" if asked else "done")


if __name__ == "__main__":
    main()
