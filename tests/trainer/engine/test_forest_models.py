"""Each language model of transformers is refused, or computes the forest of some rows as it does the rows: by a mask,
which stands for that of flex attention, and by spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ajet_trainer.backends.verl.forest_attention import SPANS, spans_of
from ajet_trainer.backends.verl.forest_refused import misfits
from ajet_trainer.forest import forest_of
from tests.kit.families import SMALL, within
from tests.kit.forests import dense

pytestmark = pytest.mark.slow


def small(kind: Any) -> Any:
    """A configuration of this `kind` with attention that takes a mask; None if it cannot be made small."""
    try:
        known = kind().to_dict()
        config = kind(**{name: value for name, value in SMALL.items() if name in known})
    except Exception:
        return None
    return config


def apart(made: Any, config: Any) -> float | None:
    """The distance of the forest's logits from the rows', relative to the largest; None for models that are not so
    made."""
    pick = np.random.default_rng(0)
    base = pick.integers(3, 300, 20)
    shapes = ((20, 5), (20, 9), (10, 12), (20, 0), (0, 15))
    rows = [np.concatenate([base[:length], pick.integers(3, 300, more)]) for length, more in shapes]
    forest, furthest = forest_of(rows), 0.0
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    try:
        with within(20):
            model = made(config).float().eval()
            for weights in model.parameters():
                if weights.dim() > 1:
                    torch.nn.init.normal_(weights, std=0.05)
            flat = [model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0] for row in rows]
    except Exception:
        return None
    mask = torch.from_numpy(dense(forest.exit))[None, None]
    spans = spans_of(forest, "cpu", torch.float32)
    for name, more in (("sdpa", {"attention_mask": mask}), (SPANS, {"forest_spans": spans})):
        model.config._attn_implementation = name
        found = model(
            input_ids=torch.from_numpy(forest.ids)[None], position_ids=torch.from_numpy(forest.depth)[None],
            use_cache=False, **more,
        ).logits[0]  # fmt: skip
        for expected, places in zip(flat, forest.index, strict=True):
            furthest = max(furthest, float((expected - found[places]).abs().max() / expected.abs().max()))
    return furthest


def test_every_model() -> None:
    tried, wrong = [], {}
    with torch.no_grad():
        for kind in list(MODEL_FOR_CAUSAL_LM_MAPPING.keys()):
            config = small(kind)
            if config is None or any(misfits(config, "sdpa")):
                continue
            found = apart(MODEL_FOR_CAUSAL_LM_MAPPING[kind], config)
            if found is not None:
                tried.append(config.model_type)
            if found is not None and not found < 1e-4:
                wrong[config.model_type] = found
    assert wrong == {}
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "olmo2", "phi3"} <= {*tried}


@pytest.mark.parametrize("family", ["doge", "glm_moe_dsa"])
def test_models_that_choose_what_they_attend_to(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert list(misfits(config, "sdpa")) == ["chooses by itself what a token attends to"]
