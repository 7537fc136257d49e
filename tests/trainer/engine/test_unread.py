"""A key of verl's that nothing reads here is refused; and there are no others, as far as verl's sources tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import ConfigError
from tests.trainer.engine.test_settings import ACTOR, composed, refused

ROLLOUT = "actor_rollout_ref.rollout"
UNUSED = (
    "models/", "model_merger/", "experimental/", "tools/", "interactions/", "trainer/sft", "trainer/ppo/ray_trainer",
    "trainer/main_", "trainer/ppo/v1/trainer_sep", "trainer/ppo/v1/trainer_colocate", "trainer/ppo/v1/trainer_sync",
    "megatron", "torchtitan", "veomni", "automodel", "mindspeed", "sglang", "trtllm", "utils/dataset",
    "utils/reward_score", "distillation",
)  # fmt: skip
"""Sources of verl of which nothing runs with fsdp and vLLM."""
ELSEWHERE = {
    "transfer_queue": "TransferQueue reads them",
    "actor_rollout_ref.model.lora": "megatron reads them",
    "actor_rollout_ref.model.mtp": "models with such a head read them",
    "critic.model.lora": "megatron reads them",
    "critic.model.mtp": "models with such a head read them",
    f"{ROLLOUT}.disaggregation": "SGLang reads them",
    f"{ACTOR}.fsdp_config.turbo_config": "another engine reads them",
    "actor_rollout_ref.ref.fsdp_config.turbo_config": "another engine reads them",
    "critic.fsdp.turbo_config": "another engine reads them",
    "model_engine": "it chooses among verl's files",
    "algorithm.use_pf_ppo": "`settings.OURS` refuses it",
    "ray_kwargs.ray_init": "Ray reads them",
}


def plain_tree() -> dict[str, Any]:
    import verl
    from hydra import compose, initialize_config_dir

    from ajet_trainer.verl_backend.unread import keys

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return keys(compose("ppo_trainer"))


def words_of_sources() -> set[str]:
    """Every word of the sources that run, without the declarations of configuration classes."""
    import verl

    home, words = Path(verl.__file__).parent, set[str]()
    for file in home.rglob("*.py"):
        name = file.relative_to(home).as_posix()
        if not any(part in name for part in UNUSED):
            text = re.sub(r'""".*?"""', "", file.read_text(), flags=re.DOTALL)
            text = re.sub(r"(?m)^ +\w+: [^#\n]*$|#.*$", "", text)
            words.update(re.findall(r"\w+", text))
    return words


def test_every_key_that_is_not_refused_is_read_somewhere(verl_here: None) -> None:
    from ajet_trainer.verl_backend.unread import FAMILIES

    words = words_of_sources()
    unread = [
        key for key in plain_tree()
        if key.split(".")[-1] not in words | {"_target_"}
        and not any(f"{key}.".startswith(f"{family}.") for family in (*FAMILIES, *ELSEWHERE))
    ]  # fmt: skip
    assert unread == []


def test_the_list_names_keys_that_verl_has(verl_here: None) -> None:
    from ajet_trainer.verl_backend.unread import FAMILIES

    tree = plain_tree()
    missing = [family for family in FAMILIES if not any(f"{key}.".startswith(f"{family}.") for key in tree)]
    assert all(".megatron." in family or ".veomni." in family for family in missing)


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
    ],
)
def test_what_nothing_reads_is_refused_with_what_to_do(key: str, value: object, words: str, verl_here: None) -> None:
    said = refused({key: value})
    assert said.startswith(f"{key} is read by nothing here: ")
    assert words in said
    assert refused({f"+{key}": value}) == said


def test_a_seed_of_a_shuffle_needs_the_shuffle(verl_here: None) -> None:
    seed = {f"{ACTOR}.data_loader_seed": 7}
    assert refused(seed).startswith(f"{ACTOR}.data_loader_seed is read by nothing here: rows are not shuffled")
    composed(seed | {f"{ACTOR}.shuffle": True})
    mixed = refused({f"{ACTOR}.shuffle": True, f"{ACTOR}.ppo_mini_batch_size": 1})
    assert mixed.startswith(f"{ACTOR}.shuffle would mix the groups of a step's updates")


def test_verls_own_value_may_be_said(verl_here: None) -> None:
    composed({"trainer.test_freq": -1, "trainer.val_before_train": True, "data.max_prompt_length": 512})


def test_what_another_key_gives_is_no_setting_of_its_own(verl_here: None) -> None:
    """`critic.profiler`, `distillation` and more follow keys that are read."""
    composed({f"{ROLLOUT}.temperature": 0.9, f"{ACTOR}.ppo_max_token_len_per_gpu": 20_000})


@pytest.mark.parametrize("key", [f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"])
def test_rows_are_always_packed_by_tokens(key: str, verl_here: None) -> None:
    assert refused({key: False}).startswith(f"{key} cannot be changed: rows differ in number and length")


@pytest.mark.parametrize("name", ["rollout_is", "rollout_rs"])
def test_a_correction_that_a_bypass_skips_is_refused(name: str, verl_here: None) -> None:
    key, value = "algorithm.rollout_correction", {"rollout_is": "token", "rollout_rs": "token_k1"}[name]
    said = refused({f"{key}.bypass_mode": True, f"{key}.{name}": value})
    assert said.startswith(f"{key}.{name} does nothing with {key}.bypass_mode")
    composed({f"{key}.bypass_mode": True})


def test_a_logger_that_verl_does_not_have_is_refused(verl_here: None) -> None:
    assert refused({"trainer.logger": ["console", "wandbb"]}) == (
        "trainer.logger = 'wandbb' is not in verl; did you mean 'wandb'?"
    )


def test_a_coefficient_that_no_checkpoint_holds_is_refused(verl_here: None) -> None:
    adaptive = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    assert refused(adaptive).startswith("algorithm.kl_ctrl.type must be fixed")


def test_a_critic_that_would_count_rows_is_refused(verl_here: None) -> None:
    mean = {"algorithm.adv_estimator": "gae", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}
    assert refused(mean).startswith("critic.loss_agg_mode = 'seq-mean-token-sum' would count rows")
    composed(mean | {"critic.loss_agg_mode": "token-mean"})


def test_an_engine_that_stands_alone_is_told_nothing_by_verl(tmp_path: Path, verl_here: None) -> None:
    from ajet_trainer.config import Config
    from ajet_trainer.verl_backend.settings import compose

    def attached(key: str, value: object) -> Any:
        config = Config(model="m", engine_urls=("http://e",), verl={f"{ROLLOUT}.{key}": value})
        return compose(config, "cuda", tmp_path)

    for key, value in (("gpu_memory_utilization", 0.9), ("engine_kwargs.vllm.max_logprobs", 3)):
        with pytest.raises(ConfigError, match=f"{ROLLOUT}.{key} is read by nothing here: the engines of engine_urls"):
            attached(key, value)
        composed({f"{ROLLOUT}.{key}": value})
    attached("temperature", 0.9)
