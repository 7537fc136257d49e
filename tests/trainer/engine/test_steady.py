"""A gradient is that of the policy: nothing in it is drawn by chance, and no row sees its neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from ajet_trainer.backends.verl.steady import look, quiet
from tests.kit.families import families, save
from tests.kit.learner import forest_worker, training_worker
from tests.trainer.engine.test_gradient import FULL, close, conversation, gradient, rows_of, step_data

RATES: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_dropout": 0.1},
    "qwen3": {"attention_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.1, "attention_dropout": 0.1},
    "gpt_bigcode": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "phi": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attention_dropout": 0.2},
}
"""Settings of models that draw by chance, each in its own way."""


def made(folder: Path, family: str, more: dict[str, Any]) -> Path:
    kind, model = families()[family]
    return save(folder, kind, model, "sdpa", {"vocab_size": 500} | more)


def a_step() -> Any:
    rows = rows_of([[conversation(seed, turns=2)] for seed in range(3)])
    return step_data(rows, [1.0, 0.2, -1.2])


@pytest.mark.parametrize("family", RATES)
def test_one_gradient_computed_twice_is_the_same(family: str, tmp_path: Path) -> None:
    loud = made(tmp_path / "loud", family, RATES[family])
    still = made(tmp_path / "still", family, dict.fromkeys(RATES[family], 0.0))
    worker = training_worker(loud, tokenizer=False)
    one, two = (gradient(worker, a_step(), **FULL) for _ in range(2))
    assert np.linalg.norm(one) > 0 and np.array_equal(one, two)
    assert close(gradient(training_worker(still, tokenizer=False), a_step(), **FULL), one) < 1e-6
    assert worker.wrong(2048) == ""


def test_neither_is_it_drawn_over_trees(tmp_path: Path) -> None:
    folder = made(tmp_path, "qwen2", {"attention_dropout": 0.2})
    worker = forest_worker(folder, tokenizer=False)
    one, two = (gradient(worker, a_step(), **FULL) for _ in range(2))
    assert np.array_equal(one, two)
    assert close(gradient(training_worker(folder, tokenizer=False), a_step(), **FULL), one) < 1e-5
    assert worker.wrong(2048) == ""


def test_what_a_model_is_configured_to_stays_in_its_checkpoint(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "mixtral", RATES["mixtral"])
    worker = training_worker(folder, tokenizer=False)
    worker.save_checkpoint(str(tmp_path / "saved"), global_step=1)
    said = json.loads((tmp_path / "saved/huggingface/config.json").read_text())
    assert {name: said[name] for name in RATES["mixtral"]} == RATES["mixtral"]
    one, two = (gradient(worker, a_step()) for _ in range(2))
    assert np.array_equal(one, two)


def test_all_that_is_of_the_kind_is_off() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(4, 4)
            self.layerdrop, self.drop_prob, self.router_jitter_noise, self.activation_dropout = 0.1, 0.2, 0.01, 0.5
            self.dropping, self.width, self.drop_tokens = "no", 4.0, True
            self.attend = torch.nn.MultiheadAttention(4, 1, dropout=0.1)
            self.out = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.AlphaDropout(0.2), torch.nn.Dropout2d(0.2))
            self.config = SimpleNamespace(summary_first_dropout=0.1, attn_pdrop=0.1, hidden_size=4)

    model = get_peft_model(Layer(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.25))
    layer = model.base_model.model
    told = list(quiet(model.modules()))
    assert sorted((name, rate) for _, name, rate in told if name != "lora_dropout") == [
        ("attn_pdrop", 0.1), ("summary_first_dropout", 0.1),
    ]  # fmt: skip
    assert (layer.layerdrop, layer.drop_prob, layer.router_jitter_noise, layer.activation_dropout) == (0, 0, 0, 0)
    assert (layer.dropping, layer.width, layer.drop_tokens, layer.config.hidden_size) == ("no", 4.0, True, 4)
    assert layer.attend.dropout == 0 and layer.q_proj.lora_dropout["default"].p == 0
    assert [one.p for one in layer.out] == [0, 0, 0]
    assert list(quiet(model.modules())) == []


def test_what_has_no_name_is_found_by_looking(tmp_path: Path) -> None:
    worker = training_worker(made(tmp_path, "qwen2", {}), tokenizer=False)
    layer = worker.engine.module.model.layers[0].mlp
    theirs = layer.forward
    odd = {
        "from one time to the next": lambda out: out * (1 + 1e-3 * torch.rand_like(out)) if layer.training else out,
        "from what was sampled from": lambda out: out * 1.5 if layer.training else out,
        "with what stands next to it": lambda out: out + 0.01 * out.cumsum(1).roll(1, 1),
        "stands next": lambda out: out + torch.arange(out.shape[1])[None, :, None] * 1e-2,
        "next to": lambda out: out + 0.1 * out.mean(1, keepdim=True),
    }
    assert worker.wrong(2048) == ""
    for words, change in odd.items():
        layer.forward = lambda x, change=change: change(theirs(x))
        assert words in worker.wrong(2048)
    layer.forward = theirs
    assert worker.wrong(2048) == ""


def test_mixtures_of_experts_may_round(tmp_path: Path) -> None:
    """They compute the tokens of all rows together, and how many these are changes the rounding."""
    for dtype in ("fp32", "bf16"):
        folder = made(tmp_path / dtype, "qwen3_moe", {})
        worker = training_worker(folder, dtype=dtype, tokenizer=False)
        found = look(worker, packed=True)
        assert found.said == "" and found.neighbour <= 4 * found.rounding
