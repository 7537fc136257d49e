"""Makes two untrained models of two families: a Qwen2 that sends, and a Llama that receives. Each takes a second.

    .venv-engine/bin/python integrations/tutorials/team/models.py runs/tutorials/team/models

Their vocabulary is the letters, and the four words of the game. Their weights are drawn wider than usual, the narrow
model's twice as wide as the other's. So an answer depends on what was asked from the beginning, by chance. Otherwise
neither could begin to learn from the other.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPREAD = 12.8
MERGES = [("s", "u"), ("su", "n"), ("m", "o"), ("mo", "o"), ("moo", "n"), ("y", "e"), ("ye", "s"), ("n", "o")]
PIECES = ("<end>", *string.ascii_lowercase, *(left + right for left, right in MERGES))
KINDS = {"sender": (Qwen2Config, Qwen2ForCausalLM, 128), "receiver": (LlamaConfig, LlamaForCausalLM, 256)}

if __name__ == "__main__":
    pieces = Tokenizer(models.BPE({piece: number for number, piece in enumerate(PIECES)}, MERGES))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for seed, (name, (config, kind, width)) in enumerate(KINDS.items()):
        torch.manual_seed(seed)
        model = kind(config(
            vocab_size=len(PIECES), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=SPREAD / width, bos_token_id=None, eos_token_id=0,
            pad_token_id=0,
        ))  # fmt: skip
        folder = Path(sys.argv[1]) / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print(f"{folder}: {model.num_parameters():,} parameters")
