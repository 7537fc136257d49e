"""verl's configuration: its own defaults, then what ajet needs, then what this host needs, then the user's ``[verl]``.

What the user says always wins. On a GPU host only the few keys of `everywhere` and `on_gpu` differ from verl's
defaults; precision, offloading, parallelism and memory are verl's own business there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from ray._private.utils import get_num_cpus
from transformers.utils import is_flash_attn_2_available
from verl.utils.torch_dtypes import PrecisionType

from ajet_sdk.runs import LEARNING_RATE
from ajet_sdk.settings import ConfigError, nearest
from ajet_trainer.backends.verl import compared, families, forest_refused, functions, refused
from ajet_trainer.backends.verl.estimators import BY_CALL, RUNNING
from ajet_trainer.backends.verl.refused import CORRECTION, Fault
from ajet_trainer.backends.verl.unread import ACTOR, keys, unread
from ajet_trainer.backends.verl.weights import BACKEND
from ajet_trainer.config import GPUS, KEEP, NODES, Config, flatten
from ajet_trainer.overlong import Shaping
from ajet_trainer.turns import ByTurn

FREE = (".engine_kwargs.", ".override_config.", ".mixed_precision", ".sampler_kwargs.", ".reward_kwargs.")
"""Parts of verl's tree that take any key."""
SENT = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{BACKEND}"
RANKS = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BOUNDS = f"{CORRECTION}.rollout_is_threshold"
"""verl's key that takes a number, or a word of two: ``0.5_5.0``."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor within its core: a worker process of its own costs 0.6 GB and some seconds. On a CPU vLLM takes it by
its class alone, since it sets no threads; `main` sets them for all processes."""
GROUPS = ("model_engine",)
"""Keys that choose among verl's configuration files and so must be known before these are read."""
NOT_ASYNC = "a checkpoint must be whole before its batches are acknowledged"
NO_TREES = ": set rows = 'timeline'"
PACKED = "rows differ in number and length, so micro-batches are packed by tokens; set {}"
OURS = {
    "actor_rollout_ref.rollout.n": "set group_size in [trainer]",
    "actor_rollout_ref.rollout.name": "agents are answered by vLLM",
    "actor_rollout_ref.rollout.mode": "an engine that serves agents is always async",
    "data.train_batch_size": "set groups in [trainer]",
    "trainer.total_training_steps": "set total_steps in [trainer]",
    "reward.num_workers": "agents give the rewards",
    "trainer.default_local_dir": "set run_dir in [trainer]",
    KEEP: "set it in [verl] by this very name",
    "trainer.max_critic_ckpt_to_keep": f"it follows the actor's: set {KEEP}",
    "trainer.resume_mode": "a run continues from its last checkpoint; for a new one set another run_dir in [trainer]",
    "trainer.resume_from_path": "a run continues from its last checkpoint; set run_dir in [trainer] to its folder",
    "actor_rollout_ref.actor.checkpoint.async_save": NOT_ASYNC,
    "critic.checkpoint.async_save": NOT_ASYNC,
    "trainer.v1.trainer_mode": "the trainer is ajet's own; where its engines run is engine_urls in [trainer]",
    "transfer_queue.enable": "batches reach verl's workers through TransferQueue",
    "actor_rollout_ref.actor.use_dynamic_bsz": PACKED.format("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": PACKED.format(
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    ),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": PACKED.format(
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    ),
    "critic.use_dynamic_bsz": PACKED.format("critic.ppo_max_token_len_per_gpu"),
    "actor_rollout_ref.model.lora.merge": "agents would be served the model without its adapter",
    "trainer.del_local_ckpt_after_load": "a run continues from its checkpoint as often as it has to",
    "algorithm.filter_groups.enable": "there is no dataset with other groups; set no_signal = 'drop' in [trainer]",
    "algorithm.use_pf_ppo": "verl's V1 trainer would give rows the advantages of others",
}
"""Keys on which it rests that batches are whole and that each is trained once, for its own rewards; and what to do
instead of setting them."""


