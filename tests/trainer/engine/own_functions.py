"""An estimator and a loss as users write them, with no word on ajet: what tests name in the configuration."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss


def doubled(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice the reward of a row, for each of its tokens."""
    values = 2 * token_level_rewards.sum(dim=-1, keepdim=True) * response_mask
    return values, values


def unclipped(
    old_log_prob: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor,
    loss_agg_mode: str, config: Any, rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The ratio times the advantage."""
    values = -advantages * torch.exp(log_prob - old_log_prob)
    if rollout_is_weights is not None:
        values = values * rollout_is_weights
    found = agg_loss(values, response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return found, {"actor/unclipped": found.detach().item()}


def narrow(log_prob: torch.Tensor) -> torch.Tensor:
    """A function that verl cannot call."""
    return log_prob


NOTHING = None
