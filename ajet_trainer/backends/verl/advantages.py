"""verl's estimators, over sessions and in float64, of rewards as they were given.

verl has rewards in float32. The mean of eight times 0.7 is off by a rounding error there, the deviation is as small,
and their quotient is an advantage. So advantages are computed again, of the rewards that rows were made with. Where
estimators compare a group, each reward is told by what it is above one of its group. So equal rewards are exactly 0,
and so is what is made of them. A baseline takes such a shift away again.

Invariant: where nothing that is compared differs, every advantage is 0. A group of one is compared with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import kl_penalty
from verl.trainer.ppo.ray_trainer import compute_advantage

from ajet_sdk.rounding import differ, slack
from ajet_trainer.advantage import one_row_a_session

BY_TOKEN = ("gae", "reinforce_plus_plus")
"""Estimators that give each token one, and compare the tokens of the batch."""
READ = ("old_log_probs", "ref_log_prob", "values")
"""The fields of a row that an estimator may read besides its rewards."""

Found = dict[str, torch.Tensor]
"""``advantages`` and ``returns`` of each token, in float32."""


def penalties(data: DataProto, algorithm: DictConfig) -> torch.Tensor:
    """The share of a KL in the rewards: ``[B, T]`` in float64, in nats times verl's ``kl_coef``, 0 or below for a KL
    of 0 or above."""
    mask = data.batch["loss_mask"].double()
    if not algorithm.use_kl_in_reward:
        return torch.zeros_like(mask)
    old, reference = (data.batch[name].double() for name in ("old_log_probs", "ref_log_prob"))
    found: torch.Tensor = kl_penalty(old, reference, kl_penalty=algorithm.kl_penalty)
    return -algorithm.kl_ctrl.kl_coef * found * mask


def by_session(data: DataProto, keys: Sequence[str], rewards: Sequence[float], algorithm: DictConfig) -> Found:
    """Advantages and returns, ``[B, T]`` each, by an estimator of `estimators.GROUPED`. It sees one row a session; what
    it gives is spread over the session's rows, whose `keys` and `rewards` are these.

    That row is as long as the session's rows together, because some baselines weigh by length. Its reward is the
    session's, less the KL penalties of all its rows.
    """
    rows, places = one_row_a_session(keys)
    mask, index = data.batch["response_mask"], torch.tensor(places)
    lengths = mask.new_zeros(len(rows)).index_add(0, index, mask.sum(dim=-1))
    given = torch.tensor(rewards, dtype=torch.float64)[list(rows)]
    totals = given.index_add(0, index, penalties(data, algorithm).sum(dim=-1))
    groups = data.non_tensor_batch["uid"][list(rows)]
    above = _above_one(totals, groups)
    long_mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)).to(mask.dtype)
    long_rewards = torch.zeros(long_mask.shape, dtype=torch.float64).index_put(
        (torch.arange(len(rows)), lengths.clamp(min=1) - 1), above
    )
    session = DataProto.from_single_dict({"response_mask": long_mask, "token_level_rewards": long_rewards})
    session.non_tensor_batch["uid"] = groups
    found = _computed(session, algorithm)
    if algorithm.adv_estimator == "gpg":  # its factor counts rewards that are not 0
        count, counted = (torch.count_nonzero(values).clamp(min=1) for values in (totals, above))
        found = {name: values * counted / count for name, values in found.items()}
    return {name: (values[index, :1] * mask).float() for name, values in found.items()}


def by_token(
    data: DataProto, lengths: torch.Tensor, rewards: Sequence[float], algorithm: DictConfig
) -> Found:
    """Advantages and returns, ``[B, T]`` each, by an estimator of `BY_TOKEN`. The response of a row has so many tokens
    (`lengths`, int64 ``[B]``), and its reward at the last of them."""
    mask = data.batch["response_mask"]
    at_the_end = torch.zeros(mask.shape, dtype=torch.float64).index_put(
        (torch.arange(len(mask)), lengths - 1), torch.tensor(rewards, dtype=torch.float64)
    )
    fields = {"response_mask": mask, "token_level_rewards": at_the_end + penalties(data, algorithm)}
    if "values" in data.batch:
        fields["values"] = data.batch["values"]
    found = _computed(DataProto.from_single_dict(fields), algorithm)
    compared = (found["returns"] - fields.get("values", 0.0))[mask.bool()]
    if not differ((compared.min().item(), compared.max().item()), slack((compared.abs().max().item(),))):
        found["advantages"] = torch.zeros_like(found["advantages"])
    return {name: values.float() for name, values in found.items()}


def _computed(data: DataProto, algorithm: DictConfig) -> Found:
    made = compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    return {name: made.batch[name] for name in ("advantages", "returns")}


def _above_one(totals: torch.Tensor, groups: Sequence[Any]) -> torch.Tensor:
    """The difference of each of `totals` from the first one of its group."""
    first: dict[Any, torch.Tensor] = {}
    return torch.stack([total - first.setdefault(group, total) for total, group in zip(totals, groups, strict=True)])
