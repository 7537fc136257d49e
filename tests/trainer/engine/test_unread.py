"""A key of verl's that nothing reads here is refused; and there are no others, as far as verl's sources tell."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import verl
from verl.trainer.ppo import core_algos

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl import estimators, unread
from ajet_trainer.backends.verl.refused import ESTIMATORS, LOSSES
from ajet_trainer.backends.verl.settings import compose, defaults
from ajet_trainer.backends.verl.unread import FAMILIES, OPTIM_OF, OWN, keys, of_engine
from ajet_trainer.config import Config
from tests.trainer.engine.test_settings import ACTOR, composed, refused

ROLLOUT = "actor_rollout_ref.rollout"
UNUSED = (
    "models/", "model_merger/", "experimental/", "tools/", "interactions/", "trainer/sft", "trainer/ppo/ray_trainer",
    "trainer/main_", "trainer/ppo/v1/trainer_sep", "trainer/ppo/v1/trainer_colocate", "trainer/ppo/v1/trainer_sync",
    "megatron", "torchtitan", "veomni", "automodel", "mindspeed", "sglang", "trtllm", "utils/dataset",
    "utils/reward_score", "distillation",
)  # fmt: skip
"""Sources of verl of which nothing runs with fsdp and vLLM."""
RUN_WITH = {
    "dp": ("workers/engine/fsdp/*.py", "utils/fsdp_utils.py", "utils/checkpoint/fsdp*.py", "utils/qat/*.py"),
    "megatron": (
        "workers/engine/megatron/*.py", "utils/megatron*.py", "utils/megatron/*.py", "utils/checkpoint/megatron*.py",
        "models/mcore/*.py", "utils/modelopt/*.py", "utils/qat/*.py",
    ),
    "veomni": ("workers/engine/veomni/*.py", "workers/engine/fsdp/transformer_impl.py", "utils/checkpoint/fsdp*.py"),
    "torchtitan": ("workers/engine/torchtitan/*.py",),
    "": (
        "workers/engine/*.py", "workers/engine_workers.py", "workers/config/model.py", "workers/config/optimizer.py",
        "utils/checkpoint/checkpoint_manager.py", "trainer/ppo/v1/trainer_base.py", "workers/utils/*.py",
        "trainer/ppo/core_algos.py", "utils/config.py", "workers/rollout/vllm_rollout/*.py", "utils/model.py",
    ),
}  # fmt: skip
"""Sources of verl that run with each ``model_engine``, and with any of them."""
ELSEWHERE = {
    "transfer_queue": "TransferQueue reads them",
    f"{ROLLOUT}.disaggregation": "SGLang reads them",
    "model_engine": "it chooses among verl's files",
    "algorithm.use_pf_ppo": "`settings.OURS` refuses it",
    "ray_kwargs.ray_init": "Ray reads them",
}
WHOLE = ("override_transformer_config.", "_implementation", "mbridge_config")
"""Parts of keys that an engine hands on as they are."""


def plain_tree(engine: str = "dp") -> dict[str, Any]:
    return keys(defaults({"model_engine": engine}))


def words_of(files: Iterable[Path]) -> set[str]:
    """Every word of these sources, without the declarations of configuration classes."""
    words = set[str]()
    for file in files:
        text = re.sub(r'""".*?"""', "", file.read_text(), flags=re.DOTALL)
        text = re.sub(r"(?m)^ +\w+: [^#\n]*$|#.*$", "", text)
        words.update(re.findall(r"\w+", text))
    return words


def missing(engine: str, words: set[str]) -> list[str]:
    """The keys that an engine has, are not refused, and are none of `words`."""
    known = {*FAMILIES, *of_engine("fsdp" if engine == "dp" else engine), *ELSEWHERE}
    return [
        key for key in plain_tree(engine)
        if key.split(".")[-1] not in words | {"_target_"} and not any(f"{key}.".startswith(f"{one}.") for one in known)
    ]  # fmt: skip


def test_every_key_that_is_not_refused_is_read_somewhere() -> None:
    home = Path(verl.__file__).parent
    run = [file for file in home.rglob("*.py") if not any(part in str(file.relative_to(home)) for part in UNUSED)]
    assert missing("dp", words_of(run)) == []


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_every_key_of_an_engine_is_read_by_it_or_refused(engine: str) -> None:
    """Of actor, reference, critic and model: in the sources that run with this engine, not with another."""
    home = Path(verl.__file__).parent
    run = [file for part in (engine, "") for pattern in RUN_WITH[part] for file in home.glob(pattern)]
    parts = ("actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "actor_rollout_ref.model.", "critic.")
    assert [
        key for key in missing(engine, words_of(run))
        if key.startswith(parts) and not any(part in key for part in WHOLE)
        and not (engine == "megatron" and ".model.lora." in key)
    ] == []  # fmt: skip


def test_what_only_some_choices_read_is_told_apart_as_verl_does() -> None:
    """By the words in the source of each function that verl registers."""
    registries = (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY)
    for readers, registry in zip(unread.BY_CHOICE.values(), registries, strict=True):
        for key, names in readers.items():
            word = re.compile(rf"(?<!\w){key.split('.')[-1]}\b")
            reading = {
                str(getattr(name, "value", name)) for name, function in registry.items()
                if function.__module__ == core_algos.__name__ and word.search(inspect.getsource(function))
            }  # fmt: skip
            assert reading - {*ESTIMATORS, *LOSSES} == {*names} - {estimators.BY_TURN}, key


def test_the_list_names_keys_that_verl_has() -> None:
    tree = plain_tree()
    assert [one for one in FAMILIES if not any(f"{key}.".startswith(f"{one}.") for key in tree)] == [
        "critic.nccl_timeout"
    ]


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_what_an_engine_does_not_read_is_in_its_tree(engine: str) -> None:
    """But for what all of them are told of, whether they have it or not."""
    name = "fsdp" if engine == "dp" else engine
    tree, home = plain_tree(engine), "fsdp_config" if engine == "dp" else engine
    mine = [f"{ACTOR}.optim.{key}" for key in OPTIM_OF.get(name, ())] + [f"{ACTOR}.{home}.{key}" for key in OWN[name]]
    assert set(mine) <= set(of_engine(name))
    assert [one for one in mine if not any(f"{key}.".startswith(f"{one}.") for key in tree)] == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("trainer.test_freq", 5, "eval"),
        ("trainer.val_only", True, "eval"),
        ("trainer.validation_data_dir", "v", "eval"),
        ("trainer.rollout_data_dir", "d", "ajet-proxy export"),
        ("trainer.save_freq", 5, "save_freq in [trainer]"),
        ("trainer.total_epochs", 1, "total_steps in [trainer]"),
        ("trainer.v1.sampler.max_off_policy_threshold", 2, "max_staleness"),
        ("data.max_prompt_length", 100, "max_tokens in [trainer]"),
        ("data.train_files", "x.parquet", "no dataset"),
        ("reward.custom_reward_function.path", "r.py", "ajet reward"),
        ("reward_model.enable", True, "ajet reward"),
        ("distillation.enabled", True, "teacher"),
        (f"{ROLLOUT}.multi_turn.max_user_turns", 3, "through the proxy"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 2, "log_prob_max_token_len_per_gpu"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2, "ppo_max_token_len_per_gpu"),
        (f"{ACTOR}.use_prefix_grouper", True, "leave it off"),
        (f"{ACTOR}.grad_clip", 0.5, f"{ACTOR}.optim.clip_grad"),
        ("actor_rollout_ref.model.lora.rank", 8, "lora_rank"),
        ("global_profiler.tool", "torch", "profiler"),
        ("algorithm.rollout_correction.loss_type", "reinforce", "policy_loss.loss_mode"),
        (f"{ACTOR}.optim.total_training_steps", 500, "total_steps in [trainer]"),
        (f"{ACTOR}.rollout_n", 4, "group_size in [trainer]"),
        (f"{ACTOR}.use_remove_padding", False, "actor_rollout_ref.model.use_remove_padding"),
        (f"{ROLLOUT}.skip_tokenizer_init", False, "leave it out"),
        (f"{ROLLOUT}.prompt_length", 64, "max_tokens in [trainer]"),
        (f"{ROLLOUT}.router_config_path", "r.yaml", "through the proxy"),
        ("algorithm.gamma", 0.9, "is 'grpo', and it is of gae, reinforce_plus_plus"),
        ("algorithm.lam", 0.9, "is 'grpo', and it is of gae"),
        (f"{ACTOR}.tau_pos", 2.0, "is 'vanilla', and it is of sapo"),
        (f"{ACTOR}.policy_loss.kl_cov_ratio", 0.1, "kl_cov"),
        (f"{ACTOR}.kl_loss_coef", 0.1, f"{ACTOR}.use_kl_loss"),
        ("algorithm.kl_ctrl.kl_coef", 0.1, "algorithm.use_kl_in_reward"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", True, f"{ACTOR}.use_kl_loss"),
        ("critic.ppo_epochs", 2, "algorithm.adv_estimator to gae"),
        ("algorithm.rollout_correction.rollout_rs_threshold", "0.5_2.0", "set algorithm.rollout_correction.rollout_rs"),
        (f"{ACTOR}.optim.min_lr_ratio", 0.1, "lr_scheduler_type to cosine"),
        (f"{ACTOR}.optim.zero_indexed_step", False, "lr_scheduler_type to cosine"),
        (f"{ACTOR}.checkpoint.strict", False, "only megatron"),
        ("actor_rollout_ref.model.lora_alpha", 32, "set actor_rollout_ref.model.lora_rank too"),
        ("actor_rollout_ref.model.target_modules", ["q_proj"], "set actor_rollout_ref.model.lora_rank too"),
        ("actor_rollout_ref.model.exclude_modules", "lm_head", "set actor_rollout_ref.model.lora_rank too"),
        ("actor_rollout_ref.model.lora_adapter_path", "/a", "set actor_rollout_ref.model.lora_rank too"),
        (f"{ACTOR}.loss_scale_factor", 100, "loss_agg_mode is another than seq-mean-token-sum-norm"),
        (f"{ACTOR}.fsdp_config.qat.mode", "w4a4", f"set {ACTOR}.fsdp_config.qat.enable too"),
        ("actor_rollout_ref.ref.fsdp_config.qat.enable", True, "reference model"),
        ("actor_rollout_ref.model.mtp.enable_rollout", True, "set actor_rollout_ref.model.mtp.enable too"),
        ("actor_rollout_ref.model.mtp.num_speculative_tokens", 3, "set actor_rollout_ref.model.mtp.enable too"),
    ],
)
def test_what_nothing_reads_is_refused_with_what_to_do(key: str, value: object, words: str) -> None:
    said = refused({key: value})
    assert said.startswith(f"{key} is read by nothing here: ")
    assert words in said
    assert refused({f"+{key}": value}) == said


@pytest.mark.parametrize(
    ("engine", "key", "value", "words"),
    [
        ("dp", f"{ACTOR}.fsdp_config.dtype", "float16", "fsdp does not read it"),
        ("dp", "critic.fsdp.turbo_config.distributed.tensor_parallel_size", 2, "fsdp_turbo"),
        ("dp", "actor_rollout_ref.model.mtp.enable_train", True, "only megatron"),
        ("dp", f"{ACTOR}.qat.enable", True, f"{ACTOR}.fsdp_config.qat"),
        ("megatron", "actor_rollout_ref.model.lora_rank", 8, "actor_rollout_ref.model.lora"),
        ("megatron", "critic.model.lora_rank", 8, "critic.model.lora"),
        ("megatron", "actor_rollout_ref.model.enable_gradient_checkpointing", False, "recompute_granularity"),
        ("megatron", f"{ACTOR}.megatron.dist_checkpointing_prefix", "x", "leave it out"),
        ("megatron", f"{ACTOR}.use_torch_compile", False, "no such thing"),
        ("megatron", "critic.megatron.router_replay.mode", "R2", "routes of experts"),
        ("veomni", "actor_rollout_ref.model.lora_rank", 8, "train with fsdp or megatron"),
        ("veomni", f"{ACTOR}.optim.lr_warmup_steps", 20, "lr_warmup_steps_ratio"),
        ("veomni", f"{ACTOR}.veomni.load_checkpoint_path", "x", "leave it out"),
        ("megatron", "actor_rollout_ref.model.lora.alpha", 64, "set actor_rollout_ref.model.lora.rank too"),
        ("megatron", f"{ACTOR}.megatron.qat.group_size", 32, f"set {ACTOR}.megatron.qat.enable too"),
        ("megatron", "actor_rollout_ref.model.mtp.detach_encoder", True, "set actor_rollout_ref.model.mtp.enable too"),
        ("veomni", "actor_rollout_ref.model.lora_alpha", 32, "train with fsdp or megatron"),
        ("torchtitan", f"{ACTOR}.optim.clip_grad", 0.5, "leave it out"),
        ("torchtitan", "actor_rollout_ref.model.enable_gradient_checkpointing", False, "activation_checkpoint"),
        ("torchtitan", f"{ACTOR}.torchtitan.mixed_precision", True, "leave it out"),
        ("torchtitan", "actor_rollout_ref.ref.optim.lr", 0.5, "not trained"),
    ],
)
def test_what_an_engine_does_not_read_is_refused(engine: str, key: str, value: object, words: str) -> None:
    said = refused({"model_engine": engine, key: value}, total_steps=9)
    assert said.startswith(f"{key} is read by nothing here: ")
    assert words in said


@pytest.mark.parametrize(
    ("engine", "values"),
    [
        ("dp", {f"{ACTOR}.fsdp_config.param_offload": True, "actor_rollout_ref.model.lora_rank": 8}),
        ("dp", {"algorithm.adv_estimator": "gae", f"{ACTOR}.strategy": "fsdp2", "critic.strategy": "fsdp2",
                f"{ACTOR}.fsdp_config.offload_policy": True}),
        ("dp", {f"{ACTOR}.strategy": "fsdp_turbo",
                f"{ACTOR}.fsdp_config.turbo_config.distributed.tensor_parallel_size": 2}),
        ("megatron", {"actor_rollout_ref.model.lora.rank": 8, "actor_rollout_ref.model.lora.dropout_position": "post",
                      f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ACTOR}.optim.clip_grad": 0.5,
                      f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": "full"}),
        ("veomni", {f"{ACTOR}.veomni.rms_norm_implementation": "liger", f"{ACTOR}.optim.lr_start": 1e-7}),
        ("torchtitan", {f"{ACTOR}.torchtitan.tensor_parallel_size": 2, f"{ACTOR}.optim.eps": 1e-7}),
    ],
)  # fmt: skip
def test_what_an_engine_reads_is_taken(engine: str, values: dict[str, Any]) -> None:
    composed({"model_engine": engine} | values, total_steps=9)


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.9, "algorithm.lam": 0.9, "critic.ppo_epochs": 2},
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_pos": 2.0},
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1,
         "actor_rollout_ref.ref.fsdp_config.param_offload": True},
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1},
        {"algorithm.rollout_correction.rollout_is_threshold": 3.0},
        {f"{ACTOR}.optim.lr_warmup_steps": 3},
        {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 32,
         "actor_rollout_ref.model.target_modules": ["q_proj"]},
        {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_adapter_path": "/a"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 100},
        {f"{ACTOR}.fsdp_config.qat.enable": True, f"{ACTOR}.fsdp_config.qat.mode": "w4a4"},
        {"actor_rollout_ref.model.mtp.enable": True, "actor_rollout_ref.model.mtp.enable_rollout": True,
         "actor_rollout_ref.model.mtp.num_speculative_tokens": 3},
        {"algorithm.adv_estimator": "tests.trainer.engine.own_functions:doubled", "algorithm.gamma": 0.9},
    ],
)  # fmt: skip
def test_what_the_choice_reads_is_taken(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    composed(values)


def test_what_belongs_to_a_critic_or_to_an_adapter_on_disk() -> None:
    gae, model = {"algorithm.adv_estimator": "gae"}, "actor_rollout_ref.model"
    assert "set critic.model.lora_rank too" in refused(gae | {"critic.model.lora_alpha": 32})
    assert "a critic samples nothing" in refused(gae | {"critic.model.mtp.enable_rollout": True})
    assert "seq-mean-token-sum-norm" in refused(gae | {"critic.loss_scale_factor": 100})
    assert "set critic.fsdp.qat.enable too" in refused(gae | {"critic.fsdp.qat.mode": "w4a4"})
    on_disk = {f"{model}.lora_rank": 8, f"{model}.lora_adapter_path": "/a", f"{model}.lora_alpha": 32}
    assert f"the adapter of {model}.lora_adapter_path has its own" in refused(on_disk)


def test_a_discount_of_turns_is_ajets_own() -> None:
    discount = {"algorithm.adv_estimator": "ajet_turn", "algorithm.gamma": 0.9}
    assert "set turn_gamma in [trainer]" in refused(discount)


def test_an_engine_is_of_the_keys_that_were_chosen_and_of_this_device() -> None:
    strategy = f"{ACTOR}.strategy"
    assert refused({"model_engine": "megatrn"}) == "model_engine = 'megatrn' is not in verl; did you mean 'megatron'?"
    for name in ("megatron", "automodel"):
        assert refused({strategy: name}) == f"{strategy} = {name!r} is not of model_engine = 'dp': leave it out"
    said = "does not run on a CPU: leave it out"
    assert refused({"model_engine": "megatron"}, device="cpu") == f"model_engine = 'megatron' {said}"
    for part in (ACTOR, "critic"):
        assert refused({f"{part}.strategy": "fsdp"}, device="cpu") == f"{part}.strategy = 'fsdp' {said}"
        composed({f"{part}.strategy": "fsdp2"}, device="cpu")


def test_a_seed_of_a_shuffle_needs_the_shuffle() -> None:
    seed = {f"{ACTOR}.data_loader_seed": 7}
    assert refused(seed).startswith(f"{ACTOR}.data_loader_seed is read by nothing here: rows are not shuffled")
    composed(seed | {f"{ACTOR}.shuffle": True})
    mixed = refused({f"{ACTOR}.shuffle": True, f"{ACTOR}.ppo_mini_batch_size": 1})
    assert mixed.startswith(f"{ACTOR}.shuffle would mix the groups of a step's updates")


def test_verls_own_value_may_be_said() -> None:
    composed({"trainer.test_freq": -1, "trainer.val_before_train": True, "data.max_prompt_length": 512})


def test_what_another_key_gives_is_no_setting_of_its_own() -> None:
    """`critic.profiler`, `distillation` and more follow keys that are read."""
    composed({f"{ROLLOUT}.temperature": 0.9, f"{ACTOR}.ppo_max_token_len_per_gpu": 20_000})


@pytest.mark.parametrize("key", [f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"])
def test_rows_are_always_packed_by_tokens(key: str) -> None:
    assert refused({key: False}).startswith(f"{key} cannot be changed: rows differ in number and length")


@pytest.mark.parametrize("name", ["rollout_is", "rollout_rs"])
def test_a_correction_that_a_bypass_skips_is_refused(name: str) -> None:
    key, value = "algorithm.rollout_correction", {"rollout_is": "token", "rollout_rs": "token_k1"}[name]
    said = refused({f"{key}.bypass_mode": True, f"{key}.{name}": value})
    assert said.startswith(f"{key}.{name} does nothing with {key}.bypass_mode")
    composed({f"{key}.bypass_mode": True})


def test_a_logger_that_verl_does_not_have_is_refused() -> None:
    assert refused({"trainer.logger": ["console", "wandbb"]}) == (
        "trainer.logger = 'wandbb' is not in verl; did you mean 'wandb'?"
    )


def test_a_coefficient_that_no_checkpoint_holds_is_refused() -> None:
    adaptive = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    assert refused(adaptive).startswith("algorithm.kl_ctrl.type must be fixed")


def test_a_critic_that_would_count_rows_is_refused() -> None:
    mean = {"algorithm.adv_estimator": "gae", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}
    assert refused(mean).startswith("critic.loss_agg_mode = 'seq-mean-token-sum' would count rows")
    composed(mean | {"critic.loss_agg_mode": "token-mean"})


def test_an_engine_that_stands_alone_is_told_nothing_by_verl(tmp_path: Path) -> None:
    def attached(key: str, value: object) -> Any:
        config = Config(model="m", engine_urls=("http://e",), verl={f"{ROLLOUT}.{key}": value})
        return compose(config, "cuda", tmp_path)

    for key, value in (("gpu_memory_utilization", 0.9), ("engine_kwargs.vllm.max_logprobs", 3)):
        with pytest.raises(ConfigError, match=f"{ROLLOUT}.{key} is read by nothing here: the engines of engine_urls"):
            attached(key, value)
        composed({f"{ROLLOUT}.{key}": value})
    attached("temperature", 0.9)
    head = {f"actor_rollout_ref.model.mtp.{name}": True for name in ("enable", "enable_rollout")}
    assert "the engines of engine_urls stand alone" in refused(head, engine_urls=("http://e",), folder=tmp_path)
