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
from ajet_trainer.backends.verl.estimators import BY_TURN
from ajet_trainer.backends.verl.refused import ESTIMATORS, LOSSES
from ajet_trainer.backends.verl.settings import compose, defaults
from ajet_trainer.backends.verl.unread import BY_CHOICE, FAMILIES, OPTIM_OF, OWN, SHAPED, keys, of_engine, unread
from ajet_trainer.config import Config
from ajet_trainer.runs.allowed import KNOBS
from tests.trainer.engine.test_settings import ACTOR, GAE, composed, refused

ROLLOUT, RC = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
BYPASS = {f"{RC}.bypass_mode": True}
ROWS = GAE | {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}
"""A critic's mean follows the actor's, and would be one over rows."""
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
    """By the words in the source of each function that verl registers. `grpo_vectorized` has a parameter of that name,
    and verl's `compute_advantage` hands it to `grpo` alone."""
    registries = (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY)
    for readers, registry in zip(BY_CHOICE.values(), registries, strict=True):
        for key, names in readers.items():
            word = re.compile(rf"(?<!\w){key.split('.')[-1]}\b")
            reading = {
                str(getattr(name, "value", name)) for name, function in registry.items()
                if function.__module__ == core_algos.__name__ and word.search(inspect.getsource(function))
            }  # fmt: skip
            assert reading - {*ESTIMATORS, *LOSSES, "grpo_vectorized"} == {*names} - {BY_TURN}, key


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


def test_each_key_of_a_family_that_nothing_reads_is_refused_with_its_advice() -> None:
    """The nearest family's. Keys of rewards and of the critic that are read are none of them."""
    taken, tree = {*SHAPED, "critic.enable"}, composed(GAE | {f"{ACTOR}.use_kl_loss": True})
    found = dict(unread(plain_tree(), tree, attached=False))
    for key in plain_tree().keys() - taken:
        if families := [one for one in FAMILIES if f"{key}.".startswith(f"{one}.")]:
            assert found[key] == FAMILIES[max(families, key=len)]
    assert not found.keys() & taken


def test_every_key_that_may_be_set_from_afar_is_one_of_verls() -> None:
    assert sorted(KNOBS - plain_tree().keys()) == []


