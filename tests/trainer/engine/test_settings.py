"""The table ``[verl]``: what is refused before anything starts, and what a critic needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.utils import need_critic
from verl.utils.config import omega_conf_to_dataclass

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl import settings
from ajet_trainer.backends.verl.settings import compose, shaping
from ajet_trainer.config import Config, load
from ajet_trainer.overlong import Shaping
from tests.kit.learner import verl_learner
from tests.kit.source import ROOT

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
GAE = {"algorithm.adv_estimator": "gae"}
"""The estimator of a critic."""
SEED = "actor_rollout_ref.rollout.seed"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
IS = f"{CORRECTION}.rollout_is"
BY_LENGTH = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
"""The mean that is divided by `loss_scale_factor`."""


def composed(
    verl: dict[str, Any], *, device: str = "cuda", folder: Path | None = None, apart: bool = False, **ours: Any
) -> Any:
    return compose(Config(**({"model": "m"} | ours), verl=verl), device, folder, apart=apart)


def refused(verl: dict[str, Any], **ours: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(verl, **ours)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_gpu_host_without_flash_attn_has_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's default would fail as the model is loaded."""
    there = False
    monkeypatch.setattr(settings, "is_flash_attn_2_available", lambda: there)
    assert composed({}).actor_rollout_ref.model.override_config == {"attn_implementation": "sdpa"}
    said = {"actor_rollout_ref.model.override_config.attn_implementation": "eager"}
    assert composed(said).actor_rollout_ref.model.override_config == {"attn_implementation": "eager"}
    there = True
    assert composed({}).actor_rollout_ref.model.override_config == {}


def test_weights_are_sent_in_the_engines_dtype_if_the_trainer_computes_in_it_too(tmp_path: Path) -> None:
    tree = composed({}, folder=tmp_path)
    sent = tree.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.ajet_folder
    for other in ("float16", "float32", None):
        settings.sent_in(tree, other)
        assert dict(sent) == {"folder": str(tmp_path)}, f"{other} would lose what the trainer computes with"
    settings.sent_in(tree, "bfloat16")
    assert dict(sent) == {"folder": str(tmp_path), "dtype": "bfloat16"}
    megatron = composed({"model_engine": "megatron"}, folder=tmp_path)
    settings.sent_in(megatron, "bfloat16")
    assert "dtype" not in megatron.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.ajet_folder


@pytest.mark.parametrize(("cores", "gpus", "units"), [(2, 1, 1), (8, 1, 4), (16, 1, 8), (16, 4, 3), (128, 8, 8)])
def test_storage_units_are_the_cores_that_verl_leaves(
    cores: int, gpus: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "get_num_cpus", lambda: cores)
    storage = composed({"trainer.n_gpus_per_node": gpus}).transfer_queue.backend.SimpleStorage
    assert storage.num_data_storage_units == units


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("actor_rollout_ref.rollout.n", 8, "group_size"),
        ("data.train_batch_size", 64, "groups"),
        ("trainer.default_local_dir", "/elsewhere", "run_dir"),
        ("trainer.max_critic_ckpt_to_keep", None, "trainer.max_actor_ckpt_to_keep"),
        ("trainer.resume_mode", "disable", "run_dir"),
        ("trainer.resume_from_path", "/elsewhere/global_step_3", "run_dir"),
        (f"{ACTOR}.checkpoint.async_save", True, "whole"),
        ("critic.checkpoint.async_save", True, "whole"),
        ("trainer.v1.trainer_mode", "sync", "engine_urls"),
        ("transfer_queue.enable", False, "TransferQueue"),
        ("algorithm.filter_groups.enable", True, "no_signal = 'drop'"),
        ("algorithm.use_pf_ppo", True, "advantages of others"),
        (f"{ACTOR}.use_dynamic_bsz", False, "rows differ in number and length"),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", False, "rows differ in number and length"),
    ],
)
def test_what_exactly_once_rests_on_is_not_to_be_changed(key: str, value: object, words: str) -> None:
    said = refused({key: value})
    assert said.startswith(f"{key} cannot be changed: ")
    assert words in said


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_a_runs_seed_is_that_of_all_that_the_trainer_draws(engine: str, alone: bool, tmp_path: Path) -> None:
    home, urls = "fsdp_config" if engine == "dp" else engine, ("http://e",) if alone else ()
    run = {"model_engine": engine, SEED: 7}

    def found(more: dict[str, Any]) -> list[int]:
        tree = composed(GAE | run | more, engine_urls=urls, folder=tmp_path if alone else None, total_steps=9)
        actor, critic = tree.actor_rollout_ref.actor, tree.critic
        own = critic["fsdp" if engine == "dp" else engine]
        return [actor[home].seed, own.seed, actor.data_loader_seed, critic.data_loader_seed]

    assert found({}) == [7] * 4
    assert found({f"{ACTOR}.{home}.seed": 8}) == [8, 7, 7, 7]


