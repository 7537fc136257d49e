"""Three training steps on a fixed batch, whose episodes share prompts and have split, in a real run of verl with Ray:
once over timelines, and once over trees.

    python -m tests.kit.steps_of_trees MODEL FOLDER

The runs are such with engines that stand alone. No daemon is asked, and no weights are pushed. The metrics of each step
go to FOLDER/timeline.json and FOLDER/tree.json, as a list of JSON objects.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np

from ajet_trainer.backends import backend
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.engines.attached import Attached
from ajet_trainer.progress import Progress

STEPS, GROUPS, EPISODES, CALLS = 3, 2, 4, 3
FLOAT32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
VERL = {
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": FLOAT32,
    "actor_rollout_ref.ref.fsdp_config.mixed_precision": FLOAT32,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.actor.optim.optimizer": "SGD",
    "actor_rollout_ref.actor.optim.optimizer_impl": "torch.optim",
}
"""Plain descent: Adam divides by the size of a gradient, and that of some weights is nothing but rounding."""


def main(model: str, folder: str) -> None:
    for rows in ("timeline", "tree"):
        config = Config(
            model=model, run_dir=f"{folder}/{rows}", engine_urls=("http://127.0.0.1:9",), group_size=EPISODES,
            groups=GROUPS, max_tokens=1024, rows=rows, verl=VERL,
        )  # fmt: skip
        engines, progress = Attached(config, Path(config.run_dir)), Progress(config.run_dir, STEPS, lambda _: None)
        with backend().open(config, engines, progress, lambda: None) as learner:
            found = [learner.train(batch()) for _ in range(STEPS)]
        Path(folder, f"{rows}.json").write_text(json.dumps(found))


def batch() -> list[Row]:
    """Each group has a prompt, and each episode goes on from it with calls of its own, one row a call."""
    pick = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [pick.randrange(400) for _ in range(count)]

    out = []
    for group in range(GROUPS):
        prompt = tokens(60)
        for episode in range(EPISODES):
            history, reward = [*prompt, *tokens(5)], pick.random()
            for call in range(CALLS):
                answer = tokens(12)
                out.append(
                    Row(
                        f"g{group}", episode, call, np.array(history), np.array(answer), np.ones(12, dtype=np.int64),
                        np.full(12, -6.2, dtype=np.float32), reward, 1, 0, 0, spans=((f"c{call}", 0, 12),),
                    )
                )  # fmt: skip
                history += answer + tokens(6)
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
