"""Refuses settings of verl that would end a run at a step, or not train what was asked for, before anything starts.

Such a run would lease a batch, fail, give it back, and fail on the same one whenever a supervisor starts it again.

Invariant: an estimator, loss or mean that verl registers runs a step here or stands in a table of this file. Tests walk
verl's registries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from math import inf
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.import_utils import import_external_libs
from verl.utils.tracking import Tracking

from ajet_sdk.limits import MAX_REWARD
from ajet_sdk.settings import nearest
from ajet_trainer.backends.verl.estimators import BY_CALL, COMPARING, RUNNING
from ajet_trainer.backends.verl.functions import ESTIMATOR, LOSS
from ajet_trainer.backends.verl.loggers import names as logger_names
from ajet_trainer.backends.verl.unread import ACTOR, REF, has_critic, sharing
from ajet_trainer.config import Config

CORRECTION = "algorithm.rollout_correction"
SHAPING = "reward.reward_kwargs"
"""The key of verl for DAPO's punishment for length."""
_NO_SQUARES = "it needs sums of squared probabilities, which verl's V1 trainer does not compute; use rloo or opo"
ESTIMATORS = {
    "gdpo": "it needs each answer's reward in several parts, and an episode has one reward; use grpo",
    "remax": "it needs the reward of a greedy answer to each prompt, which captured episodes do not have; use rloo",
    "optimal_token_baseline": _NO_SQUARES,
    "tir_optimal_token_baseline": _NO_SQUARES,
}
LOSSES = {
    "bypass_mode": "it fails on a micro-batch of padding only; set algorithm.rollout_correction.bypass_mode = true, "
    "and use vanilla",
}
BY_ROW = ("geo_mean",)
"""Losses that take the mean of a row's weights."""
NO_RATIO = ("gpg", "dro", "cispo", "gspo")
"""Losses that have no ratio, one for a whole row, or one with a bound below."""
_OF_A_ROW = "it takes the mean of a row's advantages, and each call has its own; use vanilla"
PAIRS = {(name, "geo_mean"): _OF_A_ROW for name in BY_CALL}
"""Estimators and losses that do not go together."""
MEANS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""verl's ``loss_agg_mode``, of which it keeps no registry."""

ENGINES: Mapping[str, tuple[str, ...]] = {
    "dp": ("fsdp", "fsdp2", "fsdp_turbo"), "megatron": ("megatron",), "veomni": ("veomni",),
    "torchtitan": ("torchtitan",),
}  # fmt: skip
"""verl's ``model_engine``, which chooses the keys that a run may have, and the strategies that read them."""

ENGINE_KEYS = ("fsdp_config", "fsdp", "megatron", "veomni", "torchtitan")
"""Tables in which a part has the keys of its engine."""
SEED = "actor_rollout_ref.rollout.seed"
SEEDS = tuple(
    f"{part}.{name}" for part in (ACTOR, "critic")
    for name in ("data_loader_seed", *(f"{home}.seed" for home in ENGINE_KEYS))
)  # fmt: skip
"""The seed of a run, and what follows it."""
KEEPS_ITS_PLACE = "use_checkpoint_opt_param_scheduler"
"""Megatron's option to continue a schedule where its checkpoint was."""
UNLIMITED = 1_000_000_000
"""The steps of a run that has no planned end."""

Fault = tuple[str, str]
"""A key of verl's and what is wrong with its value, which makes a sentence together."""


