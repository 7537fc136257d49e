"""What of verl's estimators, losses, means and corrections would end a run at a step, refused before anything starts.

Such a run would lease a batch, fail, give it back, and fail on the same one whenever a supervisor starts it again.

Invariant: whatever verl registers runs a step here or stands in a table of this file; tests walk verl's registries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.import_utils import import_external_libs

from ajet_sdk.settings import ConfigError, nearest

ACTOR = "actor_rollout_ref.actor"
_NO_SQUARES = "it needs sums of squared probabilities, which verl's V1 trainer does not compute; use rloo or opo"
ESTIMATORS = {
    "gdpo": "it needs each answer's reward in several parts, and an episode has one reward; use grpo",
    "remax": "it needs the reward of a greedy answer to each prompt, which captured episodes do not have; use rloo",
    "optimal_token_baseline": _NO_SQUARES,
    "tir_optimal_token_baseline": _NO_SQUARES,
}
LOSSES = {
    "bypass_mode": "it takes no micro-batch of padding alone; set algorithm.rollout_correction.bypass_mode = true, and "
    "use vanilla or gpg",
}
MEANS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""verl's ``loss_agg_mode``, of which it keeps no registry."""


def check(tree: DictConfig, group_size: int) -> None:
    """Raises `ConfigError` where verl would fail at a step. What a library of the user's registers is known too."""
    algorithm, actor = tree.algorithm, tree.actor_rollout_ref.actor
    import_external_libs(OmegaConf.to_container(tree.actor_rollout_ref.model).get("external_lib"))
    estimator, loss = algorithm.adv_estimator, actor.policy_loss.loss_mode
    named("algorithm.adv_estimator", estimator, core_algos.ADV_ESTIMATOR_REGISTRY, ESTIMATORS)
    named(f"{ACTOR}.policy_loss.loss_mode", loss, core_algos.POLICY_LOSS_REGISTRY, LOSSES)
    named(f"{ACTOR}.loss_agg_mode", actor.loss_agg_mode, MEANS)
    named("critic.loss_agg_mode", tree.critic.loss_agg_mode, MEANS)
    if loss == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        lacks(f"{ACTOR}.policy_loss.loss_mode", loss, f"a positive {ACTOR}.policy_loss.dro_beta")
    if estimator == "grpo_passk" and group_size < 2:
        lacks("algorithm.adv_estimator", estimator, "a group_size of 2 or more")
    if estimator == "gae" and tree.critic.enable is False:
        lacks("algorithm.adv_estimator", estimator, "a critic: leave critic.enable unset")
    if actor.use_kl_loss:
        check_kl(f"{ACTOR}.kl_loss_type", actor.kl_loss_type)
    if algorithm.use_kl_in_reward:
        check_kl("algorithm.kl_penalty", algorithm.kl_penalty)
    check_correction("algorithm.rollout_correction", algorithm.rollout_correction)


def named(key: str, name: Any, known: Collection[str], refused: Mapping[str, str] = {}) -> None:
    """Raises `ConfigError` unless `name` is `known` and not `refused`."""
    if name in refused:
        raise ConfigError(f"{key} = {name!r} ends a run at a step: {refused[name]}", param=key)
    if name not in known:
        raise ConfigError(f"{key} = {name!r} is nothing that verl has{nearest(str(name), known)}", param=key)


def lacks(key: str, name: str, what: str) -> None:
    """Raises `ConfigError`: `name` does not work without `what`."""
    raise ConfigError(f"{key} = {name!r} needs {what}", param=key)


def check_kl(key: str, name: Any) -> None:
    """Raises `ConfigError` unless verl computes `name` for a token."""
    try:
        core_algos.kl_penalty(torch.zeros(1), torch.zeros(1), str(name))
    except NotImplementedError:
        raise ConfigError(f"{key} = {name!r} is nothing that verl computes: use low_var_kl", param=key) from None


def check_correction(key: str, correction: DictConfig | None) -> None:
    """Raises `ConfigError` unless verl computes `correction` for two tokens."""
    if correction is None or correction.bypass_mode:
        return
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    tokens = torch.zeros(1, 2)
    try:
        compute_rollout_correction_and_rejection_mask(
            tokens, tokens, torch.ones(1, 2), **{name: correction[name] for name in names}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}", param=key) from None
