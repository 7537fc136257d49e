"""Refuses keys of verl's that nothing reads here, and says what to do instead: a key that is accepted works.

verl's own loop, its dataset, its agent loops and its rewards are not used, but their keys stand in verl's tree. Others
are read only with some estimators, losses or models. A key may be set to verl's own default.

Invariant: `FAMILIES` and `of_engine` hold every key of verl's tree whose reader is never run, and `BY_CHOICE` those of
estimators and losses. `test_unread` searches verl's sources, for each engine those that run with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos

from ajet_trainer.backends.verl.estimators import BY_CALL, BY_TURN
from ajet_trainer.backends.verl.functions import ESTIMATOR, LOSS
from ajet_trainer.config import flatten

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
_AGENTS = "agents play through the proxy, which gives their requests to the engine as they are"
_EVAL = "verl validates nothing here: set eval_every and eval_episodes in [trainer], and agents play evaluations"
_REWARD = "agents give the rewards: see `ajet reward` and the SDK"
_KEPT = "the proxy keeps every episode, and `ajet-proxy export` writes them"
_TOKENS = "micro-batches are packed by tokens: set"
_PROFILE = "verl's profiler starts in verl's own loop: attach one to a process of processes.json"
_TEXT = "rows are text: leave it out"
_EXPERTS = "no engine's routes of experts are recorded: leave it off"
_OTHER = "verl's engines read another key: set"
_STEPS = "it follows the run's end: set total_steps in [trainer]"
_SPECULATION = ("enable_rollout", "method", "num_speculative_tokens")
BY_LENGTH = "seq-mean-token-sum-norm"
"""The mean that divides by a length, which a run may choose."""
FAMILIES: Mapping[str, str] = {
    "data": "there is no dataset, agents bring the tasks: set groups and max_tokens in [trainer]",
    **dict.fromkeys(("reward", "reward_model", "custom_reward_function", "sandbox_fusion"), _REWARD),
    "distillation": "there is no teacher: train on rewards",
    "skip": "there is no rollout to skip: leave it out",
    **dict.fromkeys(("global_profiler", "ray_kwargs.timeline_json_file"), _PROFILE),
    **dict.fromkeys([f"{part}.profiler" for part in (ACTOR, REF, ROLLOUT, "critic")], _PROFILE),
    "trainer.balance_batch": "batches are always balanced: leave it out",
    "trainer.total_epochs": "set total_steps in [trainer]",
    "trainer.save_freq": "set save_freq in [trainer]",
    "trainer.esi_redundant_time": "set save_freq in [trainer] to what may be lost",
    "trainer.default_hdfs_dir": "copy the checkpoints of run_dir, or name a checkpoint_callback_class",
    "trainer.ray_wait_register_center_timeout": "verl's V1 trainer has no such limit: leave it out",
    "trainer.use_v1": "verl's V1 trainer is always used: leave it out",
    "trainer.v1": "set max_staleness and engine_urls in [trainer]",
    "trainer.rollout_data_dir": _KEPT,
    **dict.fromkeys(
        [f"trainer.{name}" for name in
         ("test_freq", "val_only", "val_before_train", "validation_data_dir", "log_val_generations")], _EVAL
    ),
    f"{ROLLOUT}.val_kwargs": _EVAL,
    **dict.fromkeys(
        [f"{ROLLOUT}.{name}" for name in
         ("agent", "multi_turn", "do_sample", "ignore_eos", "over_sample_rate", "trace")], _AGENTS
    ),
    f"{ROLLOUT}.prompt_length": "it bounds verl's own requests alone: set max_tokens in [trainer]",
    f"{ROLLOUT}.router_config_path": _AGENTS,
    f"{ROLLOUT}.skip_tokenizer_init": "an engine that serves agents has its tokenizer: leave it out",
    f"{ROLLOUT}.multi_stage_wake_up": "engines wake up in two stages as it is: leave it out",
    f"{ROLLOUT}.enable_rollout_routing_replay": _EXPERTS,
    f"{ROLLOUT}.moe_load_balance_metrics_interval": _EXPERTS,
    **{f"{part}_micro_batch_size{end}": f"{_TOKENS} {part}_max_token_len_per_gpu"
       for part in (f"{ROLLOUT}.log_prob", f"{REF}.log_prob", f"{ACTOR}.ppo") for end in ("", "_per_gpu")},
    **{f"{part}.grad_clip": f"{_OTHER} {part}.optim.clip_grad" for part in (ACTOR, "critic")},
    f"{ACTOR}.use_prefix_grouper": "verl's V1 trainer does not group by prefix: leave it off",
    **dict.fromkeys([f"{part}.optim.total_training_steps" for part in (ACTOR, "critic")], _STEPS),
    **dict.fromkeys([f"{part}.rollout_n" for part in (ACTOR, REF, "critic")], "set group_size in [trainer]"),
    **{f"{ACTOR}.{name}": f"{_OTHER} {MODEL}.{name}" for name in ("use_remove_padding", "use_fused_kernels")},
    f"{ACTOR}.calculate_sum_pi_squared": "verl's V1 trainer does not compute it: leave it off",
    f"{ACTOR}.freeze_vision_tower": _TEXT,
    **dict.fromkeys((f"{MODEL}.tiled_mlp", "critic.model.tiled_mlp"), "verl's engines do not ask for it: leave it off"),
    "actor_rollout_ref.hybrid_engine": "where engines run is engine_urls in [trainer]",
    **dict.fromkeys([f"{part}.nccl_timeout" for part in ("actor_rollout_ref", "critic")],
                    "verl's V1 workers set no such limit: leave it out"),
    **dict.fromkeys(
        [f"critic.{name}" for name in
         ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "forward_micro_batch_size",
          "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")],
        f"{_TOKENS} critic.ppo_max_token_len_per_gpu",
    ),
    **dict.fromkeys(
        [f"{model}.mtp.{name}" for model in (MODEL, "critic.model") for name in
         ("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")],
        "vLLM reads mtp.method and mtp.num_speculative_tokens",
    ),
    **{f"critic.model.mtp.{name}": "a critic samples nothing: leave it out" for name in _SPECULATION},
    "algorithm.pf_ppo": "verl's V1 trainer would give rows the advantages of others: leave it out",
    "algorithm.filter_groups": "there is no dataset with other groups: set no_signal = 'drop' in [trainer]",
    **dict.fromkeys(("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"), "only an adaptive KL reads it"),
    "algorithm.rollout_correction.loss_type": f"verl's V1 trainer does not read it: set {LOSS}",
}  # fmt: skip
_CLIP = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo")
BY_CHOICE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    ESTIMATOR: {
        "algorithm.gamma": ("gae", "reinforce_plus_plus"),
        "algorithm.lam": ("gae",),
        "algorithm.norm_adv_by_std_in_grpo": ("grpo", "grpo_passk", BY_TURN),
    },
    LOSS: {
        **dict.fromkeys([f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")], _CLIP),
        f"{ACTOR}.clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
        **dict.fromkeys([f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg"], ("sapo",)),
        **dict.fromkeys([f"{ACTOR}.policy_loss.clip_cov_{end}" for end in ("ratio", "lb", "ub")], ("clip_cov",)),
        **dict.fromkeys([f"{ACTOR}.policy_loss.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef")], ("kl_cov",)),
        f"{ACTOR}.policy_loss.dro_beta": ("dro",),
    },
}
"""Keys that only some of verl's estimators or losses read."""
_CORRECTION = "algorithm.rollout_correction.rollout"
SWITCHES: Mapping[str, tuple[str, ...]] = {
    f"{ACTOR}.use_kl_loss": (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
    "algorithm.use_kl_in_reward": ("algorithm.kl_penalty", "algorithm.kl_ctrl"),
    **{f"{_CORRECTION}_{name}": tuple(f"{_CORRECTION}_{name}_{end}" for end in ("threshold", "batch_normalize"))
       for name in ("is", "rs")},
}  # fmt: skip
"""Keys that are read only if the one before them is set."""
SHAPED = tuple(
    f"reward.reward_kwargs.{name}" for name in
    ("max_resp_len", "overlong_buffer_cfg.enable", "overlong_buffer_cfg.len", "overlong_buffer_cfg.penalty_factor")
)  # fmt: skip
"""The keys of verl's rewards that are read: the punishment for length."""
_NO_ADAPTER = "this engine trains no adapter: leave it out, or train with fsdp or megatron"
_LORA = ("lora_rank", "lora_alpha", "lora_adapter_path", "target_modules", "exclude_modules", "target_parameters")
_ADAPTER = dict.fromkeys((*_LORA, "lora"), _NO_ADAPTER)
_HEAD = dict.fromkeys(
    ("mtp.enable_train", "mtp.detach_encoder", "mtp.mtp_loss_scaling_factor"), "only megatron trains such a head"
)
_BY_ITSELF = "this engine chooses it by itself: leave it out"
_BUILDS = dict.fromkeys(("use_liger", "enable_activation_offload", "fused_kernel_options"), _BY_ITSELF)
MODEL_OF: Mapping[str, Mapping[str, str]] = {
    "fsdp": _HEAD | {"lora": "fsdp reads lora_rank, lora_alpha and target_modules of {model}"},
    "megatron": dict.fromkeys(_LORA, "megatron reads {model}.lora") | _BUILDS | {
        "enable_gradient_checkpointing": _OTHER + " {part}.megatron.override_transformer_config.recompute_granularity",
    },
    "veomni": _HEAD | _ADAPTER | _BUILDS | {
        "enable_activation_offload": _OTHER + " {part}.veomni.enable_async_activation_offload",
    },
    "torchtitan": _HEAD | _ADAPTER | _BUILDS | {
        "enable_gradient_checkpointing": _OTHER + " {part}.torchtitan.activation_checkpoint",
    },
}  # fmt: skip
"""The keys of a `model` that an engine does not read; it is that of a `part`."""
OPTIM_OF: Mapping[str, Mapping[str, str]] = {
    "veomni": {
        "lr_warmup_steps": "veomni reads lr_warmup_steps_ratio, and total_steps in [trainer]",
        "override_optimizer_config": "veomni reads betas and weight_decay alone",
    },
    "torchtitan": {"clip_grad": "torchtitan has a limit of its own: leave it out"},
}
"""The keys of an optimizer that an engine does not read."""
OWN: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dtype",),
    "megatron": ("dist_checkpointing_prefix",),
    "veomni": ("ckpt_manager", "load_checkpoint_path", "force_use_huggingface"),
    "torchtitan": (
        "wrap_policy", "forward_prefetch", "use_orig_params", "mixed_precision", "data_parallel_size", "dtype",
    ),
}  # fmt: skip
"""The keys of its own that an engine does not read."""
ELSEWHERE = {"qat": ("fsdp", "megatron"), "use_torch_compile": ("fsdp", "veomni", "torchtitan")}
"""Keys that stand twice in verl's tree, with the engines that read the second of them, which is with their own."""
READ = (
    "temperature", "calculate_log_probs", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz", "n",
    "checkpoint_engine", "seed",
)  # fmt: skip
"""The keys of `ROLLOUT` that are read where engines stand alone."""
SPECULATION = tuple(f"{MODEL}.mtp.{name}" for name in _SPECULATION)
"""The keys of `MODEL` that engines alone read."""
_ALONE = "the engines of engine_urls stand alone: give them this option where you start them"


