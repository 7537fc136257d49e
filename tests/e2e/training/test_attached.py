"""The attached placement: an engine that was there before takes weights through its own routes and goes on serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Engine
from tests.e2e.players import Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.trainer_process import FLOAT32, RATE, TrainerProcess, living

STEPS, GROUPS, SIZE = 4, 2, 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # verl, imported to restore the engine, warns of engines it lacks
def test_an_engine_that_stands_alone_takes_the_weights(tmp_path: Path, shaped: Engine) -> None:
    """With a learning rate that moves the policy far, trainer and engine still agree: the weights did arrive. So they
    do at both temperatures at which the players sample, and each is a row of its own. Without overlap all is on-policy:
    a whole call, too, is as likely for the trainer as it was for the engine."""
    ours = {
        "model": shaped.model, "model_name": "tiny", "engine_urls": [shaped.url], "groups": GROUPS, "group_size": SIZE,
        "overlap": 0, "total_steps": STEPS,
    }  # fmt: skip
    verl = FLOAT32 | {RATE: 5e-3, "algorithm.rollout_correction.rollout_is": "sequence"}
    with ProxyProcess(f"tiny={shaped.url}", tmp_path / "proxy") as proxy:
        try:
            with (
                TrainerProcess(tmp_path, {"proxy_url": proxy.url, **ours}, verl) as trainer,
                Players(proxy.url, model="tiny", group_size=SIZE, parallel=GROUPS * SIZE, temperatures=(1.0, 0.5)),
            ):
                trainer.until(lambda: bool(trainer.metrics()), 400)
                below = trainer.below()
                assert not any("EngineCore" in " ".join(process.cmdline()) for process in below)
                metrics = trainer.finish(200)
        finally:
            restore(shaped, tmp_path / "weights")
    assert [line["policy_version"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["min_policy_version"] >= line["step"] - 1 for line in metrics)
    assert all(line["staleness_max"] == 0 for line in metrics)
    assert all(0 <= share <= 1 for line in metrics for share in line["idle"].values())
    assert all(line["idle"]["engine"] > 0 and line["idle"]["trainer"] > 0 for line in metrics)
    assert max(line["rollout_probs_diff_max"] for line in metrics) < 1e-3
    assert all(line["samples"] == 2 * line["episodes"] and line["merged_calls"] == 0 for line in metrics)
    first = metrics[0]["learner"]
    assert all(first[f"rollout_corr/rollout_is_{end}"] == pytest.approx(1.0, abs=1e-3) for end in ("min", "max"))
    assert not any(line[name] for line in metrics for name in ("left_out_calls", "corrected_tokens", "untold_tokens"))
    assert metrics[-1]["entropy"] < metrics[0]["entropy"]
    assert living(below, 20) == []


def restore(vllm: Engine, folder: Path) -> None:
    """The engine is shared by the session: it gets the weights back that it started with.

    The model's own file leaves out the output layer, which is tied to the embedding; vLLM reloads layer by layer and
    would keep the trained one, so every tensor is written under each of its names.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from ajet_trainer.engines.weights import load_into

    weights = AutoModelForCausalLM.from_pretrained(vllm.model, dtype=torch.float32).state_dict()
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    load_into([vllm.url], folder, 1, 60.0)
