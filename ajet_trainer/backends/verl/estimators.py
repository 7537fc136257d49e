"""`ajet_turn` and `ajet_running` in verl's registry: the advantages of `ajet_trainer.turns` and `ajet_trainer.running`,
which rows bring along.

verl gives an estimator one reward a row, and no word on calls. So the arithmetic is done where rows are made. What
verl's registry has is the last step: what is told for each token counts where the policy sampled it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

BY_TURN, RUNNING = "ajet_turn", "ajet_running"
BY_CALL = (BY_TURN, RUNNING)
"""Estimators whose advantages rows bring along."""
GROUPED = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline",
)  # fmt: skip
"""Estimators that give all tokens of a session one advantage, from a baseline over the sessions of its group."""
COMPARING = (*GROUPED, BY_TURN)
"""Estimators to which an episode that is alone in its group says nothing."""


@register_adv_est(RUNNING)  # type: ignore[untyped-decorator]
@register_adv_est(BY_TURN)  # type: ignore[untyped-decorator]
def by_turn(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns: `token_level_rewards` where `response_mask` is 1, else 0. All are ``[B, T]`` floats."""
    kept = token_level_rewards * response_mask
    return kept, kept
