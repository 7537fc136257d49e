"""An estimator and a loss of the user's own, by their path: what they do in a step, and what is refused before one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig

from ajet_trainer.batch import Row
from tests.kit import learner
from tests.kit.source import ROOT
from tests.trainer.engine.test_estimators import a_trainer, advantages, group, passed
from tests.trainer.engine.test_gradient import close, gradient, step_data
from tests.trainer.engine.test_refused import ESTIMATOR, LOSS
from tests.trainer.engine.test_settings import composed, refused
from tests.trainer.engine.whole_step import LIMIT

FILE, MODULE = ROOT / "tests/trainer/engine/own_functions.py", "tests.trainer.engine.own_functions"


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """verl's registries as they were, after each test."""
    for registry in ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"):
        monkeypatch.setattr(core_algos, registry, dict(getattr(core_algos, registry)))
    yield
    for name in [name for name in sys.modules if name.startswith("ajet_own_")]:
        del sys.modules[name]


@pytest.mark.parametrize("place", [str(FILE), MODULE])
def test_an_estimator_by_its_path_is_used(place: str, tiny: Path) -> None:
    """It sees each row by itself."""
    rows = group(True)
    found = advantages(tiny, rows, adv_estimator=f"{place}:doubled")
    for row in rows:
        assert found[row.key] == pytest.approx(list(2 * row.reward * row.mask), rel=1e-6)


@pytest.mark.parametrize("place", [str(FILE), MODULE])
def test_a_loss_by_its_path_is_used(place: str, worker: Any) -> None:
    """The worker imports it by the words of the configuration alone."""
    rows = group(False)[:3]
    data = step_data(rows, [1.3, -0.4, -0.9])
    mine = PolicyLossConfig(loss_mode=f"{place}:unclipped")
    own = gradient(worker, data, loss_agg_mode="token-mean", policy_loss=mine)
    wide = PolicyLossConfig(loss_mode="vanilla")
    unclipped = gradient(worker, data, loss_agg_mode="token-mean", policy_loss=wide, clip_ratio_low=0.99,
                         clip_ratio_high=1e6, clip_ratio_c=1e6)  # fmt: skip
    clipped = gradient(worker, data, loss_agg_mode="token-mean", policy_loss=wide, clip_ratio_high=1e-4,
                       clip_ratio_low=1e-4)  # fmt: skip
    assert close(unclipped, own) < LIMIT < 1e-3 < close(clipped, own)


def test_a_file_is_known_by_its_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever folder a worker is in."""
    (tmp_path / "mine.py").write_text(FILE.read_text())
    monkeypatch.chdir(tmp_path)
    tree = composed({ESTIMATOR: "mine.py:doubled", LOSS: "./mine.py:unclipped"})
    assert tree.algorithm.adv_estimator == f"{tmp_path}/mine.py:doubled"
    assert tree.actor_rollout_ref.actor.policy_loss.loss_mode == f"{tmp_path}/mine.py:unclipped"
    assert composed({ESTIMATOR: "mine.py:doubled"}).algorithm.adv_estimator == f"{tmp_path}/mine.py:doubled"


@pytest.mark.parametrize("key", [ESTIMATOR, LOSS])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError: "),
        (f"{MODULE}:none", f"{MODULE} has no function 'none'"),
        (f"{MODULE}:NOTHING", f"{MODULE} has no function 'NOTHING'"),
        (":f", " cannot be imported: ValueError: Empty module name"),
        (f"{MODULE}:narrow", "narrow cannot be called as verl does, with "),
    ],
)
def test_what_cannot_be_used_is_refused_by_the_name_of_its_key(key: str, name: str, words: str) -> None:
    assert refused({key: name}).startswith(f"{key}: {words}")


def test_one_kind_of_function_is_not_the_other() -> None:
    assert "got an unexpected keyword argument 'old_log_prob'" in refused({LOSS: f"{MODULE}:doubled"}) or (
        "missing a required argument" in refused({LOSS: f"{MODULE}:doubled"})
    )
    assert "cannot be called as verl does, with token_level_rewards, response_mask, config, index" in refused(
        {ESTIMATOR: f"{MODULE}:unclipped"}
    )


def test_a_file_that_fails_is_refused_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "missing.py cannot be imported: FileNotFoundError" in refused({LOSS: "missing.py:f"})
    bad = tmp_path / "bad.py"
    bad.write_text("1 / 0\n")
    assert refused({LOSS: "bad.py:unclipped"}).endswith("cannot be imported: ZeroDivisionError: division by zero")
    bad.write_text(FILE.read_text())
    composed({LOSS: "bad.py:unclipped"})


def test_a_library_s_own_names_still_work(tiny: Path) -> None:
    assert passed(a_trainer(tiny, adv_estimator="rloo"), group(False))


def by_turn() -> list[Row]:
    """Four rows of two groups, two of which are calls of one episode."""
    rows = group(True)
    return [*rows[:2], *rows[-2:]]


def data_of_turns(worker: Any, rows: list[Row]) -> Any:
    """`rows` as the workers get them: with what each call is due."""
    data = step_data(rows, [0.0] * 4)
    told = [torch.from_numpy(row.advantages) for row in rows if row.advantages is not None]
    data["advantages"] = torch.nested.as_nested_tensor(told, layout=torch.jagged)
    data["old_log_probs"] = torch.nested.as_nested_tensor(learner.old_logprobs(worker, rows), layout=torch.jagged)
    return data
