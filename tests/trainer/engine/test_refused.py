"""Each estimator, loss and mean of verl either runs a step here or is refused by name before anything starts.

The tests walk verl's own registries: what a new verl registers is tried without being named here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl.estimators import BY_CALL, GROUPED
from ajet_trainer.backends.verl.refused import MEANS
from ajet_trainer.backends.verl.settings import shaping
from ajet_trainer.overlong import Shaping
from tests.kit.learner import training_worker
from tests.kit.source import ROOT
from tests.trainer.engine.test_estimators import group, padding
from tests.trainer.engine.test_settings import ACTOR, IS, composed, refused
from tests.trainer.engine.whole_step import LIMIT, Steps

ESTIMATOR, LOSS, MEAN = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
REFUSED = {"gdpo", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}
NEEDED: dict[str, dict[str, Any]] = {"dro": {f"{ACTOR}.policy_loss.dro_beta": 0.1}, "geo_mean": {IS: None}}
"""Keys without which a choice does not run."""

Step = Callable[..., float]


@pytest.fixture
def step(tiny: Path, worker: Any) -> Step:
    return stepping(tiny, worker)


def stepping(tiny: Path, worker: Any) -> Step:
    """One step on split episodes and two rows of padding, of which one is alone in its micro-batch: rows to advantages
    through `AjetTrainer`, these to a gradient through verl's loss and engine. Gives the gradient's size."""
    rows = [*group(True), padding(0), padding(1)]

    def run(estimator: str = "rloo", **choice: str) -> float:
        return float(np.linalg.norm(Steps(tiny, worker, estimator).gradient(rows, **choice)))

    return run


def sorted_out(key: str, names: list[str], run: Callable[[str], float]) -> set[str]:
    """Those of `names` that `key` may not have. All others have run a step that teaches something."""
    out = {}
    for name in names:
        try:
            composed({key: name} | NEEDED.get(name, {}), sampling="exact")
        except ConfigError as error:
            out[name] = str(error)
        else:
            size = run(name)
            assert math.isfinite(size) and size > 0, name
    assert all(said.startswith(f"{key} = {name!r} ends a run at a step: ") for name, said in out.items())
    return set(out)


def test_every_estimator_runs_a_step_or_is_refused_by_name(step: Step) -> None:
    assert sorted_out(ESTIMATOR, [*ADV_ESTIMATOR_REGISTRY], lambda name: step(estimator=name)) == REFUSED


def test_every_loss_runs_a_step_or_is_refused_by_name(step: Step) -> None:
    assert sorted_out(LOSS, [*POLICY_LOSS_REGISTRY], lambda name: step(loss=name)) == {"bypass_mode"}


def test_every_mean_runs_a_step(step: Step) -> None:
    assert sorted_out(MEAN, [*MEANS], lambda name: step(mean=name)) == set()


@pytest.mark.parametrize("what", [*({"estimator": name} for name in sorted(REFUSED)), {"loss": "bypass_mode"}])
def test_what_is_refused_does_end_a_step(what: dict[str, str], monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Otherwise it need not be refused any more. Of a worker of its own, which stays in the middle of that step."""
    for table in ("ESTIMATORS", "LOSSES"):
        monkeypatch.setattr(f"ajet_trainer.backends.verl.refused.{table}", {})
    run = stepping(tiny, training_worker(tiny))
    with pytest.raises((AssertionError, TypeError, ValueError)):
        run(**what)


def test_every_estimator_has_been_sorted() -> None:
    """With a baseline over the episodes of a group, without one, or refused: `AjetTrainer` must know which."""
    assert set(ADV_ESTIMATOR_REGISTRY) == {*GROUPED} | {"gae", "reinforce_plus_plus", *BY_CALL} | REFUSED


