"""Refuses what cannot be computed over a forest (see `forest_engine`), before anything starts.

A forest needs an attention that takes any mask, in every layer. Whatever else looks at more than one token goes by the
order in which rows are packed, and would see tokens of other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ajet_trainer.backends.verl.families import SPARSE, described
from ajet_trainer.backends.verl.positions import BY_LENGTH, rotary_kinds
from ajet_trainer.backends.verl.refused import Fault
from ajet_trainer.backends.verl.unread import ACTOR, MODEL, REF, sharing

ATTENTION = f"{MODEL}.override_config.attn_implementation"
TAKES_A_TREE = {"cpu": "sdpa", "cuda": "flex_attention"}
SUPPORTS = {"flex_attention": "_supports_flex_attn", "sdpa": "_supports_sdpa"}
"""The attribute by which a class of transformers tells that it can be computed so."""
STRATEGIES = ("fsdp", "fsdp2")
FULL = "full_attention"


def faults(tree: DictConfig) -> Iterator[Fault]:
    """Faults of `tree` with ``rows = "tree"``."""
    for part in (ACTOR, REF):
        if (strategy := OmegaConf.select(tree, f"{part}.strategy")) not in STRATEGIES:
            yield f"{part}.strategy", f"= {strategy!r} computes no trees"
        for name, processes in sharing(tree, part):
            if processes > 1:
                yield name, "shares a row among processes, and a tree is no row"
        for key, why in (("pad_to_length", "makes rows equally long"), ("qat.enable", "takes its scales from rows")):
            if OmegaConf.select(tree, name := f"{part}.fsdp_config.{key}"):
                yield name, f"{why}, and a tree is no row"
    if tree.actor_rollout_ref.model.use_fused_kernels:
        yield f"{MODEL}.use_fused_kernels", "computes the logprob of the next token alone, and a fork has several"
    if not tree.actor_rollout_ref.model.use_remove_padding:
        yield f"{MODEL}.use_remove_padding", "= false pads rows, and a tree has none"
    attention = OmegaConf.select(tree, ATTENTION)
    if attention != (fine := TAKES_A_TREE[tree.trainer.device]):
        yield ATTENTION, f"= {attention!r} does not compute a tree, as {fine} does"
    yield from model_faults(tree.actor_rollout_ref.model.path, attention)


def model_faults(path: str, attention: str) -> Iterator[Fault]:
    """Why the model at `path` cannot be computed over a tree with this `attention`."""
    try:
        config = described(path)
    except ValueError as error:
        yield "model", f"= {path!r} has no configuration that can be read here ({error})"
        return
    for why in misfits(config, attention):
        yield "model", f"= {path!r} ({config.model_type}) {why}, so it does not compute trees"
        return


def misfits(config: Any, attention: str) -> Iterator[str]:
    """Parts of a model of `config` that do not go by a mask, or by this `attention`."""
    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    rotary = rotary_kinds(getattr(config, "rope_parameters", None) or {})
    if getattr(config, "auto_map", None):
        yield "brings code of its own"
    elif made is None or any(hasattr(config, name) for name in ("vision_config", "audio_config")):
        yield "is not a language model alone"
    elif getattr(config, "is_decoder", None) is False:
        yield "attends to later tokens"
    elif getattr(made, "_is_stateful", False) or not getattr(made, "_supports_attention_backend", False):
        yield "has layers without an attention that takes a mask"
    elif "logits_to_keep" not in signature(made.forward).parameters:
        yield "computes the logits of every token"
    elif any(hasattr(config, name) for name in SPARSE):
        yield "chooses by itself what a token attends to"
    elif odd := sorted(set(getattr(config, "layer_types", None) or ()) - {FULL}):
        yield f"has layers of {' and '.join(odd)}"
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        yield f"has a sliding window of {config.sliding_window} tokens"
    elif rotary & set(BY_LENGTH):
        yield f"has positions ({' and '.join(sorted(rotary & set(BY_LENGTH)))}) that go by the longest row"
    elif not getattr(made, SUPPORTS.get(attention, ""), True):
        yield f"has no {attention} in transformers"