def test_a_seed_is_as_far_as_numpys_go() -> None:
    for key in (SEED, f"{ACTOR}.fsdp_config.seed", "critic.fsdp.seed"):
        assert refused(GAE | {key: 2**32}).startswith(f"{key} must be from 0 to 2^32 - 1")


def test_neither_a_plus_nor_a_table_is_a_way_around_it() -> None:
    assert refused({"+data.train_batch_size": 64}) == refused({"++data.train_batch_size": 64})
    assert refused({"+trainer.v1": {"trainer_mode": "sync"}}).startswith("trainer.v1.trainer_mode cannot be changed")
    assert refused({"trainer.v1": None}).startswith("trainer.v1.trainer_mode cannot be changed")


def test_verls_key_for_checkpoints_says_how_many_stay() -> None:
    """verl itself never keeps fewer than two, because it removes one before the next is whole."""
    for kept, verls in ((1, 2), (5, 5)):
        tree = composed({"trainer.max_actor_ckpt_to_keep": kept})
        assert (tree.trainer.max_actor_ckpt_to_keep, tree.trainer.max_critic_ckpt_to_keep) == (verls, verls)
    assert "by this very name" in refused({"+trainer.max_actor_ckpt_to_keep": 1})


@pytest.mark.parametrize(("sampling", "max_staleness"), [("correct", None), ("exact", 0), ("strict", 1)])
def test_what_may_be_off_policy_is_corrected_by_token(sampling: str, max_staleness: int | None) -> None:
    """That is every batch: after a crash, tokens of weights that are gone may be trained whatever is asked for."""
    ours = {"sampling": sampling, "max_staleness": max_staleness}
    assert composed({}, **ours).algorithm.rollout_correction.rollout_is == "token"
    for own in ("sequence", "token"):
        assert composed({IS: own}, **ours).algorithm.rollout_correction.rollout_is == own
    bypass = composed({f"{CORRECTION}.bypass_mode": True}, **ours).algorithm.rollout_correction
    assert bypass.rollout_is is None, "the loss compares with the engine by itself"


def test_correct_needs_a_correction() -> None:
    said = f"{IS} = null leaves nothing to correct with: set sampling in [trainer] to exact or strict"
    assert refused({IS: None}) == refused({CORRECTION: None}) == said
    for sampling in ("exact", "strict"):
        composed({IS: None}, sampling=sampling)


@pytest.mark.parametrize("loss", ["gpg", "dro", "cispo", "gspo", "geo_mean"])
def test_a_loss_that_cannot_correct_single_tokens_is_not_left_to_do_so(loss: str) -> None:
    bypass = {f"{CORRECTION}.bypass_mode": True, LOSS: loss, f"{ACTOR}.policy_loss.dro_beta": 0.1}
    bypass = bypass if loss == "dro" else {key: bypass[key] for key in (f"{CORRECTION}.bypass_mode", LOSS)}
    assert refused(bypass).startswith(f"{LOSS} = {loss!r} does not correct single tokens in {CORRECTION}.bypass_mode")
    composed(bypass, sampling="exact")


def test_a_loss_that_weighs_rows_takes_no_weights_of_tokens() -> None:
    mean = {LOSS: "geo_mean"}
    for sampling in ("correct", "exact"):
        assert refused(mean, sampling=sampling).startswith(f"{LOSS} = 'geo_mean' weighs rows, not tokens: ")
    composed(mean | {IS: None}, sampling="exact")


