"""Rotary positions are those of vLLM, for each kind that transformers has: compared with vLLM's own code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ajet_trainer.backends.verl.positions import fix
from tests.kit.families import families, logprobs, save
from tests.kit.learner import training_worker, verl_learner
from tests.trainer.engine.test_families import described
from tests.trainer.engine.test_settings import composed, refused

LIMIT, TRAINED = 512, 128
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 1.7], "long_factor": [2.0, 2.5, 4.0, 6.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, "rope_theta": 1e4, **FACTORS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": TRAINED},
    "yarn": YARN,
    "yarn, attention_factor": YARN | {"attention_factor": 1.3},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 16},
    "yarn, a part": YARN | {"partial_rotary_factor": 0.5},
    "longrope": LONGROPE,
    "longrope, its own factors": LONGROPE | {"factor": 7.0, "attention_factor": 1.7},
}  # fmt: skip


def of_vllm(told: dict[str, Any], served: int) -> Any:
    """vLLM's cosines and sines ``[N, width]`` in an engine that serves rows of up to `served` tokens."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding as rotary

    limited = SimpleNamespace(model_config=SimpleNamespace(max_model_len=served))
    with (
        set_current_vllm_config(VllmConfig()),
        patch.object(rotary.phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: limited),
        patch.dict(rotary._ROPE_DICT, clear=True),
    ):
        made = rotary.get_rope(8, LIMIT, rope_parameters=told, dtype=torch.float32)
    if not hasattr(made, "use_long_rope"):
        return made.cos_sin_cache
    both = made.long_short_cos_sin_cache
    return both[TRAINED:] if made.use_long_rope else both[:TRAINED]


def of_transformers(told: dict[str, Any], served: int, length: int) -> Any:
    """Those of transformers for a row of `length` tokens, once they are fixed."""
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=LIMIT, rope_parameters=dict(told)
    )
    module = LlamaRotaryEmbedding(config)
    fix([module], served)
    parts = module(torch.zeros(1, 1), torch.arange(length)[None])
    return torch.cat([part[0, :, : part.shape[-1] // 2] for part in parts], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("served", [100, LIMIT])
def test_each_kind_is_computed_as_the_engine_does(kind: str, served: int) -> None:
    told = {"rope_theta": 1e4} | KINDS[kind]
    theirs = of_vllm(dict(told), served)
    for length in (min(served, 100), served):
        assert float((of_transformers(told, served, length) - theirs[:length]).abs().max()) < 1e-5


@pytest.mark.parametrize("served", [TRAINED, LIMIT])
def test_a_rows_logprobs_do_not_go_by_the_longest(served: int, tmp_path: Path) -> None:
    """Short and long rows, packed: as each alone, and as with the frequencies that vLLM takes."""
    kind, made = families()["phi3"]
    more: dict[str, Any] = {"rope_parameters": LONGROPE, "original_max_position_embeddings": TRAINED}
    more |= {"sliding_window": None, "hidden_size": 32}
    worker = training_worker(save(tmp_path, kind, made, "sdpa", more), tokenizer=False)
    pick = torch.Generator().manual_seed(0)
    longest = min(served, 200)
    rows = [torch.randint(3, 300, (length,), generator=pick) for length in (40, longest, 30)]
    free = logprobs(worker, rows, packed=True)
    assert worker.wrong(served) == ""
    found = logprobs(worker, rows, packed=True)
    alone = [logprobs(worker, [row], packed=True)[0] for row in rows]
    assert max(float((one - other).abs().max()) for one, other in zip(found, alone, strict=True)) < 1e-5
    theirs = of_vllm(dict(LONGROPE), served)
    for module in worker.engine.module.modules():
        if hasattr(module, "inv_freq"):
            module.forward = lambda x, position_ids: tuple(
                part.repeat(1, 1, 2) for part in theirs[position_ids].chunk(2, dim=-1)
            )
    expected = logprobs(worker, rows, packed=True)
    assert max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)) < 1e-5
    if served > TRAINED:
        short = logprobs(worker, rows[:1], packed=True)[0]
        assert float((free[0] - found[0]).abs().max()) < 1e-5 and float((short - found[0]).abs().max()) < 1e-5


def test_what_cannot_be_fixed_is_refused_by_name(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = described(tmp_path / "a", "llama", rope_parameters=dynamic, max_position_embeddings=512)
    composed({}, model=folder, max_tokens=512)
    said = refused({}, model=folder, max_tokens=513)
    assert "positions (dynamic) for 512 tokens: set max_tokens in [trainer] to no more" in said
    folder = described(tmp_path / "b", "llama", rope_parameters=dynamic | {"max_trained_positions": 64})
    assert "max_trained_positions, which only the engine reads" in refused({}, model=folder, max_tokens=100)
    own = {"auto_map": {"AutoModelForCausalLM": "own.Model"}}
    folder = described(tmp_path / "c", "phi3", rope_parameters=LONGROPE, hidden_size=32, **own)
    assert "(longrope) that are not known well enough" in refused({}, model=folder, max_tokens=100)


def test_engines_that_stand_alone_are_asked_how_long_rows_may_be_if_it_matters() -> None:
    engines, tree = SimpleNamespace(longest=lambda bound: 10 * bound), composed({}, max_tokens=77)
    assert verl_learner(tree, trained_at=TRAINED)._served() == 77
    assert verl_learner(tree, engines=engines, trained_at=0)._served() == 77
    assert verl_learner(tree, engines=engines, trained_at=TRAINED)._served() == 10 * TRAINED