M = "actor_rollout_ref.model"
ON_DISK = {f"{M}.lora_rank": 8, f"{M}.lora_adapter_path": "/a"}
MEGATRON, VEOMNI, TITAN = ({"model_engine": name} for name in ("megatron", "veomni", "torchtitan"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainer.test_freq": 5}, "eval"),
        ({"trainer.val_only": True}, "eval"),
        ({"trainer.validation_data_dir": "v"}, "eval"),
        ({"trainer.save_freq": 5}, "save_freq in [trainer]"),
        ({"trainer.total_epochs": 1}, "total_steps in [trainer]"),
        ({"trainer.rollout_data_dir": "d"}, "ajet-proxy export"),
        ({"trainer.v1.sampler.max_off_policy_threshold": 2}, "max_staleness"),
        ({"reward.custom_reward_function.path": "r.py"}, "ajet reward"),
        ({f"{ROLLOUT}.multi_turn.max_user_turns": 3}, "through the proxy"),
        ({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 2}, "log_prob_max_token_len_per_gpu"),
        ({f"{ROLLOUT}.skip_tokenizer_init": False}, "leave it out"),
        ({f"{ROLLOUT}.prompt_length": 64}, "max_tokens in [trainer]"),
        ({f"{ROLLOUT}.router_config_path": "r.yaml"}, "through the proxy"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2}, "ppo_max_token_len_per_gpu"),
        ({f"{ACTOR}.optim.total_training_steps": 500}, "total_steps in [trainer]"),
        ({f"{ACTOR}.rollout_n": 4}, "group_size in [trainer]"),
        ({f"{ACTOR}.use_remove_padding": False}, f"{M}.use_remove_padding"),
        ({f"{RC}.loss_type": "reinforce"}, "policy_loss.loss_mode"),
        ({f"{ACTOR}.grad_clip": 0.5}, f"{ACTOR}.optim.clip_grad"),
        ({f"{M}.lora.rank": 8}, "lora_rank"),
        ({"algorithm.gamma": 0.9}, "is 'grpo', and it is of gae, reinforce_plus_plus"),
        ({"algorithm.lam": 0.9}, "is 'grpo', and it is of gae"),
        ({f"{ACTOR}.tau_pos": 2.0}, "is 'vanilla', and it is of sapo"),
        ({f"{ACTOR}.policy_loss.kl_cov_ratio": 0.1}, "kl_cov"),
        ({f"{ACTOR}.kl_loss_coef": 0.1}, f"{ACTOR}.use_kl_loss"),
        ({"algorithm.kl_ctrl.kl_coef": 0.1}, "algorithm.use_kl_in_reward"),
        ({"actor_rollout_ref.ref.fsdp_config.param_offload": True}, f"{ACTOR}.use_kl_loss"),
        ({"critic.ppo_epochs": 2}, "algorithm.adv_estimator to gae"),
        ({f"{RC}.rollout_rs_threshold": "0.5_2.0"}, f"set {RC}.rollout_rs"),
        ({f"{ACTOR}.optim.min_lr_ratio": 0.1}, "lr_scheduler_type to cosine"),
        ({f"{ACTOR}.optim.zero_indexed_step": False}, "lr_scheduler_type to cosine"),
        ({f"{ACTOR}.checkpoint.strict": False}, "only megatron"),
        ({f"{M}.lora_alpha": 32}, f"set {M}.lora_rank too"),
        ({f"{M}.target_modules": ["q_proj"]}, f"set {M}.lora_rank too"),
        ({f"{M}.exclude_modules": "lm_head"}, f"set {M}.lora_rank too"),
        ({f"{M}.lora_adapter_path": "/a"}, f"set {M}.lora_rank too"),
        (ON_DISK | {f"{M}.lora_alpha": 32}, f"the adapter of {M}.lora_adapter_path has its own"),
        ({f"{ACTOR}.loss_scale_factor": 100}, "loss_agg_mode is another than seq-mean-token-sum-norm"),
        ({f"{ACTOR}.fsdp_config.qat.mode": "w4a4"}, f"set {ACTOR}.fsdp_config.qat.enable too"),
        ({"actor_rollout_ref.ref.fsdp_config.qat.enable": True}, "reference model"),
        ({f"{M}.mtp.enable_rollout": True}, f"set {M}.mtp.enable too"),
        ({f"{M}.mtp.num_speculative_tokens": 3}, f"set {M}.mtp.enable too"),
        ({f"{ACTOR}.data_loader_seed": 7}, "rows are not shuffled"),
        ({"algorithm.adv_estimator": "ajet_turn", "algorithm.gamma": 0.9}, "set turn_gamma in [trainer]"),
        ({"algorithm.adv_estimator": "ajet_running", "algorithm.gamma": 0.9}, "set turn_gamma in [trainer]"),
        ({"algorithm.adv_estimator": "ajet_running", "algorithm.norm_adv_by_std_in_grpo": False}, "it is of grpo"),
        ({"algorithm.adv_estimator": "grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo": False}, "it is of grpo"),
        (GAE | {"critic.model.lora_alpha": 32}, "set critic.model.lora_rank too"),
        (GAE | {"critic.model.mtp.enable_rollout": True}, "a critic samples nothing"),
        (GAE | {"critic.loss_scale_factor": 100}, "seq-mean-token-sum-norm"),
        (GAE | {"critic.fsdp.qat.mode": "w4a4"}, "set critic.fsdp.qat.enable too"),
        ({f"{ACTOR}.fsdp_config.dtype": "float16"}, "fsdp does not read it"),
        ({"critic.fsdp.turbo_config.distributed.tensor_parallel_size": 2}, "fsdp_turbo"),
        ({f"{M}.mtp.enable_train": True}, "only megatron"),
        ({f"{ACTOR}.qat.enable": True}, f"{ACTOR}.fsdp_config.qat"),
        (MEGATRON | {f"{M}.lora_rank": 8}, f"{M}.lora"),
        (MEGATRON | {"critic.model.lora_rank": 8}, "critic.model.lora"),
        (MEGATRON | {f"{M}.enable_gradient_checkpointing": False}, "recompute_granularity"),
        (MEGATRON | {f"{ACTOR}.megatron.dist_checkpointing_prefix": "x"}, "leave it out"),
        (MEGATRON | {f"{ACTOR}.use_torch_compile": False}, "no such thing"),
        (MEGATRON | {"critic.megatron.router_replay.mode": "R2"}, "routes of experts"),
        (MEGATRON | {f"{M}.lora.alpha": 64}, f"set {M}.lora.rank too"),
        (MEGATRON | {f"{ACTOR}.megatron.qat.group_size": 32}, f"set {ACTOR}.megatron.qat.enable too"),
        (MEGATRON | {f"{M}.mtp.detach_encoder": True}, f"set {M}.mtp.enable too"),
        (VEOMNI | {f"{M}.lora_rank": 8}, "train with fsdp or megatron"),
        (VEOMNI | {f"{M}.lora_alpha": 32}, "train with fsdp or megatron"),
        (VEOMNI | {f"{ACTOR}.optim.lr_warmup_steps": 20}, "lr_warmup_steps_ratio"),
        (VEOMNI | {f"{ACTOR}.veomni.load_checkpoint_path": "x"}, "leave it out"),
        (TITAN | {f"{ACTOR}.optim.clip_grad": 0.5}, "leave it out"),
        (TITAN | {f"{M}.enable_gradient_checkpointing": False}, "activation_checkpoint"),
        (TITAN | {f"{ACTOR}.torchtitan.mixed_precision": True}, "leave it out"),
        (TITAN | {"actor_rollout_ref.ref.optim.lr": 0.5}, "not trained"),
    ],
)
def test_what_nothing_reads_is_refused_with_what_to_do(values: dict[str, Any], words: str) -> None:
    *_, key = values
    said = refused(values, total_steps=9)
    assert said.startswith(f"{key} is read by nothing here: ") and words in said
    assert refused({f"+{one}" if one == key else one: value for one, value in values.items()}, total_steps=9) == said


