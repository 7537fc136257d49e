"""A real but tiny language model for tests: two Qwen2 layers, 0.4 M parameters, own byte-level BPE, and the
chat template of a family (see `tiny_templates`), ChatML unless told otherwise.

Everything is made from this file alone, so two builds on one torch version are equal byte for byte and no test needs a
download. Hidden size 128 with two heads of 64 is what vLLM's CPU attention accepts. The merges cover a few common words
only; other text falls apart into bytes, which keeps outputs short to look at and re-tokenisation easy to provoke.

    python -m tests.kit.tiny_model DIR [FAMILY]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.kit.tiny_templates import CALL_MARKS, FAMILIES

THINK = ("<think>", "</think>")
WORDS = (
    "system user assistant tool the a an and or to of in is are you I it not yes no on at guess number higher lower "
    "right wrong correct say vowels hello world capital Paris London France what answer help sure done next try "
    "again between"
).split()


def merges() -> list[tuple[str, str]]:
    """BPE merges that build each word, with and without its leading space, from left to right."""
    out: dict[tuple[str, str], None] = {}
    for word in WORDS:
        for text in ("Ġ" + word, word):
            for end in range(1, len(text)):
                out[(text[:end], text[end])] = None
    return list(out)


def build_tokenizer(family: str = "chatml", more: Sequence[str] = ()) -> Any:
    """A `PreTrainedTokenizerFast` that decodes back to exactly what it encoded; `more` tokens come last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs, made = merges(), FAMILIES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = (*made.special, *made.marks, *letters, *(left + right for left, right in pairs), *more)
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(made.special))
    tokenizer.add_tokens([mark for mark in made.marks if mark not in CALL_MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=made.eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = made.template
    return fast


def build(
    directory: str | Path, *, family: str = "chatml", seed: int = 0, max_position: int = 2048, more: Sequence[str] = (),
    defaults: Mapping[str, float] = MappingProxyType({}), layers: int = 2, experts: int = 0,
) -> Path:
    """Writes model and tokenizer into `directory` (made if missing) and returns it; a second call does nothing. `more`
    tokens are never what text is encoded to, but can be sampled: a reasoning parser's marks. `defaults` are how it is
    sampled where nobody says how. With `experts` it is a Qwen3 mixture of so many."""
    path = Path(directory)
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = build_tokenizer(family, more)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    made, known = (Qwen3MoeForCausalLM, Qwen3MoeConfig) if experts else (Qwen2ForCausalLM, Qwen2Config)
    config = known(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=max_position,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **(mixture if experts else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made(config).to(torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    if defaults:
        own = path / "generation_config.json"
        own.write_text(json.dumps(json.loads(own.read_text()) | {"do_sample": True, **defaults}))
    return path


if __name__ == "__main__":
    family = sys.argv[2] if len(sys.argv) > 2 else "chatml"
    sys.stdout.write(f"{build(sys.argv[1], family=family)}\n")