@pytest.mark.parametrize("loss", ["vanilla", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"])
def test_other_losses_correct_by_themselves(loss: str) -> None:
    composed({f"{CORRECTION}.bypass_mode": True, LOSS: loss})


def test_one_limit_of_the_ratio_is_both() -> None:
    """verl reads its limits of either side, which have defaults of their own."""
    actor = composed({f"{ACTOR}.clip_ratio": 0.3}).actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.3, 0.3)
    higher = composed({f"{ACTOR}.clip_ratio": 0.3, f"{ACTOR}.clip_ratio_high": 0.4}).actor_rollout_ref.actor
    assert (higher.clip_ratio_low, higher.clip_ratio_high) == (0.3, 0.4)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({f"{ACTOR}.fsdp_config.forward_only": True}, "would train nothing"),
        ({f"{ACTOR}.ppo_epochs": 0}, "must be at least 1, not 0"),
        ({"actor_rollout_ref.rollout.name": "sglang"}, "cannot be changed: agents are answered by vLLM"),
        ({"actor_rollout_ref.rollout.mode": "sync"}, "cannot be changed"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "must divide the number of processes"),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}, "must divide the number of processes"),
        ({"actor_rollout_ref.model.use_liger": True}, "needs the package liger-kernel"),
        ({"actor_rollout_ref.rollout.temperature": 0}, "must be above 0, not 0"),
        ({"actor_rollout_ref.rollout.temperature": -1.0}, "must be above 0, not -1.0"),
        ({"actor_rollout_ref.rollout.temperature": float("nan")}, "must be above 0, not nan"),
    ],
)
def test_what_would_fail_once_ray_runs_is_refused_before(values: dict[str, Any], said: str) -> None:
    (key,) = values
    assert refused(values).startswith(f"{key} ")
    assert said in refused(values)