def everywhere(config: Config) -> dict[str, Any]:
    """The settings that ajet asks of verl on every host."""
    return {
        "actor_rollout_ref.model.path": config.model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.lora.merge": True,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "data.train_batch_size": config.groups,
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.groups,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(16384, config.max_tokens),
        "actor_rollout_ref.actor.loss_scale_factor": config.max_tokens,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 1,
        RANKS: 1,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.max_model_len": config.max_tokens,
        "actor_rollout_ref.rollout.prompt_length": config.max_tokens,
        "actor_rollout_ref.rollout.response_length": config.max_tokens,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.served_model_name": config.model_name,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.generation_config": "vllm",
        "critic.model.path": config.model,
        "critic.ppo_max_token_len_per_gpu": max(32768, config.max_tokens),
        "critic.ppo_infer_max_token_len_per_gpu": "${critic.ppo_max_token_len_per_gpu}",  # verl's V1 trainer reads it
        "algorithm.adv_estimator": "grpo",
        "reward.num_workers": 0,
        "transfer_queue.enable": True,
        "trainer.logger": [],
        GPUS: 1,
        NODES: 1,
        "trainer.project_name": "ajet",
        "trainer.experiment_name": Path(config.run_dir).name,
        "trainer.default_local_dir": str(checkpoints(config)),
        KEEP: max(2, config.keep_checkpoints),
        "trainer.max_critic_ckpt_to_keep": max(2, config.keep_checkpoints),
        "trainer.total_training_steps": config.total_steps or refused.UNLIMITED,
        "trainer.val_before_train": False,
        "trainer.v1.trainer_mode": "ajet",
    }


def off_policy(config: Config) -> dict[str, Any]:
    """Importance correction by token, since a token may not be of the distribution that is trained: shaped otherwise,
    older, or of weights that a crash took back. In bypass mode the engine's logprobs are the old ones, and the loss
    corrects by itself."""
    return {} if config.verl.get(f"{CORRECTION}.bypass_mode") is True else {f"{CORRECTION}.rollout_is": "token"}


def clipping(config: Config) -> dict[str, Any]:
    """verl's losses read one limit for each side, and both of them have a default. So a `clip_ratio` is both."""
    both = config.verl.get(f"{ACTOR}.clip_ratio")
    return {} if both is None else {f"{ACTOR}.clip_ratio_{side}": both for side in ("low", "high")}


def schedules(config: Config) -> dict[str, Any]:
    """Megatron's would begin anew on a resume."""
    if config.verl.get("model_engine") != "megatron":
        return {}
    return {f"{part}.optim.{refused.KEEPS_ITS_PLACE}": True for part in (ACTOR, "critic")}


