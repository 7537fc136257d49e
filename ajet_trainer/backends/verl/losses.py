"""verl's actor loss, in which every term weighs sessions and not rows.

A loss that is a mean over sequences counts rows, padding among them. `ajet_trainer.advantage.row_weights` are the
factors that make it a mean over sessions. The policy term gets them as ``rollout_is_weights``, by which each of verl's
losses multiplies what it found for a token, but for `geo_mean`. The KL and entropy terms get them here, as
``row_weights``.

verl's `geo_mean` takes the mean of a row's weights, and adds up the means over the rows of each micro-batch. Here it is
one mean over the update, whatever way its rows are packed and shared.

A loss of the user's own is imported here, in the worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from ajet_trainer.backends.verl.functions import LOSS, register

Found = tuple[torch.Tensor, dict[str, Any]]


def session_loss(config: ActorConfig, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Found:
    """The loss of a micro-batch, a scalar with its gradient, and its metrics by name, as verl's `ppo_loss` gives them.

    `data` holds rows as jagged ``[B, T]`` tensors. With ``row_weights`` (float32) each token's share of the loss is
    multiplied by its row's. `dp_group` is passed on to verl.
    """
    register(LOSS, config.policy_loss.loss_mode)
    if config.policy_loss.loss_mode == "geo_mean":
        data = data.copy()
        share = len(data) * data["dp_size"] / data["global_batch_size"]
        data["rollout_is_weights"] = share * data.get("rollout_is_weights", torch.ones_like(data["advantages"]))
    loss, metrics = ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    if "row_weights" not in data:
        return loss, metrics
    padded = data.select("response_mask", "row_weights", "ref_log_prob", strict=False).to_padded_tensor()
    mask, more = padded["response_mask"].to(bool), padded["row_weights"] - 1
    for name, coefficient, values in _terms(config, model_output, data, padded):
        missing = agg_loss(more * values, mask, config.loss_agg_mode, **config.global_batch_info)
        loss = loss + coefficient * missing
        metrics[name] = Metric(metrics[name].aggregation, metrics[name].aggregate() + missing.detach().item())
    return loss, metrics


def _terms(
    config: ActorConfig, model_output: dict[str, Any], data: TensorDict, padded: TensorDict
) -> Iterator[tuple[str, float, torch.Tensor]]:
    """Each term besides the policy's: the name of its metric, its coefficient, and its value for each token."""
    if (entropy := model_output.get("entropy")) is not None:
        yield "actor/entropy_loss", -config.entropy_coeff, no_padding_2_padding(entropy, data)
    if config.use_kl_loss:
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        yield "kl_loss", config.kl_loss_coef, kl_penalty(log_prob, padded["ref_log_prob"], config.kl_loss_type)