def faults(tree: DictConfig, config: Config) -> Iterator[Fault]:
    """Finds where verl would fail at a step, or train something else than what was asked for. What a library of the
    user's registers is known too."""
    algorithm, actor = tree.algorithm, tree.actor_rollout_ref.actor
    if config.turn_gamma != 1.0 and algorithm.adv_estimator not in BY_CALL:
        yield "turn_gamma", f"= {config.turn_gamma} is read by {ESTIMATOR} = {' and '.join(BY_CALL)} alone"
    yield from uncorrected(tree, config.sampling)
    yield from engine_faults(tree)
    yield from step_faults(tree)
    yield from update_faults(tree)
    import_external_libs(OmegaConf.to_container(tree.actor_rollout_ref.model).get("external_lib"))
    estimator, loss = algorithm.adv_estimator, actor.policy_loss.loss_mode
    yield from named(ESTIMATOR, estimator, core_algos.ADV_ESTIMATOR_REGISTRY, ESTIMATORS)
    yield from named(LOSS, loss, core_algos.POLICY_LOSS_REGISTRY, LOSSES)
    yield from named(f"{ACTOR}.loss_agg_mode", actor.loss_agg_mode, MEANS)
    yield from named("critic.loss_agg_mode", tree.critic.loss_agg_mode, MEANS)
    if has_critic(tree) and tree.critic.loss_agg_mode.startswith("seq-mean"):
        said = "would count rows, and an episode may have several: set token-mean (by default it is the actor's)"
        yield "critic.loss_agg_mode", f"= {tree.critic.loss_agg_mode!r} {said}"
    if loss == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        yield LOSS, f"= 'dro' needs a positive {ACTOR}.policy_loss.dro_beta"
    for key, size in (("group_size", config.group_size), ("min_group_size", config.min_group_size)):
        if size == 1 and estimator in COMPARING:
            said = f"and {ESTIMATOR} = {estimator!r} compares: set it to 2 or more, or the estimator to {RUNNING}"
            yield key, f"= 1 leaves an episode alone, {said}"
    if why := PAIRS.get((estimator, loss)):
        yield LOSS, f"= {loss!r} does not go with {estimator}: {why}"
    if estimator in BY_CALL and algorithm.use_kl_in_reward:
        said = f"has no part in the rewards of calls, which {estimator} trains: set actor_rollout_ref.actor.use_kl_loss"
        yield "algorithm.use_kl_in_reward", said
    yield from shaping_faults(tree)
    if estimator == "gae" and tree.critic.enable is False:
        yield ESTIMATOR, "= 'gae' needs a critic: leave critic.enable unset"
    if actor.use_kl_loss:
        yield from kl_faults(f"{ACTOR}.kl_loss_type", actor.kl_loss_type)
    if algorithm.use_kl_in_reward:
        yield from kl_faults("algorithm.kl_penalty", algorithm.kl_penalty)
        if algorithm.kl_ctrl.type != "fixed":
            yield "algorithm.kl_ctrl.type", "must be fixed: no checkpoint holds where an adaptive one has got to"
    if algorithm.rollout_correction is not None:
        yield from correction_faults(CORRECTION, algorithm.rollout_correction)
    for name in logger_names(tree):
        yield from named("trainer.logger", name, (*Tracking.supported_backend, "tracking"))


def uncorrected(tree: DictConfig, sampling: str) -> Iterator[Fault]:
    """Finds where single tokens are not weighed by how likely the trainer thinks they are, compared with the engine,
    although that is wanted. In bypass mode the loss does that, if it has a ratio for each token that it does not bound
    below."""
    correction, loss = tree.algorithm.rollout_correction, tree.actor_rollout_ref.actor.policy_loss.loss_mode
    instead = "set sampling in [trainer] to exact or strict"
    if correction is not None and correction.rollout_is:
        if loss in BY_ROW:
            said = f"weighs rows, not tokens: {instead}, and {CORRECTION}.rollout_is = null, or use vanilla"
            yield LOSS, f"= {loss!r} {said}"
    elif sampling == "correct" and (correction is None or not correction.bypass_mode):
        yield f"{CORRECTION}.rollout_is", f"= null leaves nothing to correct with: {instead}"
    elif sampling == "correct" and loss in (*BY_ROW, *NO_RATIO):
        said = f"does not correct single tokens in {CORRECTION}.bypass_mode: {instead}, or use vanilla"
        yield LOSS, f"= {loss!r} {said}"


def engine_faults(tree: DictConfig) -> Iterator[Fault]:
    """Finds a part with an engine whose keys are not in `tree`, or that does not run on this device."""
    cpu = tree.trainer.device == "cpu"
    if cpu and tree.model_engine != "dp":
        yield "model_engine", f"= {tree.model_engine!r} does not run on a CPU: leave it out"
    for part in (ACTOR, REF, "critic"):
        strategy, fine = OmegaConf.select(tree, f"{part}.strategy"), ENGINES[tree.model_engine]
        if strategy not in fine:
            yield f"{part}.strategy", f"= {strategy!r} is not of model_engine = {tree.model_engine!r}: leave it out"
        if cpu and strategy != "fsdp2":
            yield f"{part}.strategy", f"= {strategy!r} does not run on a CPU: leave it out"
        for name, processes in sharing(tree, part):
            if (size := tree.trainer.nnodes * tree.trainer.n_gpus_per_node) % processes:
                yield name, f"must divide the number of processes, nnodes * n_gpus_per_node = {size}"
    for key in ("actor_rollout_ref.model.use_liger", "critic.model.use_liger"):
        if OmegaConf.select(tree, key) and not find_spec("liger_kernel"):
            yield key, "needs the package liger-kernel: install it where verl is, or leave it out"
    temperature = tree.actor_rollout_ref.rollout.temperature
    if type(temperature) not in (int, float) or not 0 < temperature < inf:
        said = f"must be above 0, not {temperature!r}: greedy tokens teach nothing"
        yield "actor_rollout_ref.rollout.temperature", said


