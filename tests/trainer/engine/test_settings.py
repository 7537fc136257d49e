"""What may stand in ``[verl]``: what is refused before anything starts, and what a critic needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config
from tests.kit.source import ROOT

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
IS = f"{CORRECTION}.rollout_is"


def composed(verl: dict[str, Any], *, device: str = "cuda", **ours: Any) -> Any:
    from ajet_trainer.verl_backend.settings import compose

    return compose(Config(**({"model": "m"} | ours), verl=verl), device, None)


def refused(verl: dict[str, Any], **ours: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(verl, **ours)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    ],
)
def test_what_exactly_once_rests_on_is_not_to_be_changed(key: str, value: object, words: str, verl_here: None) -> None:
    said = refused({key: value})
    assert said.startswith(f"{key} cannot be changed: ")
    assert words in said


def test_neither_a_plus_nor_a_table_is_a_way_around_it(verl_here: None) -> None:
    assert refused({"+data.train_batch_size": 64}) == refused({"++data.train_batch_size": 64})
    assert refused({"+trainer.v1": {"trainer_mode": "sync"}}).startswith("trainer.v1.trainer_mode cannot be changed")
    assert refused({"trainer.v1": None}).startswith("trainer.v1.trainer_mode cannot be changed")


def test_verls_key_for_checkpoints_says_how_many_stay(verl_here: None) -> None:
    """verl itself never keeps fewer than two, because it removes one before the next is whole."""
    for kept, verls in ((1, 2), (5, 5)):
        tree = composed({"trainer.max_actor_ckpt_to_keep": kept})
        assert (tree.trainer.max_actor_ckpt_to_keep, tree.trainer.max_critic_ckpt_to_keep) == (verls, verls)
    assert "by this very name" in refused({"+trainer.max_actor_ckpt_to_keep": 1})


@pytest.mark.parametrize(
    ("sampling", "max_staleness", "on"),
    [
        ("correct", None, True), ("correct", 0, True), ("exact", None, True), ("strict", 1, True), ("exact", 0, False),
        ("strict", 0, False),
    ],
)  # fmt: skip
def test_what_may_be_off_policy_is_corrected_by_token(
    sampling: str, max_staleness: int | None, on: bool, verl_here: None
) -> None:
    ours = {"sampling": sampling, "max_staleness": max_staleness}
    assert composed({}, **ours).algorithm.rollout_correction.rollout_is == ("token" if on else None)
    for own in ("sequence", "token"):
        assert composed({IS: own}, **ours).algorithm.rollout_correction.rollout_is == own
    bypass = composed({f"{CORRECTION}.bypass_mode": True}, **ours).algorithm.rollout_correction
    assert bypass.rollout_is is None, "the loss compares with the engine by itself"


def test_correct_needs_a_correction(verl_here: None) -> None:
    said = f"{IS} = None leaves nothing to correct with: set sampling in [trainer] to exact or strict"
    assert refused({IS: None}) == refused({CORRECTION: None}) == said
    for sampling in ("exact", "strict"):
        composed({IS: None}, sampling=sampling)
    gpg = {f"{CORRECTION}.bypass_mode": True, "actor_rollout_ref.actor.policy_loss.loss_mode": "gpg"}
    assert refused(gpg) == said, "a loss without a ratio"


@pytest.mark.parametrize("size", [0, -1, 5, 2.0, "2", None])
def test_a_step_has_one_update_at_least_and_as_many_as_groups_at_most(size: object, verl_here: None) -> None:
    said = refused({f"{ACTOR}.ppo_mini_batch_size": size}, groups=4)
    name = f"{ACTOR}.ppo_mini_batch_size"
    assert said == f"{name} makes groups / ppo_mini_batch_size updates of a step: from 1 to 4, not {size!r}"
    for fine in (1, 4):
        assert composed({f"{ACTOR}.ppo_mini_batch_size": fine}, groups=4).critic.ppo_mini_batch_size == fine


def test_the_critics_updates_are_the_actors(verl_here: None) -> None:
    said = refused({"critic.ppo_mini_batch_size": 2}, groups=4)
    assert said == f"critic.ppo_mini_batch_size follows the actor's: set {ACTOR}.ppo_mini_batch_size"
    assert composed({"critic.ppo_mini_batch_size": 2, f"{ACTOR}.ppo_mini_batch_size": 2}, groups=4)


@pytest.mark.parametrize("key", [f"{ACTOR}.checkpoint.save_contents", "critic.checkpoint.load_contents"])
def test_a_checkpoint_holds_all_that_a_run_goes_on_from(key: str, verl_here: None) -> None:
    assert refused({key: ["hf_model"]}).startswith(f"{key} lacks model, optimizer, extra: ")
    assert refused({key: ["model", "extra"]}).startswith(f"{key} lacks optimizer: ")
    assert refused({key: None}).startswith(f"{key} lacks model, optimizer, extra: ")
    assert composed({key: ["model", "optimizer", "extra", "hf_model"]})


@pytest.mark.parametrize("optim", [f"{ACTOR}.optim", "critic.optim"])
def test_a_schedule_by_the_number_of_steps_needs_one(optim: str, verl_here: None) -> None:
    ratio = {f"{optim}.lr_warmup_steps_ratio": 0.05}
    said = refused(ratio)
    assert said.startswith(f"{optim}.lr_warmup_steps_ratio is a share of all steps: set total_steps in [trainer], or ")
    composed(ratio | {f"{optim}.lr_warmup_steps": 20})
    composed(ratio, total_steps=100)
    for key in ("lr_scheduler_type", "warmup_style"):
        cosine = {f"{optim}.{key}": "cosine"}
        assert refused(cosine | {f"{optim}.lr_warmup_steps": 20}).startswith(f"{optim}.{key} = 'cosine' depends on")
        composed(cosine, total_steps=100)


def test_megatrons_schedule_may_have_an_end_of_its_own(verl_here: None) -> None:
    linear = {"model_engine": "megatron", f"{ACTOR}.optim.lr_decay_style": "linear"}
    assert refused(linear).startswith(f"{ACTOR}.optim.lr_decay_style = 'linear' depends on")
    composed(linear | {f"{ACTOR}.optim.lr_decay_steps": 500})
    composed(linear | {f"{ACTOR}.optim.lr_decay_style": "inverse-square-root"})


def longest(verl: dict[str, Any], **ours: Any) -> int:
    """What the trainer takes for the longest sample that its engines can compute."""
    from verl.trainer.ppo.utils import need_critic

    from ajet_trainer.verl_backend.trainer import AjetTrainer

    made = AjetTrainer.__new__(AjetTrainer)
    made.config = composed(verl, **ours)
    made.use_critic = need_critic(made.config)
    return made.max_tokens


def test_the_longest_sample_fits_actor_and_critic(verl_here: None) -> None:
    gae, smaller = {"algorithm.adv_estimator": "gae"}, {"critic.ppo_max_token_len_per_gpu": 300}
    assert longest({}, max_tokens=50_000) == longest(gae, max_tokens=50_000) == 50_000
    assert longest({}, max_tokens=900) == longest(smaller, max_tokens=900) == 16384
    assert longest(gae | smaller, max_tokens=900) == 300


@pytest.mark.parametrize(("max_tokens", "limit"), [(2000, 32768), (50_000, 50_000)])
def test_a_critic_is_of_the_trained_model(max_tokens: int, limit: int, tiny: Path, verl_here: None) -> None:
    """As verl's trainer reads it: of all limits it takes ``ppo_infer_max_token_len_per_gpu``, for training too."""
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import omega_conf_to_dataclass

    tree = composed({"algorithm.adv_estimator": "gae"}, model=str(tiny), max_tokens=max_tokens)
    critic = omega_conf_to_dataclass(tree.critic)
    assert need_critic(tree)
    assert critic.model.hf_config.architectures == ["Qwen2ForCausalLM"]
    assert (critic.model.path, critic.ppo_infer_max_token_len_per_gpu) == (str(tiny), limit)


def test_the_recipe_of_dapo_can_be_run(tmp_path: Path, verl_here: None) -> None:
    """As it stands in the guide, and every key of it does what the guide says."""
    from ajet_trainer.config import load
    from ajet_trainer.overlong import Shaping
    from ajet_trainer.verl_backend.settings import compose, shaping

    guide = (ROOT / "docs/guide/trainer.md").read_text()
    recipe = guide.partition("\n### DAPO\n")[2].partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "run.toml"
    path.write_text(recipe)
    config = load(str(path), ["model=m"])
    tree = compose(config, "cuda", None)
    actor = tree.actor_rollout_ref.actor
    assert (config.no_signal, config.overlong, shaping(tree)) == ("drop", "mask", Shaping(2048, 512, 1.0))
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