def test_sequences_are_shared_by_processes_that_there_are() -> None:
    shared = {f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    composed(shared | {"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2})
    assert refused(shared | {"trainer.n_gpus_per_node": 3})


@pytest.mark.parametrize("word", ["False", "no", "0"])
def test_a_word_is_no_truth_value(word: str) -> None:
    """Any word would be true."""
    key = f"{ACTOR}.use_kl_loss"
    assert refused({key: word}) == f"{key} must be true or false, not {word!r}"
    assert composed({key: "${critic.enable}", "critic.enable": False}).actor_rollout_ref.actor.use_kl_loss is False


@pytest.mark.parametrize(("key", "kind"), [
    (f"{ACTOR}.clip_ratio", "a number"), (f"{ACTOR}.optim.lr_warmup_steps", "a number"),
    (f"{ACTOR}.policy_loss", "a table of keys"), ("algorithm.rollout_correction", "a table of keys"),
])  # fmt: skip
def test_a_word_is_no_number_and_no_table(key: str, kind: str) -> None:
    """verl would reckon with it at a step."""
    assert refused({key: "0.2"}) == f"{key} must be {kind}, not '0.2'"


@pytest.mark.parametrize("size", [0, -1, 3, 5, 2.0, None])
def test_the_updates_of_a_step_have_equally_many_groups(size: object) -> None:
    said = refused({f"{ACTOR}.ppo_mini_batch_size": size}, groups=4)
    name = f"{ACTOR}.ppo_mini_batch_size"
    assert said == f"{name} makes groups / ppo_mini_batch_size updates of a step: a divisor of 4, not {size!r}"
    for fine in (1, 2, 4):
        assert composed({f"{ACTOR}.ppo_mini_batch_size": fine}, groups=4).critic.ppo_mini_batch_size == fine


def test_the_critics_updates_are_the_actors() -> None:
    mine = GAE | {"critic.ppo_mini_batch_size": 2}
    assert refused(mine, groups=4) == f"critic.ppo_mini_batch_size follows the actor's: set {ACTOR}.ppo_mini_batch_size"
    assert composed(mine | {f"{ACTOR}.ppo_mini_batch_size": 2}, groups=4)


@pytest.mark.parametrize(("values", "key", "words"), [
    ({"trainer.critic_warmup": 3}, "trainer.critic_warmup", "would train nothing for so long"),
    ({"trainer.critic_warmup": 1}, "trainer.critic_warmup", "there is none"),
    (GAE | {"trainer.critic_warmup": 11}, "trainer.critic_warmup", "leaves no step that trains the model"),
    (GAE | {"trainer.critic_warmup": 2.5}, "trainer.critic_warmup", "must be a number of steps"),
    (GAE | {"trainer.critic_warmup": -1}, "trainer.critic_warmup", "must be a number of steps"),
    ({f"{ACTOR}.optim.lr": -1e-6}, f"{ACTOR}.optim.lr", "at least 0"),
    ({f"{ACTOR}.optim.lr": float("nan")}, f"{ACTOR}.optim.lr", "at least 0"),
    ({f"{ACTOR}.optim.lr": "1e-6 "}, f"{ACTOR}.optim.lr", "must be a number"),
    ({f"{ACTOR}.optim.clip_grad": 0}, f"{ACTOR}.optim.clip_grad", "above 0, not 0"),
    ({f"{ACTOR}.optim.clip_grad": None}, f"{ACTOR}.optim.clip_grad", "above 0, not None"),
    (GAE | {"critic.optim.clip_grad": 0.0}, "critic.optim.clip_grad", "above 0, not 0.0"),
    ({f"{ACTOR}.optim.override_optimizer_config": {"lr": 0.0}}, f"{ACTOR}.optim.override_optimizer_config.lr", "set"),
    ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.05}, f"{ACTOR}.optim.lr_warmup_steps_ratio", "less than one of 10"),
    ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 5}, f"{ACTOR}.optim.lr_warmup_steps_ratio", "from 0 to 1"),
    ({f"{ACTOR}.loss_scale_factor": 0} | BY_LENGTH, f"{ACTOR}.loss_scale_factor", "divided by it"),
    ({f"{ACTOR}.loss_scale_factor": -4} | BY_LENGTH, f"{ACTOR}.loss_scale_factor", "divided by it"),
    ({"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 0},
     "actor_rollout_ref.model.lora_alpha", "multiplied by it"),
    ({"model_engine": "megatron", f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler": False},
     f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler", "begins anew on a resume"),
    ({"model_engine": "megatron", f"{ACTOR}.optim.lr_warmup_steps": 5}, f"{ACTOR}.optim.lr_warmup_init", "above 0"),
    ({"model_engine": "veomni", f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.5}, f"{ACTOR}.optim.lr_start", "above 0"),
])  # fmt: skip
def test_keys_that_leave_updates_out_are_refused(values: dict[str, Any], key: str, words: str) -> None:
    said = refused(values, total_steps=10)
    assert said.startswith(f"{key} ") and words in said


@pytest.mark.parametrize("values", [
    {}, GAE | {"trainer.critic_warmup": 3}, {"critic.enable": True, "trainer.critic_warmup": 1},
    {"trainer.critic_warmup": 0},
    {f"{ACTOR}.optim.lr": 0.0}, {f"{ACTOR}.optim.lr": 0}, {f"{ACTOR}.optim.clip_grad": 1e9},
    {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}, {f"{ACTOR}.optim.lr_warmup_steps": 10},
    {f"{ACTOR}.optim.override_optimizer_config": {"eps": 1e-6}}, {"actor_rollout_ref.model.lora_rank": 8},
    {"model_engine": "megatron", f"{ACTOR}.optim.lr_warmup_steps": 5, f"{ACTOR}.optim.lr_warmup_init": 1e-8},
    {"model_engine": "megatron", "actor_rollout_ref.model.lora.rank": 8}, {"model_engine": "torchtitan"},
])  # fmt: skip
def test_keys_that_leave_none_out_are_taken(values: dict[str, Any]) -> None:
    """A critic may be warmed up, and a rate of 0 is a control."""
    composed(values, total_steps=10)


@pytest.mark.parametrize("key", [f"{ACTOR}.checkpoint.save_contents", "critic.checkpoint.load_contents"])
def test_a_checkpoint_holds_all_that_a_run_goes_on_from(key: str) -> None:
    assert refused(GAE | {key: ["hf_model"]}).startswith(f"{key} lacks model, optimizer, extra: ")
    assert refused(GAE | {key: ["model", "extra"]}).startswith(f"{key} lacks optimizer: ")
    assert refused(GAE | {key: None}).startswith(f"{key} lacks model, optimizer, extra: ")
    assert composed(GAE | {key: ["model", "optimizer", "extra", "hf_model"]})


@pytest.mark.parametrize("optim", [f"{ACTOR}.optim", "critic.optim"])
def test_a_schedule_by_the_number_of_steps_needs_one(optim: str) -> None:
    ratio = GAE | {f"{optim}.lr_warmup_steps_ratio": 0.05}
    said = refused(ratio)
    assert said.startswith(f"{optim}.lr_warmup_steps_ratio is a share of all steps: set total_steps in [trainer], or ")
    composed(ratio | {f"{optim}.lr_warmup_steps": 20})
    composed(ratio, total_steps=100)
    for key in ("lr_scheduler_type", "warmup_style"):
        cosine = GAE | {f"{optim}.{key}": "cosine"}
        assert refused(cosine | {f"{optim}.lr_warmup_steps": 20}).startswith(f"{optim}.{key} = 'cosine' depends on")
        composed(cosine, total_steps=100)


def test_megatrons_schedule_goes_on_after_a_resume() -> None:
    tree = composed({"model_engine": "megatron"}, total_steps=10)
    assert tree.actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler
    assert tree.critic.optim.use_checkpoint_opt_param_scheduler


def test_megatrons_schedule_may_have_an_end_of_its_own() -> None:
    linear = {"model_engine": "megatron", f"{ACTOR}.optim.lr_decay_style": "linear"}
    assert refused(linear).startswith(f"{ACTOR}.optim.lr_decay_style = 'linear' depends on")
    composed(linear | {f"{ACTOR}.optim.lr_decay_steps": 500})
    composed(linear | {f"{ACTOR}.optim.lr_decay_style": "inverse-square-root"})


def longest(verl: dict[str, Any], **ours: Any) -> int:
    """The longest sample that the learner says its engines can compute."""
    tree = composed(verl, **ours)
    found: int = verl_learner(tree, use_critic=need_critic(tree)).rule.max_tokens
    return found


def test_the_longest_sample_fits_actor_and_critic() -> None:
    assert longest({}, max_tokens=50_000) == longest(GAE, max_tokens=50_000) == 50_000
    assert longest({}, max_tokens=900) == 16384
    assert longest(GAE | {"critic.ppo_max_token_len_per_gpu": 300}, max_tokens=900) == 300
    assert longest({"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 300}, max_tokens=900) == 300
    reference = {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 200}
    assert longest(reference, max_tokens=900) == 200


@pytest.mark.parametrize(("max_tokens", "limit"), [(2000, 32768), (50_000, 50_000)])
def test_a_critic_is_of_the_trained_model(max_tokens: int, limit: int, tiny: Path) -> None:
    """As verl's trainer reads it: of all limits it takes ``ppo_infer_max_token_len_per_gpu``, for training too."""
    tree = composed({"algorithm.adv_estimator": "gae"}, model=str(tiny), max_tokens=max_tokens)
    critic = omega_conf_to_dataclass(tree.critic)
    assert need_critic(tree)
    assert critic.model.hf_config.architectures == ["Qwen2ForCausalLM"]
    assert (critic.model.path, critic.ppo_infer_max_token_len_per_gpu) == (str(tiny), limit)


def test_the_recipe_of_dapo_can_be_run(tmp_path: Path) -> None:
    """As it stands in the guide, and every key of it does what the guide says."""
    guide = (ROOT / "docs/guide/learning.md").read_text()
    recipe = guide.partition("\n## DAPO\n")[2].partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "run.toml"
    path.write_text(recipe)
    config = load(str(path), ["model=m"])
    tree = compose(config, "cuda", None)
    actor = tree.actor_rollout_ref.actor
    assert (config.no_signal, config.overlong, shaping(tree)) == ("drop", "mask", Shaping(2048, 512, 1.0))
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
