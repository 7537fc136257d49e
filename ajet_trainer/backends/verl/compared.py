"""verl's side of a comparison with engines (`ajet_trainer.agreement`): logprobs of answers, and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of its answer."""


def dtype_of(config: DictConfig) -> str | None:
    """The dtype in which verl's actor computes, by its `config`; None where that is not known here."""
    actor = config.actor_rollout_ref.actor
    if not str(actor.strategy).startswith("fsdp"):
        return None
    return str(OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype") or "bf16")


def dtype_of_launched(config: DictConfig) -> str:
    """The dtype in which the engines compute that verl launches."""
    rollout = config.actor_rollout_ref.rollout
    return str(rollout.get("quantization") or rollout.dtype)


def logprobs_of(worker: Any, texts: Sequence[Text], *, packed: bool) -> list[list[float]] | None:
    """The logprobs of verl's training `worker`, at temperature 1, of each answer in `texts`. Every process computes the
    same. None in one that has no part of the output."""
    found = worker.infer_batch(batch_of(texts, packed=packed))
    if found is None:
        return None
    mask = nested([torch.ones(len(answer), dtype=torch.int64) for _, answer in texts])
    return [one.float().tolist() for one in response_from_nested(found["log_probs"].cpu(), mask).unbind()]


def nested(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def batch_of(texts: Sequence[Text], *, packed: bool) -> TensorDict:
    """`texts` as one micro-batch of verl's."""
    whole = [torch.tensor([*prompt, *answer]) for prompt, answer in texts]
    mask = nested([torch.ones(len(answer), dtype=torch.int64) for _, answer in texts])
    return tu.get_tensordict(
        {
            "input_ids": nested(whole), "position_ids": nested([torch.arange(len(one)) for one in whole]),
            "prompts": nested([torch.tensor(list(prompt)) for prompt, _ in texts]),
            "responses": nested([torch.tensor(list(answer)) for _, answer in texts]),
            "response_mask": mask, "loss_mask": mask,
        },
        {
            "temperature": 1.0, "pad_token_id": 0, "use_remove_padding": packed, "use_dynamic_bsz": True,
            "use_fused_kernels": False, "max_token_len_per_gpu": sum(map(len, whole)), "calculate_entropy": True,
            "compute_loss": False,
        },
    )  # fmt: skip