def keys(tree: DictConfig) -> dict[str, Any]:
    """Every key of `tree` with its value as it is written: one that another key gives is no setting of its own."""
    return dict(flatten(OmegaConf.to_container(tree, resolve=False)))


def unread(set_here: Iterable[str], tree: DictConfig, *, attached: bool) -> Iterator[tuple[str, str]]:
    """The ones of the keys `set_here` that nothing reads in `tree`, each with what to do instead."""
    families = dict(FAMILIES) | of_switches(tree)
    families |= of_engine("fsdp" if tree.model_engine == "dp" else tree.model_engine) | of_choice(tree)
    for part, settings in ((ACTOR, tree.actor_rollout_ref.actor), ("critic", tree.critic)):
        if not settings.shuffle:
            families[f"{part}.data_loader_seed"] = f"rows are not shuffled: set {part}.shuffle too, or leave it out"
        if settings.strategy == "fsdp_turbo":
            families = {name: advice for name, advice in families.items() if not name.endswith(".turbo_config")}
    for key in set_here:
        parts = key.split(".")
        above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        known = key in (*SHAPED, "critic.enable")
        advice = None if known else next((families[name] for name in above if name in families), None)
        engines = (key.startswith(f"{ROLLOUT}.") and parts[2] not in READ) or key in SPECULATION
        if advice is None and attached and engines:
            advice = _ALONE
        if advice is not None:
            yield key, advice


