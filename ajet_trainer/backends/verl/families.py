"""Families of models by name: those trained with their rows packed, those with padded ones, and those refused.

Packed rows stand in one long row. Most models tell them apart by their positions. Models that carry a state from token
to token do not, and neither do some others. Rows of these are padded, which costs time and is right for all: so that is
what a family without a name here gets.

`make families` computes rows of small models of all families, in both ways, and writes docs/reference/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten
from typing import Any

from omegaconf import DictConfig
from transformers import AutoConfig

from ajet_trainer.backends.verl import positions
from ajet_trainer.backends.verl.refused import Fault
from ajet_trainer.backends.verl.unread import ACTOR, REF, sharing

PACKED = frozenset(
    """
    apertus arcee aya_vision bitnet cohere cohere2 cohere2_moe cohere2_vision cwm deepseek_v2 deepseek_v3 deepseek_vl
    deepseek_vl_hybrid diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone4_5 exaone_moe flex_olmo gemma gemma2
    gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite got_ocr2 gpt_bigcode granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax idefics2 idefics3 internvl jais2 jetmoe laguna lighton_ocr llama llava llava_next
    llava_next_video llava_onevision longcat_flash mellum minimax_m2 ministral ministral3 mistral mistral3 mistral4
    mixtral nanochat nemotron olmo olmo2 olmo3 olmoe ovis2 phi phi3 phi4_multimodal pp_chart2table qianfan_ocr qwen2
    qwen2_moe qwen3 qwen3_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe seed_oss shieldgemma2 smollm3 smolvlm
    solar_open stablelm starcoder2 vaultgemma video_llama_3 video_llava vipllava whisper youtu
    """.split()
)
"""Families whose rows are right when packed, as `make families` has found."""
REFUSED = {
    "doge": "chooses what a token attends to among all rows of a micro-batch",
    "glm_moe_dsa": "chooses what a token attends to among all rows of a micro-batch",
    "paligemma": "attends to later tokens",
    "phimoe": "chooses its experts by chance while training",
}
"""Families that are not trained, and why."""
SPARSE = ("index_topk", "keep_window_size")
"""Settings of models that choose the tokens that score highest: DeepSeek's sparse attention and Doge."""


def described(path: str) -> Any:
    """The configuration of the model at `path`. Raises `ValueError` with one line."""
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # it is somebody's file, and what it says may be anything
        raise ValueError(shorten(str(error) or type(error).__name__, 200, placeholder=" …")) from error


def known(path: str) -> Any:
    """The configuration of the model at `path`; None where it cannot be read, which loading it will tell."""
    try:
        return described(path)
    except ValueError:
        return None


def packs(config: Any) -> bool:
    """True if rows of the model are right when packed. Of code that a model brings along, nothing is known."""
    return config.model_type in PACKED and not getattr(config, "auto_map", None)


def faults(tree: DictConfig, config: Any, longest: int) -> Iterator[Fault]:
    """Why the model of `tree`, whose `config` this is, cannot be trained so, in rows of up to `longest` tokens."""
    named = f"= {tree.actor_rollout_ref.model.path!r} ({config.model_type})"
    text = config.get_text_config()
    if why := REFUSED.get(config.model_type):
        yield "model", f"{named} cannot be trained: it {why}"
    elif any(hasattr(text, name) for name in SPARSE):
        yield "model", f"{named} cannot be trained: it {REFUSED['doge']}"
    for why in positions.misfits(text, longest):
        yield "model", f"{named} {why}"
    if tree.model_engine == "dp" and not tree.actor_rollout_ref.model.use_remove_padding:
        for name, processes in sharing(tree, ACTOR, REF):
            if processes > 1:
                yield name, f"shares packed rows among processes, and those of {config.model_type} are padded"