def test_the_documentation_names_them_all() -> None:
    page = (ROOT / "docs/guide/learning.md").read_text()
    names = {*core_algos.ADV_ESTIMATOR_REGISTRY, *core_algos.POLICY_LOSS_REGISTRY, *MEANS}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        (ESTIMATOR, "gdpo", "use grpo"),
        (ESTIMATOR, "remax", "use rloo"),
        (ESTIMATOR, "optimal_token_baseline", "use rloo"),
        (ESTIMATOR, "tir_optimal_token_baseline", "use rloo"),
        (LOSS, "bypass_mode", "use vanilla"),
    ],
)
def test_a_refusal_says_what_to_use_instead(key: str, name: str, words: str) -> None:
    assert words in refused({key: name})
    assert refused({f"+{key}": name}) == refused({key: name})


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [(ESTIMATOR, "grop", "grpo"), (LOSS, "clip-cov", "clip_cov"), (MEAN, "token_mean", "token-mean")],
)
def test_a_name_that_verl_does_not_know_is_no_choice(key: str, name: str, near: str) -> None:
    assert refused({key: name}) == f"{key} = {name!r} is not in verl; did you mean {near!r}?"
    assert refused({key: None}) == f"{key} = None is not in verl"


def test_what_a_library_of_the_users_registers_is_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"):
        monkeypatch.setattr(core_algos, registry, dict(getattr(core_algos, registry)))
    (tmp_path / "of_the_users.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss\n"
        "register_adv_est('my_estimator')(print)\nregister_policy_loss('my_loss')(print)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "is not in verl" in refused({LOSS: "my_loss"})
    library = {"actor_rollout_ref.model.external_lib": "of_the_users"}
    composed(library | {ESTIMATOR: "my_estimator", LOSS: "my_loss"})


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_needs_its_penalty(beta: float | None) -> None:
    said = refused({LOSS: "dro", f"{ACTOR}.policy_loss.dro_beta": beta})
    assert said == f"{LOSS} = 'dro' needs a positive {ACTOR}.policy_loss.dro_beta"


@pytest.mark.parametrize("name", [*GROUPED, "ajet_turn"])
def test_what_compares_needs_a_second(name: str) -> None:
    said = f"= 1 leaves an episode alone, and {ESTIMATOR} = {name!r} compares: set it to 2 or more"
    said += ", or the estimator to ajet_running"
    assert refused({ESTIMATOR: name}, group_size=1, min_group_size=0) == f"group_size {said}"
    assert refused({ESTIMATOR: name}, group_size=2, min_group_size=1) == f"min_group_size {said}"
    composed({ESTIMATOR: name}, group_size=2)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "ajet_running"])
def test_what_compares_no_group_takes_one_alone(name: str) -> None:
    composed({ESTIMATOR: name}, group_size=1, min_group_size=1)


@pytest.mark.parametrize("name", BY_CALL)
def test_no_kl_is_in_the_rewards_of_calls(name: str) -> None:
    said = refused({ESTIMATOR: name, "algorithm.use_kl_in_reward": True})
    assert said.startswith("algorithm.use_kl_in_reward has no part in") and said.endswith(f"set {ACTOR}.use_kl_loss")
    composed({ESTIMATOR: name, f"{ACTOR}.use_kl_loss": True})


@pytest.mark.parametrize("name", BY_CALL)
def test_a_loss_with_one_advantage_a_row_does_not_go_with_credit_by_turn(name: str, tiny: Path, worker: Any) -> None:
    """It does see how episodes split, else it need not be refused."""
    said = refused({ESTIMATOR: name, LOSS: "geo_mean", IS: None}, sampling="exact")
    assert said.startswith(f"{LOSS} = 'geo_mean' does not go with {name}: ") and said.endswith("use vanilla")
    steps = Steps(tiny, worker, name)
    assert steps.seen(loss="geo_mean", at_rest=True) > 0.1 > LIMIT > steps.seen(loss="vanilla")


def test_a_discount_of_turns_is_for_credit_by_turn() -> None:
    said = "turn_gamma = 0.5 is read by algorithm.adv_estimator = ajet_turn and ajet_running alone"
    assert refused({}, turn_gamma=0.5) == said
    for name in BY_CALL:
        composed({ESTIMATOR: name}, turn_gamma=0.5)