def of_choice(tree: DictConfig) -> dict[str, str]:
    """Keys that are read only with another choice than that of `tree`. What a function of the user's own reads, nobody
    knows, so it may be anything."""
    out, registries = {}, (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY)
    for (by, readers), registry in zip(BY_CHOICE.items(), registries, strict=True):
        chosen = str(OmegaConf.select(tree, by))
        if chosen in BY_CALL or getattr(registry.get(chosen), "__module__", "") == core_algos.__name__:
            for key, names in readers.items():
                if chosen not in names:
                    out[key] = f"{by} is {chosen!r}, and it is of {', '.join(names)}"
    if out.get("algorithm.gamma") and tree.algorithm.adv_estimator in BY_CALL:
        out["algorithm.gamma"] = "set turn_gamma in [trainer]"
    actor = tree.actor_rollout_ref.actor
    if not (tree.algorithm.use_kl_in_reward or actor.use_kl_loss):
        out[REF] = f"no term compares with a reference model: set {ACTOR}.use_kl_loss, or leave it out"
    for part, settings in ((ACTOR, actor), ("critic", tree.critic)):
        kind = settings.optim.get("warmup_style") or settings.optim.get("lr_scheduler_type")
        if tree.model_engine == "dp" and kind == "constant":
            shapes = [f"{part}.optim.{name}" for name in ("min_lr_ratio", "num_cycles", "zero_indexed_step")]
            out |= dict.fromkeys(shapes, f"set {part}.optim.lr_scheduler_type to cosine too")
        if tree.model_engine != "megatron":
            out[f"{part}.checkpoint.strict"] = "only megatron reads it: leave it out"
    if not has_critic(tree):
        out["critic"] = "no critic is trained: set algorithm.adv_estimator to gae, or leave it out"
    return out


