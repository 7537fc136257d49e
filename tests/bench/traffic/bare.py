"""An estimator without a baseline: what chats get from others who train on them."""

from __future__ import annotations

from typing import Any

import torch


def bare(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reward of a row, for each of its tokens."""
    values = token_level_rewards.sum(dim=-1, keepdim=True) * response_mask
    return values, values
