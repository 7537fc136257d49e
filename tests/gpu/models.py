"""Models of a real size with random weights and the tests' small tokenizer: their costs are real, their words are not.

    python -m tests.gpu.models FOLDER NAME…        0.5b, 1.5b, 3b (Qwen2's shapes), 0.6b (Qwen3's)
"""

from __future__ import annotations

import sys
from pathlib import Path

SHAPES = {
    "0.5b": ("qwen2", 896, 4864, 24, 14, 2),
    "1.5b": ("qwen2", 1536, 8960, 28, 12, 2),
    "3b": ("qwen2", 2048, 11008, 36, 16, 2),
    "0.6b": ("qwen3", 1024, 3072, 28, 16, 8),
}
"""Kind, width, width of the feed-forward layer, layers, attention heads, key and value heads."""


def build(folder: Path, name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.kit.tiny_model import build_tokenizer

    kind, width, inner, layers, heads, shared = SHAPES[name]
    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        kind, vocab_size=151936, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, head_dim=128 if kind == "qwen3" else width // heads,
        max_position_embeddings=32768, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    count = sum(one.numel() for one in model.parameters())
    sys.stdout.write(f"{name}: {count / 1e9:.2f} billion parameters in {folder / name}\n")


if __name__ == "__main__":
    for one in sys.argv[2:]:
        build(Path(sys.argv[1]), one)