def on_cpu(config: Config) -> dict[str, Any]:
    """Settings that a host without accelerators needs, and that makes it fast: measured figures are in
    docs/guide/trainer.md."""
    half, executor = native_bfloat16(), ONE_PROCESS if config.verl.get(RANKS, 1) == 1 else "mp"
    precision = {"param_dtype": "bf16" if half else "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return {
        "trainer.device": "cpu",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(1024, config.max_tokens),
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
        "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": True,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision": precision,
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.mixed_precision": precision,
        "critic.strategy": "fsdp2",
        "critic.model.enable_gradient_checkpointing": False,
        "critic.model.override_config.attn_implementation": "sdpa",
        "critic.ppo_max_token_len_per_gpu": max(1024, config.max_tokens),
        "critic.fsdp.use_torch_compile": False,
        "critic.fsdp.reshard_after_forward": False,
        "critic.fsdp.mixed_precision": precision,
        "actor_rollout_ref.rollout.dtype": "bfloat16" if half else "float32",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": executor,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.enable_sleep_mode": False,
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.max_num_seqs": 64,
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 256,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def on_gpu(config: Config) -> dict[str, Any]:
    """Settings of a GPU host. verl's own ask for flash-attn, of which many a torch has no build. Without it attention
    is torch's, and `worker` has logprobs counted by `cross_entropy`. Each storage unit of TransferQueue takes a core
    from Ray, as does its controller, and verl takes three for each GPU. Units are what is left, at most eight."""
    gpus = config.verl.get(GPUS, 1)
    left = int(get_num_cpus()) - 1 - (3 * gpus if type(gpus) is int else 0)
    values: dict[str, Any] = {"transfer_queue.backend.SimpleStorage.num_data_storage_units": max(1, min(8, left))}
    if not is_flash_attn_2_available() and config.verl.get("model_engine", "dp") == "dp":
        values[forest_refused.ATTENTION] = "sdpa"
    return values


def seeds(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """One seed for what the trainer draws: an adapter's start, a critic's head, the order of rows."""
    return dict.fromkeys([key for key in refused.SEEDS if type(theirs.get(key)) is int], f"${{{refused.SEED}}}")


def padded(config: Config, model: Any) -> dict[str, Any]:
    """Rows side by side instead of packed, where the `model` would let them read each other. A tree has no padding."""
    if model is None or config.rows == "tree" or families.packs(model) or config.verl.get("model_engine", "dp") != "dp":
        return {}
    return {"actor_rollout_ref.model.use_remove_padding": False, "critic.model.use_remove_padding": False}


def over_trees(config: Config, device: str) -> dict[str, Any]:
    """The attention of trees. On a CPU there is room for two of the longest rows. With less, each part of a tree would
    hold one row, and nothing would be shared."""
    if config.rows != "tree":
        return {}
    room = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(1024, 2 * config.max_tokens)}
    return {forest_refused.ATTENTION: forest_refused.TAKES_A_TREE[device]} | (room if device == "cpu" else {})


def attached(folder: Path, apart: bool) -> dict[str, Any]:
    """The changes of the attached placement: no engine of verl's own, weights through a folder, an adapter `apart`."""
    return {
        "actor_rollout_ref.model.lora.merge": not apart,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": BACKEND,
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": "ajet_trainer.backends.verl.weights",
        f"{SENT}.folder": str(folder),
    }


def sent_in(tree: DictConfig, dtype: str | None) -> None:
    """Has weights sent in the `dtype` of engines that stand alone, if `tree` computes in it too: then what rounding
    takes away, neither of them reads."""
    computed = compared.dtype_of(tree)
    if dtype is not None and computed is not None and str(PrecisionType.to_dtype(computed)) == f"torch.{dtype}":
        OmegaConf.update(tree, f"{SENT}.dtype", dtype, force_add=True)


def checkpoints(config: Config) -> Path:
    """The folder that holds ``global_step_N``."""
    return Path(config.run_dir).absolute() / "checkpoints"


def defaults(groups: Mapping[str, Any] = {}) -> DictConfig:
    """verl's own configuration, of the files that `groups` choose."""
    import verl
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return hydra_compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in groups.items()])


def decided(
    config: Config, device: str, folder: Path | None, *, apart: bool = False
) -> tuple[Config, DictConfig, str | None]:
    """`config` with its `rows`, the configuration that `compose` makes of it, and why rows are whole where nobody asked
    for that. On GPUs a user has to ask for trees: whole updates by them were not measured there."""
    if config.rows is not None:
        return config, compose(config, device, folder, apart=apart), None
    why = "trees were not measured on GPUs; rows = 'tree' asks for them"
    if device == "cpu":
        trees = replace(config, rows="tree")
        try:
            return trees, compose(trees, device, folder, apart=apart), None
        except ConfigError as error:  # what has nothing to do with trees is raised again below
            why = str(error).removesuffix(NO_TREES)
    whole = replace(config, rows="timeline")
    return whole, compose(whole, device, folder, apart=apart), why


