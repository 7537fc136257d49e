"""Small models with random weights, one of each family that verl loads, and how right their rows are."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 8, "index_head_dim": 16,
    "index_n_heads": 2, "n_layer": 2, "n_head": 4, "n_embd": 64, "d_model": 64, "ffn_dim": 96,
}  # fmt: skip
"""Settings that make most models small; each takes those that it knows."""
NARROW = {
    "sliding_window": 16, "attention_chunk_size": 16, "keep_window_size": 16, "mamba_n_heads": 8, "mamba_d_state": 16,
    "mamba_chunk_size": 16, "chunk_size": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "n_groups": 1, "mamba_d_ssm": 64, "state_size": 16, "lru_width": 64, "num_heads": 4, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "depth": 2, "embed_dim": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "n_positions": 512,
    "image_size": 32, "patch_size": 16, "out_hidden_size": 64, "projection_dim": 64, "block_size": 16,
}  # fmt: skip
"""More of the kind, so that windows and chunks are shorter than rows."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.0, 0.0]},
    "helium": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2,
                      "zero_expert_num": 1},
    "mamba2": {"num_heads": 16, "head_dim": 8},
    "mistral4": {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
}
"""Settings that some need besides."""
SECTIONS = {
    "glm4v_text": [4, 2, 2], "glm_ocr_text": [4, 2, 2], "glm4v_moe_text": [2, 1, 1], "paddleocr_vl_text": [2, 1, 1],
    "qwen2_5_omni_text": [4, 2, 2], "qwen2_5_vl_text": [4, 2, 2], "qwen2_vl_text": [4, 2, 2],
}  # fmt: skip
"""Into which parts some split their rotary positions: for time, height and width."""
RIGHT = 3e-4
"""A logprob may be so far from what its row alone has: sums of float32 in another order."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def families() -> Mapping[str, tuple[Any, Any]]:
    """By name, the configuration and the class of each model that verl loads: language models, and those that see."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    found = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for kind in mapping.keys():  # noqa: SIM118  # which has no iterator
            made = mapping[kind]
            made = made[0] if isinstance(made, tuple) else made
            if mapping is not MODEL_FOR_CAUSAL_LM_MAPPING or "ForCausalLM" in made.__name__:
                found[kind.model_type] = (kind, made)
    return dict(sorted(found.items()))


def small(kind: Any, more: Mapping[str, Any] = {}) -> Any:
    """A configuration of this `kind` that makes a small model, with its parts."""
    plain = kind()
    known = plain.to_dict()
    sizes = {**SMALL, **NARROW, **OWN.get(kind.model_type, {}), **more}
    said = {name: value for name, value in sizes.items() if name in known}
    for name in kind.sub_configs:
        if (part := getattr(plain, name, None)) is not None:
            said[name] = small(type(part))
    if parts := SECTIONS.get(kind.model_type):
        said["rope_parameters"] = (known.get("rope_parameters") or {}) | {"mrope_section": parts}
    return kind(**said)


def save(folder: Path, kind: Any, made: Any, attention: str, more: Mapping[str, Any] = {}) -> Path:
    """A model of this `kind` in `folder`, with random weights. Raises what its library does, for one that is large."""
    import torch

    config = small(kind, more)
    config._attn_implementation = attention
    with torch.device("meta"):
        size = sum(one.numel() for one in made(config).parameters())
    if size > 2e7:
        raise ValueError(f"has {size:.0e} numbers at the least")
    torch.manual_seed(0)
    model = made(config).float()
    for weights in model.parameters():
        noise = torch.randn_like(weights) * 0.05
        weights.data = noise if weights.dim() > 1 else weights.data + noise
    model.save_pretrained(folder)
    return folder


def logprobs(worker: Any, rows: Sequence[Any], *, packed: bool) -> list[Any]:
    """Of each of `rows` in one micro-batch."""
    from ajet_trainer.backends.verl.micro_batches import batch_of

    with worker.engine.eval_mode():
        data = batch_of([(row[:1], row[1:]) for row in rows], packed=packed)
        found = worker.engine.infer_batch(data)["model_output"]["log_probs"]
    return [one[:-1] for one in found.unbind()]


def wrong_by(worker: Any, *, packed: bool) -> float:
    """By how much logprobs of rows in one micro-batch differ from those of each alone, at the most."""
    import torch

    pick = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 300, (length,), generator=pick) for length in (57, 40, 73)]
    alone = [logprobs(worker, [row], packed=packed)[0] for row in rows]
    found = logprobs(worker, rows, packed=packed)
    return max(float((one - other).abs().nan_to_num(torch.inf).max()) for one, other in zip(alone, found, strict=True))
