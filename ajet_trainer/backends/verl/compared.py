"""verl's side of a comparison with engines (`ajet_trainer.agreement`): logprobs of answers, and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.workers.utils.padding import response_from_nested

from ajet_trainer.backends.verl.micro_batches import batch_of, nested

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of its answer."""


def dtype_of(config: DictConfig) -> str | None:
    """The dtype in which verl's actor computes, or sends its weights if that is coarser, by its `config`; None where
    that is not known here. verl sends a model with its adapter in it in bfloat16."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if not str(actor.strategy).startswith("fsdp"):
        return None
    if model.lora.merge and (model.lora_rank > 0 or model.lora_adapter_path):
        return "bf16"
    return str(OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype") or "bf16")


def logprobs_of(worker: Any, texts: Sequence[Text], *, packed: bool) -> list[list[float]] | None:
    """The logprobs of verl's training `worker`, at temperature 1, of each answer in `texts`. Every process computes the
    same. None in one that has no part of the output."""
    rows = [(torch.tensor(list(prompt)), torch.tensor(list(answer))) for prompt, answer in texts]
    found = worker.infer_batch(batch_of(rows, packed=packed, calculate_entropy=True, compute_loss=False))
    if found is None:
        return None
    mask = nested([torch.ones(len(answer)) for _, answer in texts])
    return [one.float().tolist() for one in response_from_nested(found["log_probs"].cpu(), mask).unbind()]