def compose(config: Config, device: str, folder: Path | None, *, apart: bool = False) -> DictConfig:
    """verl's whole configuration, resolved, for rows that are decided. `folder` is where attached weights travel, or an
    adapter `apart`. Raises `ConfigError`."""
    refuse(refused.named("model_engine", config.verl.get("model_engine", "dp"), refused.ENGINES))
    tree = defaults({name: value for name, value in config.verl.items() if name in GROUPS})
    theirs, model = keys(tree), families.known(config.model)
    values = everywhere(config) | off_policy(config) | clipping(config) | schedules(config)
    values |= on_cpu(config) if device == "cpu" else on_gpu(config)
    values |= over_trees(config, device) | padded(config, model)
    values |= (attached(folder, apart) if folder else {}) | seeds(theirs)
    for name, value in values.items():
        OmegaConf.update(tree, name, value, force_add=True)
    ours, before = {name: OmegaConf.select(tree, name) for name in OURS}, keys(tree)
    apply(tree, {name: value for name, value in config.verl.items() if name not in (*GROUPS, KEEP)})
    set_here = [
        name for name, value in keys(tree).items() if value not in (before.get(name, ...), theirs.get(name, ...))
    ]
    OmegaConf.resolve(tree)
    changed = [name for name, value in ours.items() if OmegaConf.select(tree, name) != value]
    refuse((name, f"cannot be changed: {OURS[name]}") for name in changed)
    refuse((key, f"is read by nothing here: {said}") for key, said in unread(set_here, tree, attached=bool(folder)))
    functions.register_all(tree)
    refuse(refused.faults(tree, config))
    if config.rows == "tree":
        refuse((key, f"{said}{NO_TREES}") for key, said in forest_refused.faults(tree))
    refuse(families.faults(tree, model, config.max_tokens) if model is not None else ())
    return tree


def refuse(faults: Iterable[Fault]) -> None:
    """Raises a `ConfigError` with the first of the `faults`, if there is one."""
    for key, said in faults:
        raise ConfigError(f"{key} {said}", param=key)


def rate(config: Config) -> float:
    """The learning rate of `config`: verl's own where it says none. Raises `ConfigError` for what is none."""
    if (said := config.verl.get(LEARNING_RATE)) is not None:
        if type(said) not in (int, float) or said < 0:
            raise ConfigError(f"{LEARNING_RATE} must be a number of at least 0, not {said!r}", param=LEARNING_RATE)
        return float(said)
    return float(OmegaConf.select(defaults(), LEARNING_RATE))


def by_turn(config: Config, tree: DictConfig) -> ByTurn | None:
    """The credit of turns, if there is any."""
    algorithm = tree.algorithm
    if algorithm.adv_estimator not in BY_CALL:
        return None
    alone: dict[str, float] | None = {} if algorithm.adv_estimator == RUNNING else None
    return ByTurn(config.turn_gamma, bool(algorithm.get("norm_adv_by_std_in_grpo", True)), alone)


def shaping(tree: DictConfig) -> Shaping | None:
    """The punishment for length, if there is one."""
    kwargs = OmegaConf.select(tree, refused.SHAPING)
    buffer = kwargs and kwargs.get("overlong_buffer_cfg")
    if not buffer or not buffer.enable:
        return None
    return Shaping(kwargs.max_resp_len, buffer.len, float(buffer.penalty_factor))


def apply(tree: DictConfig, values: Mapping[str, Any]) -> None:
    """The user's keys; a leading ``+`` adds one that verl's own configuration does not list. Raises `ConfigError`."""
    for name, value in values.items():
        added = name.startswith("+") or any(part in f".{name}." for part in FREE)
        key = name.lstrip("+")
        before = None if key == BOUNDS else OmegaConf.select(tree, key)
        if isinstance(value, str) and "$" not in value and isinstance(before, (bool, int, float, DictConfig)):
            kind = {bool: "true or false", DictConfig: "a table of keys"}.get(type(before), "a number")
            raise ConfigError(f"{key} must be {kind}, not {value!r}", param=key)
        try:
            OmegaConf.update(tree, key, value, force_add=added)
        except (ConfigAttributeError, ConfigKeyError):
            near = nearest(key, [known for known, _ in flatten(OmegaConf.to_container(tree))])
            said = f"verl has no key {key!r}{near} (write '+{key}' to add it anyway)"
            raise ConfigError(said, param=key) from None


def native_bfloat16() -> bool:
    """True where the processor multiplies bfloat16 itself; elsewhere half precision is slower than full."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
