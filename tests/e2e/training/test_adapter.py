"""Agents of a run that trains an adapter are served the model with it, in both placements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Engine
from tests.e2e.players import Players
from tests.e2e.training.test_attached import restore
from tests.e2e.training.test_for_people import rows
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import FLOAT32, RATE, TrainerProcess

pytestmark = pytest.mark.slow
STEPS, GROUPS, SIZE = 3, 2, 4
LORA = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 16, RATE: 2e-2, **FLOAT32}


def trained(folder: Path, proxy: str, model: Path, name: str, **ours: Any) -> list[dict[str, Any]]:
    """The rows of the last step of a run, which its engine sampled with the weights of the steps before it."""
    usual = {
        "model": model, "model_name": name, "proxy_url": proxy, "groups": GROUPS, "group_size": SIZE,
        "total_steps": STEPS, "overlap": 0,
    }  # fmt: skip
    with (
        TrainerProcess(folder, usual | ours, LORA) as trainer,
        Players(proxy, model=name, group_size=SIZE, parallel=GROUPS * SIZE),
    ):
        trainer.finish(500)
    return rows(trainer.run_dir, STEPS)


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


def served(model: Path, found: list[dict[str, Any]]) -> None:
    ours, plain = (sum(part) for part in zip(*differences(model, found), strict=True))
    assert ours < 0.1 * plain, "the engine has the adapter, and it makes a difference"


def test_an_engine_of_the_trainers_own_serves_the_adapter(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    with ProxyProcess(None, tmp_path / "proxy") as proxy:
        served(model, trained(tmp_path, proxy.url, model, "policy"))


@pytest.mark.filterwarnings("ignore")  # verl, imported to restore the engine, warns of engines it lacks
def test_an_engine_that_stands_alone_serves_the_adapter(tmp_path: Path, shaped: Engine) -> None:
    with ProxyProcess(f"tiny={shaped.url}", tmp_path / "proxy") as proxy:
        try:
            found = trained(tmp_path, proxy.url, shaped.model, "tiny", engine_urls=[shaped.url])
        finally:
            restore(shaped, tmp_path / "weights")
    served(shaped.model, found)
