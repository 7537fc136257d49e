"""The rows of a step, as people see them, and what they tell of the engine that sampled them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.trainer_process import FLOAT32, RATE, TRAINER

LORA = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 16, RATE: 2e-2, **FLOAT32}


def rows(run: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a step, as `ajet-trainer rows` shows them."""
    words = [str(TRAINER), "rows", str(run), "--step", str(step), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def has_the_adapter(model: Path, found: list[dict[str, Any]]) -> None:
    """The engine sampled these rows with the trainer's adapter, which makes a difference."""
    ours, plain = (sum(part) for part in zip(*differences(model, found), strict=True))
    assert ours < 0.1 * plain


def differences(model: Path, found: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """For each sampled token: how far the trainer, and the model without an adapter, are from the engine's logprob."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in found:
        with torch.no_grad():
            logprobs = plain(torch.tensor([row["ids"]])).logits[0].log_softmax(-1)
        for place, bit in enumerate(row["mask"]):
            if bit:
                without = float(logprobs[place - 1, row["ids"][place]])
                yield abs(row["trainer"][place] - row["engine"][place]), abs(without - row["engine"][place])
