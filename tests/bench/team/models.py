"""Two untrained models of two families and sizes, with one tokenizer: a Qwen2 that sends, and a Llama that receives.

Their weights are drawn ten times as wide as usual. So an answer depends on what was asked from the beginning, by
chance. Without that, neither could begin: as long as one ignores what it is told, nothing that the other says matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit.tiny_model import build_tokenizer

SPREAD = 0.2
SENDER, RECEIVER = "sender", "receiver"
MODELS = (SENDER, RECEIVER)


def _made(name: str, **common: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if name == SENDER:  # 0.4 million parameters
        small = Qwen2Config(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
                            num_key_value_heads=2, **common)  # fmt: skip
        return Qwen2ForCausalLM(small)
    large = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=4, **common)  # fmt: skip
    return LlamaForCausalLM(large)  # 2.1 million


def build(folder: Path, name: str, seed: int) -> Path:
    """The model `name` in a folder of its own."""
    import torch

    tokenizer, path = build_tokenizer(), folder / f"{name}-{seed}"
    with torch.random.fork_rng():
        torch.manual_seed(seed + (name == RECEIVER) * 1000)
        model = _made(
            name, vocab_size=len(tokenizer), max_position_embeddings=2048, tie_word_embeddings=True,
            initializer_range=SPREAD, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        ).to(torch.float32)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return path
