"""The speed at which a model learns from rewards on its turns, beside the sum of the same rewards: real vLLM, proxy and
trainer.

    .venv-engine/bin/python -m tests.bench.credit [--seeds N] [--steps N] [--out FILE]

A game has six turns. In each, one token asks, and the next one, which the model samples, is the answer. Right are the
tokens of one quarter of the vocabulary, and each asking token has its own quarter. So turns are independent: what a
turn got says nothing of the others, and a sum over six hides it in the noise of five. Every right answer is rewarded
with 1/6, as a reward of its call.

- *turns*: `ajet_turn` with ``turn_gamma = 0``, which is right where no turn has a part in a later one's reward.
- *sum*: `grpo`, which trains every turn on the sum.
- *control*: `grpo` with learning rate 0.

All else is equal: the tiny model of the tests, its seed, batches, learning rate. The seed of a run is that of the
model's first weights. A finished run is written to ``--out`` and never repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import ajet_sdk
from integrations.quickstart.figures import ends, paired
from tests.bench import table
from tests.e2e.players import UNSHAPED, Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import RATE, TrainerProcess

MODEL = "policy"
ASK = (100, 150, 200, 250, 300, 350)
"""The token that asks in each turn."""
START, VOCABULARY, PARTS = 5, 550, 4
GROUPS, SIZE, LR = 2, 16, 5e-3
ARMS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "turns": ({"turn_gamma": 0.0}, {"algorithm.adv_estimator": "ajet_turn"}),
    "sum": ({}, {"algorithm.adv_estimator": "grpo"}),
    "control": ({}, {"algorithm.adv_estimator": "grpo", RATE: 0.0}),
}
Rewards = Mapping[str, list[float]]
"""The mean reward of each step, by ``ARM-SEED``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a file of finished runs, to go on from")
    given = parser.parse_args()
    found: dict[str, list[float]] = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for seed, arm in itertools.product(range(given.seeds), ARMS):
        if f"{arm}-{seed}" not in found:
            started = time.monotonic()
            found[f"{arm}-{seed}"] = rewards = run(arm, seed, given.steps)
            first, last = (sum(part) / len(part) for part in ends(rewards))
            took = time.monotonic() - started
            sys.stderr.write(f"seed {seed}, {arm}: {first:.3f} to {last:.3f} in {took:.0f} s\n")
            if given.out:
                given.out.write_text(json.dumps(found))
    report(found, given.seeds)


def run(arm: str, seed: int, steps: int) -> list[float]:
    """The mean reward of each step of one run."""
    ours, theirs = ARMS[arm]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProxyProcess(None, folder / "proxy") as proxy:
            settings = {
                "model": build(folder / "tiny", seed=seed), "proxy_url": proxy.url, "groups": GROUPS,
                "group_size": SIZE, "max_tokens": 64, "total_steps": steps, "max_staleness": 1,
            }  # fmt: skip
            with TrainerProcess(folder, {**settings, **ours}, {RATE: LR, **theirs}) as trainer, Games(proxy.url):
                return [line["reward_mean"] for line in trainer.finish(3600)]


def report(found: Rewards, seeds: int) -> None:
    """The table of runs, and what paired differences say."""
    gains = {arm: [gain(found[f"{arm}-{seed}"]) for seed in range(seeds)] for arm in ARMS}
    rows = []
    for seed, arm in itertools.product(range(seeds), ARMS):
        first, last = (sum(part) / len(part) for part in ends(found[f"{arm}-{seed}"]))
        rows.append([str(seed), arm, f"{first:.3f}", f"{last:.3f}", f"{gains[arm][seed]:+.3f}"])
    table.show("credit by turn", ("seed", "arm", "first third", "last third", "gain"), rows)
    pairs = (("turns", "control"), ("sum", "control"), ("turns", "sum"))
    compared = [[f"{one} over {other}", str(paired(gains[other], gains[one]))] for one, other in pairs]
    table.show("gains, paired by seed", ("difference", "mean, 95 % interval"), compared)


def gain(rewards: Sequence[float]) -> float:
    """The mean of the last third less that of the first."""
    first, last = ends(rewards)
    return sum(last) / len(last) - sum(first) / len(first)


class Games(Players):
    """Plays as many games at once as a step trains, while inside; every `SIZE` in a row share a task."""

    def __init__(self, url: str) -> None:
        super().__init__(url, model=MODEL, group_size=SIZE, parallel=GROUPS * SIZE)

    def play(self, task: str) -> float:
        """One game; the sum of its rewards."""
        with ajet_sdk.episode(task=task, model=MODEL, proxy_url=self.url) as episode:
            tokens, earned = [START], 0.0
            for turn, ask in enumerate(ASK):
                tokens.append(ask)
                answer = httpx.post(
                    f"{episode.base_url}/completions",
                    headers={"Authorization": f"Bearer {episode.api_key}"},
                    json={
                        "model": MODEL, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "ignore_eos": True,
                        "return_token_ids": True, **UNSHAPED,
                    },
                    timeout=600.0,
                ).raise_for_status()  # fmt: skip
                (token,) = answer.json()["choices"][0]["token_ids"]
                tokens.append(token)
                right = token * PARTS // VOCABULARY == turn % PARTS
                earned += right / len(ASK)
                episode.reward(right / len(ASK), call=answer.headers["X-AJet-Call"], final=False)
            episode.seal()
            return earned


if __name__ == "__main__":
    main()
