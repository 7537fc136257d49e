"""The quick start's game on a GPU, with real verl and vLLM; without a GPU it is a rehearsal on the CPU builds.

    python -m tests.gpu.game hybrid FOLDER [--steps 14] [KEY=VALUE …]       verl launches vLLM on the same GPU
    python -m tests.gpu.game attached FOLDER [--lora 16] [KEY=VALUE …]      vLLM stands alone and goes on

KEY=VALUE are verl's keys. FOLDER has all logs afterwards, also of a run that failed. Status 1 means that no step was
made. The report says rewards, seconds a step by their parts, and how far the trainer's probabilities are from the
engine's: below 0.01 in bfloat16 at step 1 and no growth. A jump after step 1 means that weights did not arrive whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integrations.quickstart import session
from integrations.quickstart.loop import Loop, metrics_in
from integrations.quickstart.plan import BESIDE_THE_TRAINER, MODEL_NAME, Plan
from integrations.quickstart.screen import Screen
from tests.kit.vllm_process import HAS_GPU, vllm_server

EPISODES_KEPT = 4
SERVED = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
SHOWN = ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_kl", "grad_norm", "staleness_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Game(Plan):
    """A quick start whose engine may be `attached`; `keys` are more of verl's."""

    attached: str | None = None
    lora: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)

    def tables(self, *, model: Path, proxy_url: str, run_dir: Path) -> dict[str, dict[str, Any]]:
        # `dataclass(slots=True)` makes the class anew, so that super() without arguments finds another
        tables = super(Game, self).tables(model=model, proxy_url=proxy_url, run_dir=run_dir)
        ours, verl = tables["trainer"], tables["verl"]
        if self.attached:
            ours |= {"engine_urls": [self.attached], "overlap": 0}
            verl = tables["verl"] = {name: value for name, value in verl.items() if name not in BESIDE_THE_TRAINER}
        if self.lora:
            lora = {"lora_rank": self.lora, "lora_alpha": 2 * self.lora}
            verl |= {f"actor_rollout_ref.model.{key}": value for key, value in lora.items()}
        verl |= self.keys
        return tables


@contextmanager
def engine_of(placement: str, model: Path, folder: Path, lora: int) -> Iterator[str | None]:
    """The address of a vLLM that stands alone, for the attached placement."""
    if placement == "hybrid":
        yield None
        return
    more = ("--enable-lora", "--max-lora-rank", str(max(16, lora))) if lora else ()
    name = "base" if lora else MODEL_NAME
    with vllm_server(model, folder / "vllm.log", name=name, options=(*SERVED, *more), ready_s=600) as url:
        yield url


def play(placement: str, folder: Path, *, plan: Mapping[str, Any], screen: Screen) -> None:
    """Plays a `Game` of these fields in `folder`, with the quick start's model."""
    if HAS_GPU and importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # vLLM would import it
    model = session.model_folder(session.CACHE.absolute(), screen)
    folder.mkdir(parents=True)
    with engine_of(placement, model, folder, plan["lora"]) as url:
        loop = Loop(Game(attached=url, device="cuda" if HAS_GPU else "cpu", **plan), folder, model, screen)
        if url:
            loop.proxy_options = ("--upstream", f"{MODEL_NAME}={url}")
        loop.run(EPISODES_KEPT)


def report(folder: Path) -> list[str]:
    """Says what the run's own files say; nothing if it made no step."""
    steps = metrics_in(folder / "trainer")
    if not steps:
        return []
    rewards, later = [step["reward_mean"] for step in steps], steps[1:] or steps
    third = max(1, len(steps) // 3)
    lines = [
        f"{len(steps)} steps, rewards " + " ".join(f"{one:.2f}" for one in rewards),
        f"first third {statistics.fmean(rewards[:third]):.3f}, last third {statistics.fmean(rewards[-third:]):.3f}",
        "seconds after the first step: median, most",
    ]
    for name in sorted({name for step in later for name in step["timing"]}):
        some = [step["timing"][name] for step in later if name in step["timing"]]
        lines.append(f"  {name:24} {statistics.median(some):8.3f} {max(some):8.3f}")
    for name in SHOWN:
        values = [step[name] for step in steps if step.get(name) is not None]
        lines += [f"  {name:24} median {statistics.median(values):.2e}, most {max(values):.2e}"] if values else []
    learner = steps[-1].get("learner", {})
    lines += [f"  {name} {value}" for name, value in sorted(learner.items()) if "memory" in name or "computed" in name]
    return lines + slept(folder / "trainer" / "verl.log")


def slept(log: Path) -> list[str]:
    """The sleeps of vLLM: their number, what they freed and the time that they took, by its own words."""
    words = log.read_text(errors="replace") if log.exists() else ""
    freed = re.findall(r"sleep freed ([0-9.]+) GiB", words)
    lines = [f"  slept {len(freed)} times, the last freed {freed[-1]} GiB"] if freed else []
    for word in ("fall asleep", "wake up tags"):
        took = [float(one) for one in re.findall(rf"It took ([0-9.]+) seconds to {word}", words)]
        lines += [f"  {statistics.median(took):.3f} s to {word}"] if took else []
    return lines


def keys_of(words: Sequence[str]) -> dict[str, Any]:
    """verl's keys, of words KEY=VALUE; a value that is no JSON is a text."""
    keys = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            keys[name] = json.loads(value)
        except ValueError:
            keys[name] = value
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("placement", choices=["hybrid", "attached"])
    parser.add_argument("folder", type=Path, help="a folder that is not there yet")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rows", default="tree", choices=["tree", "timeline"])
    parser.add_argument("--lora", type=int, default=0, help="the rank of an adapter, in the attached placement")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="verl's keys")
    given = parser.parse_intermixed_args()
    if given.lora and given.placement == "hybrid":
        parser.error("--lora needs the attached placement")
    plan = {name: getattr(given, name) for name in ("steps", "rows", "lora", "lr")} | {"keys": keys_of(given.keys)}
    screen = Screen(tty=False)
    try:
        play(given.placement, given.folder, plan=plan, screen=screen)
    finally:
        lines = report(given.folder)
        for line in lines or ["no step was made"]:
            screen.line(line)
    sys.exit(not lines)


if __name__ == "__main__":
    main()