@pytest.mark.parametrize(
    "values",
    [
        {f"{ACTOR}.fsdp_config.param_offload": True, f"{M}.lora_rank": 8},
        GAE | {f"{ACTOR}.strategy": "fsdp2", "critic.strategy": "fsdp2", f"{ACTOR}.fsdp_config.offload_policy": True},
        {f"{ACTOR}.strategy": "fsdp_turbo",
         f"{ACTOR}.fsdp_config.turbo_config.distributed.tensor_parallel_size": 2},
        MEGATRON | {f"{M}.lora.rank": 8, f"{M}.lora.dropout_position": "post",
                    f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ACTOR}.optim.clip_grad": 0.5,
                    f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": "full"},
        VEOMNI | {f"{ACTOR}.veomni.rms_norm_implementation": "liger", f"{ACTOR}.optim.lr_start": 1e-7},
        TITAN | {f"{ACTOR}.torchtitan.tensor_parallel_size": 2, f"{ACTOR}.optim.eps": 1e-7},
        GAE | {"algorithm.gamma": 0.9, "algorithm.lam": 0.9, "critic.ppo_epochs": 2},
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_pos": 2.0},
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1,
         "actor_rollout_ref.ref.fsdp_config.param_offload": True},
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1},
        {f"{RC}.rollout_is_threshold": 3.0},
        BYPASS,
        {f"{ACTOR}.optim.lr_warmup_steps": 3},
        {f"{M}.lora_rank": 8, f"{M}.lora_alpha": 32, f"{M}.target_modules": ["q_proj"]},
        ON_DISK,
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 100},
        {f"{ACTOR}.fsdp_config.qat.enable": True, f"{ACTOR}.fsdp_config.qat.mode": "w4a4"},
        {f"{M}.mtp.enable": True, f"{M}.mtp.enable_rollout": True, f"{M}.mtp.num_speculative_tokens": 3},
        {"algorithm.adv_estimator": "tests.trainer.engine.own_functions:doubled", "algorithm.gamma": 0.9},
        {f"{ACTOR}.data_loader_seed": 7, f"{ACTOR}.shuffle": True},
        ROWS | {"critic.loss_agg_mode": "token-mean"},
        {"trainer.test_freq": -1, "trainer.val_before_train": True, "data.max_prompt_length": 512},  # verl's own values
        {f"{ROLLOUT}.temperature": 0.9, f"{ACTOR}.ppo_max_token_len_per_gpu": 20_000},  # which other keys follow
    ],
)  # fmt: skip
def test_what_is_read_is_taken(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    composed(values, total_steps=9)


@pytest.mark.parametrize(("values", "said"), [
    (BYPASS | {f"{RC}.rollout_is": "token"}, f"{RC}.rollout_is does nothing with {RC}.bypass_mode"),
    (BYPASS | {f"{RC}.rollout_rs": "token_k1"}, f"{RC}.rollout_rs does nothing with {RC}.bypass_mode"),
    ({"trainer.logger": ["console", "wandbb"]}, "trainer.logger = 'wandbb' is not in verl; did you mean 'wandb'?"),
    ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}, "algorithm.kl_ctrl.type must be"),
    (ROWS, "critic.loss_agg_mode = 'seq-mean-token-sum' would count rows"),
    ({f"{ACTOR}.shuffle": True, f"{ACTOR}.ppo_mini_batch_size": 1}, f"{ACTOR}.shuffle would mix the groups"),
])  # fmt: skip
def test_what_would_not_train_what_is_asked_for_is_refused(values: dict[str, Any], said: str) -> None:
    assert refused(values).startswith(said)


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
