"""Engines compared with the trainer: what it computes of their answers, and what it makes of the difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ajet_trainer.agreement import OtherWeights
from ajet_trainer.backends.verl import settings, trainer
from ajet_trainer.backends.verl.compared import logprobs_of
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost
from ajet_trainer.engines.attached import Attached
from tests.kit.learner import forest_worker, old_logprobs, training_worker, verl_learner
from tests.trainer.stub_engine import StubEngine, stub_engine

TEXTS = (([5, 6, 7], [8, 9, 10, 11]), ([5, 6, 7], [8, 12]), ([20], [21, 22, 23]))


def row(prompt: list[int], answer: list[int], place: int) -> Row:
    ones = np.ones(len(answer), np.int64)
    return Row(f"g{place}", 0, 0, np.array(prompt), np.array(answer), ones, ones.astype(np.float32), 0.0, 1, 0, 0)


@pytest.mark.parametrize("worker", [training_worker, forest_worker])
def test_what_is_computed_of_answers_is_what_is_computed_of_rows(worker: Any, tiny: Path) -> None:
    made = worker(tiny)
    found = logprobs_of(made, TEXTS, packed=True)
    rows = old_logprobs(made, [row(list(prompt), list(answer), place) for place, (prompt, answer) in enumerate(TEXTS)])
    assert [len(one) for one in found or ()] == [4, 2, 3]
    for one, other in zip(found or (), rows, strict=True):
        assert np.abs(np.array(one) - np.array(other)).max() < 1e-5


@pytest.fixture
def engines() -> Iterator[tuple[StubEngine, StubEngine]]:
    with stub_engine() as one, stub_engine() as other:
        yield one, other


def a_learner(engines: tuple[StubEngine, ...], tiny: Path, own: list[float], **ours: Any) -> Any:
    """A `VerlLearner` of attached `engines` that computes the logprobs `own` of each answer."""
    given: dict[str, Any] = {"engine_urls": tuple(one.url for one in engines), "model": str(tiny)} | ours
    config = Config(**given)
    return verl_learner(
        settings.compose(config, "cpu", tiny), engines=Attached(config, tiny), ours=config,
        tokenizer=SimpleNamespace(encode=lambda _: [5, 6, 7]),
        actor_rollout_wg=SimpleNamespace(logprobs_of=lambda texts: [None, [own for _ in texts]]),
    )


def test_each_engine_is_compared_with_the_trainer(engines: tuple[StubEngine, StubEngine], tiny: Path) -> None:
    a_learner(engines, tiny, [-1.1, -2.1, -2.9]).compare()
    assert engines[0].bodies[0]["cache_salt"] != engines[1].bodies[0]["cache_salt"]
    engines[1].logprobs = (-1.0, -2.0, -6.0)
    said = rf"^the engine at {engines[1].url} does not compute what was pushed to it: .* 1 nats"
    with pytest.raises(EngineLost, match=said):
        a_learner(engines, tiny, [-1.0, -2.0, -3.0]).compare()


def test_an_engine_without_the_model_is_named(engines: tuple[StubEngine, StubEngine], tiny: Path) -> None:
    with pytest.raises(EngineLost, match=r"does not answer as 'other', and so cannot be compared .* does not exist"):
        a_learner(engines, tiny, [], model_name="other").compare()
    engines[0].ids = ()
    with pytest.raises(EngineLost, match="tells 3 logprobs of 0 tokens"):
        a_learner(engines, tiny, []).compare()


def test_engines_that_have_the_weights_again_are_compared_again(
    engines: tuple[StubEngine, StubEngine], tiny: Path
) -> None:
    learner = a_learner(engines, tiny, [-1.0, -2.0, -3.0])
    again, learner._engines = iter([False, True, False, True]), SimpleNamespace(
        check=lambda: next(again), push=lambda version, write: next(again)
    )
    learner._verl.global_steps = 1
    for act, compared in ((learner.check, 0), (learner.check, 1), (learner.push, 1), (learner.push, 2)):
        act()
        assert len(engines[0].bodies) // 2 == compared, "an answer is computed once more, as a prompt"


@pytest.mark.parametrize(
    ("tokens", "off", "most", "stops"),
    [(1000, 0.5, 0.05, True), (999, 0.5, 0.05, False), (1000, 0.1, 0.05, False), (1000, 0.5, 0.0, False),
     (1000, float("nan"), 0.05, True)],
)  # fmt: skip
def test_a_step_ends_before_its_update_if_fresh_tokens_are_not_the_trainers(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tokens: int, off: float, most: float, stops: bool
) -> None:
    """Tokens of older weights may be as far off as they like."""
    assert not issubclass(OtherWeights, EngineLost), "the batch is tried three times, and not for ever"
    made: Any = trainer.AjetTrainer.__new__(trainer.AjetTrainer)
    made.ours, old = Config(model=str(tiny), max_kl=most), 50
    one = row([5], [6] * (tokens + old), 0)
    made._rows = [replace(one, versions=np.array([4] * tokens + [3] * old), logprobs=np.full(tokens + old, -2.0))]
    made._began = 4
    own = torch.tensor([-2.0 - off] * tokens + [-9.0] * old)
    stored = {"old_log_probs": torch.nested.as_nested_tensor([own], layout=torch.jagged)}
    monkeypatch.setattr(trainer.tq, "kv_batch_get", lambda **_: stored)
    metrics: dict[str, Any] = {}
    if stops:
        with pytest.raises(OtherWeights, match=rf"over {tokens} tokens of these weights its KL .*max_kl = 0\.05"):
            made._compare_fresh("train", metrics)
    else:
        made._compare_fresh("train", metrics)
        assert metrics["rollout_corr/fresh_tokens"] == tokens
        assert metrics["rollout_corr/fresh_kl"] == pytest.approx(np.exp(-off) - 1 + off, rel=1e-4)
