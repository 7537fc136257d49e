"""Refusals of ``rows = "tree"``, by name and before anything starts, and what it changes of verl's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlavaConfig

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl.forest_refused import model_faults
from ajet_trainer.backends.verl.settings import compose, decided
from ajet_trainer.backends.verl.unread import keys
from ajet_trainer.config import Config
from tests.trainer.engine.test_settings import ACTOR, composed, refused

REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
FLEX = "flex_attention"
BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize(
    ("verl", "key"),
    [
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 2},
         f"{ACTOR}.ulysses_sequence_parallel_size"),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 2},
         f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
        ({f"{REF}.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 2, f"{ACTOR}.use_kl_loss": True},
         f"{REF}.ulysses_sequence_parallel_size"),
        ({f"{ACTOR}.fsdp_config.pad_to_length": True}, f"{ACTOR}.fsdp_config.pad_to_length"),
        ({f"{ACTOR}.fsdp_config.qat.enable": True}, f"{ACTOR}.fsdp_config.qat.enable"),
        ({f"{MODEL}.use_fused_kernels": True}, f"{MODEL}.use_fused_kernels"),
        ({f"{MODEL}.use_remove_padding": False}, f"{MODEL}.use_remove_padding"),
        ({ATTENTION: "flash_attention_2"}, f"{ATTENTION} = 'flash_attention_2' does not compute a tree"),
        ({ATTENTION: "eager"}, f"{ATTENTION} = 'eager' does not compute a tree"),
        ({f"{ACTOR}.strategy": "fsdp_turbo"}, f"{ACTOR}.strategy = 'fsdp_turbo'"),
        ({"model_engine": "megatron"}, f"{ACTOR}.strategy = 'megatron'"),
    ],
)  # fmt: skip
def test_settings(verl: dict[str, Any], key: str, tiny: Path) -> None:
    composed(verl, model=str(tiny))
    said = refused(verl, model=str(tiny), rows="tree")
    assert said.startswith(key) and said.endswith("set rows = 'timeline'")


def saved(folder: Path, family: str, **more: Any) -> str:
    AutoConfig.for_model(family, **(BASE | more)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("mistral", {"sliding_window": 512}, "has a sliding window of 512 tokens"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
         "has layers of sliding_attention"),
        ("gemma2", {}, "has layers of sliding_attention"),
        ("qwen3_next", {}, "has layers without an attention that takes a mask"),
        ("mamba", {}, "has layers without an attention that takes a mask"),
        ("bert", {}, "attends to later tokens"),
        ("bloom", {}, "has layers without an attention that takes a mask"),
        ("qwen2", {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "brings code of its own"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "(dynamic) that go by the longest row"),
        ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 64, "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}},
         "positions (longrope) that go by the longest row"),
        ("llava", {}, "is not a language model alone"),
    ],
)  # fmt: skip
def test_models(family: str, more: dict[str, Any], words: str, tmp_path: Path) -> None:
    if family == "llava":
        LlavaConfig().save_pretrained(tmp_path)
        said = list(model_faults(str(tmp_path), FLEX))
    else:
        said = list(model_faults(saved(tmp_path, family, **more), FLEX))
    assert len(said) == 1 and said[0][0] == "model" and words in said[0][1]


def test_a_model_may_have_one_attention_and_not_the_other(tmp_path: Path) -> None:
    assert list(model_faults(saved(tmp_path, "olmoe"), "sdpa")) == []
    ((_, said),) = model_faults(str(tmp_path), FLEX)
    assert "has no flex_attention in transformers" in said


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "phi3", "granite", "mixtral"]
)
def test_models_that_do(family: str, tmp_path: Path) -> None:
    more = {"sliding_window": None} if family in ("mistral", "mixtral") else {"attention_dropout": 0.1}
    if family == "phi3":
        more = {"pad_token_id": 0}
    assert list(model_faults(saved(tmp_path, family, **more), FLEX)) == []


def test_attention_on_gpus_is_blockwise_and_a_model_must_be_there(tiny: Path) -> None:
    assert composed({}, model=str(tiny), rows="tree").actor_rollout_ref.model.override_config == {
        "attn_implementation": "flex_attention"
    }
    assert "'sdpa' does not compute a tree" in refused({ATTENTION: "sdpa"}, model=str(tiny), rows="tree")
    here, flat = (composed({}, model=str(tiny), device="cpu", rows=rows, max_tokens=3000).actor_rollout_ref
                  for rows in ("tree", "timeline"))  # fmt: skip
    assert here.model.override_config["attn_implementation"] == "sdpa"
    for limited in (here.actor.ppo_max_token_len_per_gpu, here.ref.log_prob_max_token_len_per_gpu):
        assert limited == 6000, "a tree of two of the longest rows"
    assert flat.actor.ppo_max_token_len_per_gpu == 3000
    said = refused({}, model=str(tiny / "nothing"), rows="tree")
    assert said.startswith("model = ") and said.endswith("set rows = 'timeline'")


@pytest.mark.parametrize("text", ["[]", "null", "{}", "{", '{"model_type": "qwen2", "num_hidden_layers": "x"}'])
def test_a_configuration_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    ((key, said),) = model_faults(str(tmp_path), FLEX)
    assert key == "model" and "has no configuration that can be read here (" in said and "()" not in said


def test_rows_are_trees_where_they_can_be_and_nothing_is_refused_for_their_sake(tiny: Path, tmp_path: Path) -> None:
    def form(
        verl: dict[str, Any] | None = None, device: str = "cpu", model: str = str(tiny), **ours: Any
    ) -> tuple[str, str]:
        config, tree, why = decided(Config(model=model, verl=verl or {}, **ours), device, None)
        assert keys(tree) == keys(compose(config, device, None)), "as if the user had set these rows"
        return str(config.rows), why or ""

    assert form() == ("tree", "")
    assert form(rows="timeline") == ("timeline", "")
    assert form(device="cuda") == ("timeline", "trees were not measured on GPUs; rows = 'tree' asks for them")
    assert form(device="cuda", rows="tree") == ("tree", "")
    fused = f"{MODEL}.use_fused_kernels"
    assert form({fused: True}) == (
        "timeline", f"{fused} computes the logprob of the next token alone, and a fork has several"
    )
    rows, why = form(model=saved(tmp_path, "gemma2"))
    assert rows == "timeline" and why.endswith("(gemma2) has layers of sliding_attention, so it does not compute trees")
    with pytest.raises(ConfigError, match="remax"):
        form({"algorithm.adv_estimator": "remax"})