def of_switches(tree: DictConfig) -> dict[str, str]:
    """Keys that belong to something that is off in `tree`."""
    out, megatron = dict[str, str](), tree.model_engine == "megatron"
    for switch, names in SWITCHES.items():
        if not OmegaConf.select(tree, switch):
            out |= dict.fromkeys(names, f"set {switch} too")
    home = "fsdp_config" if tree.model_engine == "dp" else tree.model_engine
    out[f"{REF}.{home}.qat"] = "a reference model has the values that it was given: leave it out"
    critic = [("critic", "critic.model", "fsdp" if tree.model_engine == "dp" else home)] if has_critic(tree) else []
    for part, model, own in [(ACTOR, MODEL, home), *critic]:
        qat = f"{part}.{own}.qat"
        if not OmegaConf.select(tree, f"{qat}.enable"):
            out[qat] = f"set {qat}.enable too"
        mean = f"{part}.loss_agg_mode"
        if OmegaConf.select(tree, mean) != BY_LENGTH:
            out[f"{part}.loss_scale_factor"] = f"{mean} is another than {BY_LENGTH}"
        rank, lora = (f"{model}.lora.rank", ("lora",)) if megatron else (f"{model}.lora_rank", _LORA)
        if not OmegaConf.select(tree, rank):
            out |= {f"{model}.{name}": f"set {rank} too" for name in lora if f"{model}.{name}" != rank}
        elif not megatron and OmegaConf.select(tree, f"{model}.lora_adapter_path"):
            shape = ("lora_alpha", "target_modules", "exclude_modules", "target_parameters")
            out |= {f"{model}.{name}": f"the adapter of {model}.lora_adapter_path has its own" for name in shape}
        mtp = f"{model}.mtp"
        if not OmegaConf.select(tree, f"{mtp}.enable"):
            out[mtp] = f"set {mtp}.enable too"
        elif not OmegaConf.select(tree, f"{mtp}.enable_rollout"):
            out |= {f"{mtp}.{name}": f"set {mtp}.enable_rollout too" for name in _SPECULATION[1:]}
    return out


def sharing(tree: DictConfig, *parts: str) -> Iterator[tuple[str, int]]:
    """The keys by which each of these `parts` shares a row among processes, and how many these are."""
    for part in parts:
        for home in (part, f"{part}.fsdp_config", f"{part}.fsdp"):
            name = f"{home}.ulysses_sequence_parallel_size"
            yield name, OmegaConf.select(tree, name) or 1


def has_critic(tree: DictConfig) -> bool:
    """As verl decides it."""
    return bool(tree.algorithm.adv_estimator == "gae" if tree.critic.enable is None else tree.critic.enable)


def of_engine(engine: str) -> dict[str, str]:
    """Keys that `engine` does not read, by part."""
    home, out = "fsdp_config" if engine == "fsdp" else engine, {}
    for name, engines in ELSEWHERE.items():
        for part in (ACTOR, REF):
            at = f"{_OTHER} {part}.{home}.{name}"
            out[f"{part}.{name}"] = at if engine in engines else "this engine has no such thing: leave it out"
    for part, model, own in ((ACTOR, MODEL, home), (REF, "", home), ("critic", "critic.model", engine)):
        for name, advice in MODEL_OF[engine].items() if model else ():
            out[f"{model}.{name}"] = advice.format(model=model, part=part)
        out |= {f"{part}.optim.{name}": advice for name, advice in OPTIM_OF.get(engine, {}).items()}
        out |= {f"{part}.{own}.{name}": f"{engine} does not read it: leave it out" for name in OWN[engine]}
        out[f"{part}.{own}.router_replay"] = _EXPERTS
        out[f"{part}.{own}.turbo_config"] = "only fsdp_turbo reads it: leave it out"
    out[f"{REF}.optim"] = "a reference model is not trained: leave it out"
    return out
