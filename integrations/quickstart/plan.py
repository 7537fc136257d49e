"""The plan of one quick start: the games of each step, and the configuration of its trainer.

Everything that can be repeated follows from `Plan.seed`: which secrets are played when, and the training side's own
randomness. The model's answers cannot be repeated, because the engine's arithmetic depends on which requests happen to
meet. A control is the same plan with ``lr=0``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_trainer.doctor import SHARE
from integrations.quickstart.guess import HIGHEST, LOWEST

MODEL_NAME = "smollm2"
LEARNING_RATE = 2e-5
ON_GPU = {"actor_rollout_ref.actor.strategy": "fsdp2"}
BESIDE_THE_TRAINER: dict[str, Any] = {
    SHARE: 0.3,
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    "actor_rollout_ref.rollout.max_num_seqs": 64,
}
"""Keys of an engine that shares the trainer's GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`groups` secrets a step, each played `group_size` times."""

    steps: int = 30
    seed: int = 0
    lr: float = LEARNING_RATE
    groups: int = 2
    group_size: int = 8
    rows: str = "tree"
    """As in the trainer's configuration."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    model: str = ""
    """The folder of another model than SmolLM2-135M-Instruct."""

    @property
    def episodes_per_step(self) -> int:
        return self.groups * self.group_size

    def secrets(self) -> list[tuple[int, ...]]:
        """The secrets of each step, one from each of `groups` equal ranges: a policy that prefers low numbers finds
        all steps equally hard. A range is used up before one of its numbers comes again."""
        rng, size = random.Random(self.seed), HIGHEST - LOWEST + 1
        edges = [LOWEST + place * size // self.groups for place in range(self.groups + 1)]
        bags: list[list[int]] = [[] for _ in range(self.groups)]
        steps = []
        for _ in range(self.steps):
            for bag, low, end in zip(bags, edges, edges[1:], strict=False):
                if not bag:
                    bag.extend(rng.sample(range(low, end), end - low))
            steps.append(tuple(bag.pop() for bag in bags))
        return steps

    def tables(self, *, model: Path, proxy_url: str, run_dir: Path) -> dict[str, dict[str, Any]]:
        """The tables of the trainer's configuration."""
        ours = {
            "model": str(model),
            "model_name": MODEL_NAME,
            "proxy_url": proxy_url,
            "run_dir": str(run_dir),
            "total_steps": self.steps,
            "groups": self.groups,
            "group_size": self.group_size,
            "max_tokens": 256,
            "rows": self.rows,
            "save_freq": 0,
        }
        verl = {
            "trainer.device": self.device,
            "trainer.max_actor_ckpt_to_keep": 1,
            "actor_rollout_ref.rollout.seed": self.seed,
            "actor_rollout_ref.actor.optim.lr": self.lr,
        }
        if self.device == "cuda":
            verl |= ON_GPU | BESIDE_THE_TRAINER
        return {"trainer": ours, "verl": verl}


def task_of(step: int, secret: int) -> str:
    """The name under which the proxy groups the games of one secret in one step, steps counted from 1."""
    return f"guess-{secret:02d}-step-{step:03d}"