def step_faults(tree: DictConfig) -> Iterator[Fault]:
    """Faults of updates, seeds, checkpoints, the critic and schedules."""
    name, groups, actor = f"{ACTOR}.ppo_mini_batch_size", tree.data.train_batch_size, tree.actor_rollout_ref.actor
    size = actor.ppo_mini_batch_size
    if type(size) is not int or not 0 < size <= groups or groups % size:
        yield name, f"makes groups / ppo_mini_batch_size updates of a step: a divisor of {groups}, not {size!r}"
    if tree.critic.ppo_mini_batch_size != size:
        yield "critic.ppo_mini_batch_size", f"follows the actor's: set {name}"
    for key in (SEED, *SEEDS):
        seed = OmegaConf.select(tree, key, default=0)
        if type(seed) is not int or not 0 <= seed < 2**32:
            yield key, "must be from 0 to 2^32 - 1, which is as far as NumPy's go"
    for part, settings in ((ACTOR, actor), ("critic", tree.critic)):
        if type(settings.ppo_epochs) is not int or settings.ppo_epochs < 1:
            yield f"{part}.ppo_epochs", f"must be at least 1, not {settings.ppo_epochs!r}"
        for home in ENGINE_KEYS:
            if OmegaConf.select(tree, f"{part}.{home}.forward_only"):
                yield f"{part}.{home}.forward_only", "would train nothing: leave it out"
        if settings.shuffle and size != groups:
            yield f"{part}.shuffle", f"would mix the groups of a step's updates: leave it out, or leave out {name}"
        for key in ("save_contents", "load_contents"):
            held = settings.checkpoint.get(key) or ()
            if missing := [content for content in ("model", "optimizer", "extra") if content not in held]:
                said = f"lacks {', '.join(missing)}: a run continues only from its checkpoint"
                yield f"{part}.checkpoint.{key}", said
    if tree.trainer.total_training_steps == UNLIMITED:
        yield from schedule_faults(f"{ACTOR}.optim", actor.optim)
        yield from schedule_faults("critic.optim", tree.critic.optim)


def update_faults(tree: DictConfig) -> Iterator[Fault]:
    """Keys that leave updates out, or nothing in them. A rate of 0 is none of these: it is a control that is asked for.
    """
    steps, warmup = tree.trainer.total_training_steps, tree.trainer.critic_warmup
    name = "trainer.critic_warmup"
    if type(warmup) is not int or warmup < 0:
        yield name, f"must be a number of steps, not {warmup!r}"
    elif warmup and not has_critic(tree):
        yield name, f"= {warmup} would train nothing for so long: it is of a critic, and there is none. Leave it out"
    elif warmup > steps:
        yield name, f"= {warmup} leaves no step that trains the model: total_steps is {steps}"
    for part, settings in ((ACTOR, tree.actor_rollout_ref.actor), ("critic", tree.critic)):
        yield from optimizer_faults(f"{part}.optim", settings.optim, tree.model_engine, steps)
    scale = tree.actor_rollout_ref.actor.loss_scale_factor
    if scale is not None and not above_0(scale):
        yield f"{ACTOR}.loss_scale_factor", f"must be above 0, not {scale!r}: the loss is divided by it"
    for model in ("actor_rollout_ref.model", "critic.model"):
        for rank, alpha in (("lora_rank", "lora_alpha"), ("lora.rank", "lora.alpha")):
            size, value = (OmegaConf.select(tree, f"{model}.{key}") for key in (rank, alpha))
            if size and not above_0(value):
                yield f"{model}.{alpha}", f"must be above 0, not {value!r}: the adapter is multiplied by it"