LENGTH = "reward.reward_kwargs"
SHAPING: dict[str, Any] = {
    f"{LENGTH}.max_resp_len": 100, f"{LENGTH}.overlong_buffer_cfg.enable": True,
    f"{LENGTH}.overlong_buffer_cfg.len": 20, f"{LENGTH}.overlong_buffer_cfg.penalty_factor": 1.0,
}  # fmt: skip


def test_a_punishment_of_length_is_verl_s_by_its_own_keys() -> None:
    assert shaping(composed(SHAPING)) == Shaping(100, 20, 1.0)
    assert shaping(composed({f"+{key}": value for key, value in SHAPING.items()})) == Shaping(100, 20, 1.0)
    assert shaping(composed({})) is shaping(composed(SHAPING | {f"{LENGTH}.overlong_buffer_cfg.enable": False})) is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_resp_len", None, "must be the tokens of the longest answer, not None"),
        ("max_resp_len", 0, "must be the tokens of the longest answer, not 0"),
        ("overlong_buffer_cfg.len", 101, "must be from 1 to max_resp_len, 100, not 101"),
        ("overlong_buffer_cfg.len", 0, "must be from 1 to max_resp_len, 100, not 0"),
        ("overlong_buffer_cfg.penalty_factor", -1.0, "must be a number from 0, not -1.0"),
        ("overlong_buffer_cfg.penalty_factor", float("inf"), "must be a number from 0, not inf"),
        ("overlong_buffer_cfg.enable", "yes", "must be true or false, not 'yes'"),
        ("overlong_buffer_cfg.enable", None, "must be true or false, not None"),
    ],
)
def test_a_punishment_of_length_that_cannot_be_computed_is_refused(key: str, value: Any, words: str) -> None:
    assert refused(SHAPING | {f"{LENGTH}.{key}": value}) == f"{LENGTH}.{key} {words}"


def test_other_keys_of_verl_s_rewards_are_read_by_nothing() -> None:
    for key in ("overlong_buffer_cfg.log", "score"):
        assert refused({f"{LENGTH}.{key}": True}).startswith(f"{LENGTH}.{key} is read by nothing here: ")


def test_gae_needs_a_critic() -> None:
    said = refused({ESTIMATOR: "gae", "critic.enable": False})
    assert said == f"{ESTIMATOR} = 'gae' needs a critic: leave critic.enable unset"
    composed({ESTIMATOR: "gae", "critic.enable": True})
    composed({ESTIMATOR: "rloo", "critic.enable": False})


@pytest.mark.parametrize(
    ("key", "switch"),
    [(f"{ACTOR}.kl_loss_type", f"{ACTOR}.use_kl_loss"), ("algorithm.kl_penalty", "algorithm.use_kl_in_reward")],
)
def test_a_kl_that_verl_cannot_compute_is_refused(key: str, switch: str) -> None:
    for name in ("full", "k4"):
        assert refused({switch: True, key: name}) == f"{key} = {name!r} is not computed by verl: use low_var_kl"
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+"):
        composed({switch: True, key: name})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rollout_is": "tokens"}, "Invalid rollout_is: tokens."),
        ({"rollout_is": "token", "rollout_is_threshold": -2.0}, "must be positive"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold must be"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": 2.0}, "token_k9"),
    ],
)
def test_a_correction_that_verl_cannot_compute_is_refused(values: dict[str, Any], words: str) -> None:
    correction = "algorithm.rollout_correction"
    said = refused({f"{correction}.{name}": value for name, value in values.items()})
    assert said.startswith(f"{correction} cannot be computed: ")
    assert words in said


def test_corrections_that_verl_computes_are_taken() -> None:
    correction = "algorithm.rollout_correction"
    for level in ("token", "sequence"):
        composed({f"{correction}.rollout_is": level, f"{correction}.rollout_is_threshold": "0.5_5.0"})
    composed({f"{correction}.rollout_rs": "seq_mean_k1", f"{correction}.rollout_rs_threshold": "0.5_2.0"})
