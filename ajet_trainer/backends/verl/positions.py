"""Rotary positions as engines have them, where those of transformers go by the longest row of a micro-batch.

- `longrope` has factors for short rows and for long ones. transformers takes those of the longest row. vLLM takes one
  list for all rows: the long one if it serves rows (``max_model_len``) above the length that the model was trained at.
  It also scales by a rule of its own. So both are fixed here, once the length is known that the engines serve.
- `dynamic` is stretched by transformers where a row is above ``max_position_embeddings``. vLLM never stretches it, and
  has no positions above that. Up to there they are equal, so longer rows are refused.

Source: vLLM 0.31, ``vllm/model_executor/layers/rotary_embedding``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

LONG, DYNAMIC = "longrope", "dynamic"
BY_LENGTH = (DYNAMIC, LONG)
"""Kinds of rotary positions that go by the longest row of a micro-batch."""


def rotary_kinds(told: dict[str, Any]) -> set[str]:
    """The kinds of rotary positions in ``rope_parameters``: of all layers, or of each type of them."""
    each = [told, *(part for part in told.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in each if "rope_type" in part}


def misfits(config: Any, longest: int) -> Iterator[str]:
    """Parts of a model of `config` that engines compute otherwise, in rows of up to `longest` tokens."""
    told, limit = getattr(config, "rope_parameters", None) or {}, getattr(config, "max_position_embeddings", None)
    kinds = rotary_kinds(told)
    if DYNAMIC in kinds and "max_trained_positions" in told:
        yield f"has positions ({DYNAMIC}) with max_trained_positions, which only the engine reads"
    elif DYNAMIC in kinds and limit is not None and longest > limit:
        yield f"has positions ({DYNAMIC}) for {limit} tokens: set max_tokens in [trainer] to no more"
    elif LONG in kinds and (told.get("rope_type") != LONG or getattr(config, "auto_map", None)):
        yield f"has positions ({LONG}) that are not known well enough to fix them as the engine does"


def trained_at(config: Any) -> int:
    """The length of rows up to which engines take the short factors of a model of `config`; 0 if it has none."""
    told = getattr(config, "rope_parameters", None) or {}
    return int(told["original_max_position_embeddings"]) if told.get("rope_type") == LONG else 0


def fix(parts: Iterable[torch.nn.Module], served: int) -> None:
    """Has the modules `parts` compute `longrope` as an engine does that serves rows of up to `served` tokens."""
    for part in parts:
        if getattr(part, "rope_type", None) == LONG:
            config: Any = part.config
            part.inv_freq, part.attention_scaling = long_rope(
                config.rope_parameters, config.max_position_embeddings, served, part.inv_freq.device
            )
            part.rope_type = "default"  # so that nothing changes it any more


def long_rope(told: dict[str, Any], limit: int, served: int, device: Any = "cpu") -> tuple[torch.Tensor, float]:
    """Frequencies ``[width / 2]`` and what cosines and sines are multiplied by, of a model for `limit` tokens."""
    trained = told["original_max_position_embeddings"]
    which = "long" if served > trained else "short"
    factors = torch.tensor(told[f"{which}_factor"], dtype=torch.float32, device=device)
    powers = torch.arange(len(factors), dtype=torch.float32, device=device) / len(factors)
    stretched = limit / trained
    scale = math.sqrt(1 + math.log(stretched) / math.log(trained)) if stretched > 1 else 1.0
    return 1.0 / (factors * told["rope_theta"] ** powers), told.get(f"{which}_mscale") or scale