def optimizer_faults(name: str, optim: DictConfig, engine: str, steps: int) -> Iterator[Fault]:
    """Faults of the options `optim` of an optimizer, where a run has so many `steps`."""
    if not above_0(optim.lr) and optim.lr != 0:
        yield f"{name}.lr", f"must be a number of at least 0, not {optim.lr!r}"
    if not above_0(optim.clip_grad):
        yield f"{name}.clip_grad", f"must be above 0, not {optim.clip_grad!r}: gradients are cut down to it"
    if "lr" in (optim.get("override_optimizer_config") or {}):
        yield f"{name}.override_optimizer_config.lr", f"is no place for it: set {name}.lr"
    share, fixed = optim.get("lr_warmup_steps_ratio") or 0, optim.get("lr_warmup_steps") or 0
    if type(share) not in (int, float) or not 0 <= share <= 1:
        yield f"{name}.lr_warmup_steps_ratio", f"must be from 0 to 1, not {share!r}"
    elif fixed <= 0 and 0 < share * steps < 1:
        yield f"{name}.lr_warmup_steps_ratio", f"= {share} is less than one of {steps} steps: leave it out"
    if engine == "megatron" and not optim.get(KEEPS_ITS_PLACE):
        yield f"{name}.{KEEPS_ITS_PLACE}", "must be true: else the schedule begins anew on a resume"
    first = {"megatron": "lr_warmup_init", "veomni": "lr_start"}.get(engine)
    if first is not None and (fixed > 0 or share) and not above_0(optim.get(first)):
        yield f"{name}.{first}", "is where the warm-up begins: set it above 0, or its first step trains nothing"


def above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < inf


def shaping_faults(tree: DictConfig) -> Iterator[Fault]:
    """Gaps of a punishment of length that is switched on."""
    length = f"{SHAPING}.overlong_buffer_cfg"
    buffer, limit, factor = (
        OmegaConf.select(tree, key)
        for key in (f"{length}.len", f"{SHAPING}.max_resp_len", f"{length}.penalty_factor")
    )
    if (enabled := OmegaConf.select(tree, f"{length}.enable")) is not True:
        if enabled is not False and (buffer, limit, factor, enabled) != (None,) * 4:
            yield f"{length}.enable", f"must be true or false, not {enabled!r}"
        return
    if type(limit) is not int or limit < 1:
        yield f"{SHAPING}.max_resp_len", f"must be the tokens of the longest answer, not {limit!r}"
    elif type(buffer) is not int or not 0 < buffer <= limit:
        yield f"{length}.len", f"must be from 1 to max_resp_len, {limit}, not {buffer!r}"
    if type(factor) not in (int, float) or not 0 <= factor <= MAX_REWARD:
        yield f"{length}.penalty_factor", f"must be a number from 0, not {factor!r}"


def schedule_faults(name: str, optim: DictConfig) -> Iterator[Fault]:
    """Finds where the learning rate `optim` depends on the end of a run that has none."""
    if optim.get("lr_decay_steps"):
        return
    if optim.get("lr_warmup_steps_ratio") and (optim.get("lr_warmup_steps") or 0) <= 0:
        said = f"is a share of all steps: set total_steps in [trainer], or {name}.lr_warmup_steps"
        yield f"{name}.lr_warmup_steps_ratio", said
    for key in ("lr_scheduler_type", "warmup_style", "lr_decay_style"):
        if optim.get(key) in ("cosine", "linear", "WSD"):
            said = f"= {optim.get(key)!r} depends on the number of all steps: set total_steps in [trainer]"
            yield f"{name}.{key}", said


def named(key: str, name: Any, known: Collection[str], refused: Mapping[str, str] = {}) -> Iterator[Fault]:
    """A fault, unless `name` is `known` and not `refused`."""
    if name in refused:
        yield key, f"= {name!r} ends a run at a step: {refused[name]}"
    elif name not in known:
        yield key, f"= {name!r} is not in verl{nearest(str(name), known)}"


def kl_faults(key: str, name: Any) -> Iterator[Fault]:
    """A fault, unless verl computes `name` for a token."""
    try:
        core_algos.kl_penalty(torch.zeros(1), torch.zeros(1), str(name))
    except NotImplementedError:
        yield key, f"= {name!r} is not computed by verl: use low_var_kl"


def correction_faults(key: str, correction: DictConfig) -> Iterator[Fault]:
    """A fault, unless verl computes `correction` for two tokens."""
    if correction.bypass_mode:
        for name in ("rollout_is", "rollout_rs"):
            if correction[name] is not None:
                yield f"{key}.{name}", f"does nothing with {key}.bypass_mode, where no logprobs are computed to compare"
        return
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    tokens = torch.zeros(1, 2)
    try:
        compute_rollout_correction_and_rejection_mask(
            tokens, tokens, torch.ones(1, 2), **{name: correction[name] for name in names}
        )
    except (TypeError, ValueError) as error:
        yield key, f"cannot be computed: {str(error).splitlines()[0]}"
