"""Engines compared with the trainer: what it computes of their answers, and what it makes of the difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from tests.kit.learner import forest_worker, old_logprobs, training_worker
from tests.trainer.engine.test_adapters_apart import Holder

TEXTS = (([5, 6, 7], [8, 9, 10, 11]), ([5, 6, 7], [8, 12]), ([20], [21, 22, 23]))


def row(prompt: list[int], answer: list[int], place: int) -> Row:
    ones = np.ones(len(answer), np.int64)
    return Row(f"g{place}", 0, 0, np.array(prompt), np.array(answer), ones, ones.astype(np.float32), 0.0, 1, 0, 0)


@pytest.mark.parametrize("worker", [training_worker, forest_worker])
def test_what_is_computed_of_answers_is_what_is_computed_of_rows(worker: Any, tiny: Path, verl_here: None) -> None:
    from ajet_trainer.backends.verl.compared import logprobs_of

    made = worker(tiny)
    found = logprobs_of(made, TEXTS, packed=True)
    rows = old_logprobs(made, [row(list(prompt), list(answer), place) for place, (prompt, answer) in enumerate(TEXTS)])
    assert [len(one) for one in found or ()] == [4, 2, 3]
    for one, other in zip(found or (), rows, strict=True):
        assert np.abs(np.array(one) - np.array(other)).max() < 1e-5


class Answering(Holder):
    """It answers each prompt with `ids`, and with `logprobs`."""

    ids, logprobs = (8, 9, 10), (-1.0, -2.0, -3.0)
    bodies: list[dict[str, Any]]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/health":
            return 200, {}
        if path != "/v1/completions":
            return super().answer(path, body)
        self.bodies = [*getattr(self, "bodies", []), body]
        if body["model"] != "policy":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        told = {"token_logprobs": list(self.logprobs)}
        return 200, {"choices": [{"token_ids": list(self.ids), "logprobs": told}]}


@pytest.fixture
def engines() -> Iterator[tuple[Answering, Answering]]:
    made = Answering(), Answering()
    yield made
    for one in made:
        one.close()


def a_trainer(engines: tuple[Answering, ...], tiny: Path, own: list[float], **ours: Any) -> Any:
    """An `AjetTrainer` of attached `engines` that computes the logprobs `own` of each answer."""
    from ajet_trainer.backends.verl import settings, trainer

    made: Any = trainer.AjetTrainer.__new__(trainer.AjetTrainer)
    given: dict[str, Any] = {"engine_urls": tuple(one.url for one in engines), "model": str(tiny)} | ours
    made._ours, made.colocated = Config(**given), False
    made.config = settings.compose(made._ours, "cpu", tiny)
    made.tokenizer = SimpleNamespace(encode=lambda text: [5, 6, 7])
    made.actor_rollout_wg = SimpleNamespace(logprobs_of=lambda texts: [None, [own for _ in texts]])
    return made


def test_each_engine_is_compared_with_the_trainer(engines: tuple[Answering, Answering], tiny: Path) -> None:
    from ajet_trainer.engines import EngineLost

    a_trainer(engines, tiny, [-1.1, -2.1, -2.9]).compare()
    assert engines[0].bodies[0]["cache_salt"] != engines[1].bodies[0]["cache_salt"]
    engines[1].logprobs = (-1.0, -2.0, -6.0)
    said = rf"^the engine at {engines[1].url} does not compute what was pushed to it: .* 1 nats"
    with pytest.raises(EngineLost, match=said):
        a_trainer(engines, tiny, [-1.0, -2.0, -3.0]).compare()


def test_an_engine_without_the_model_is_named(engines: tuple[Answering, Answering], tiny: Path) -> None:
    from ajet_trainer.engines import EngineLost

    with pytest.raises(EngineLost, match=r"does not answer as 'other', and so cannot be compared .* does not exist"):
        a_trainer(engines, tiny, [], model_name="other").compare()
    engines[0].ids = ()
    with pytest.raises(EngineLost, match="tells 3 logprobs of 0 tokens"):
        a_trainer(engines, tiny, []).compare()


@pytest.mark.parametrize(
    ("tokens", "off", "most", "stops"),
    [(1000, 0.5, 0.05, True), (999, 0.5, 0.05, False), (1000, 0.1, 0.05, False), (1000, 0.5, 0.0, False),
     (1000, float("nan"), 0.05, True)],
)  # fmt: skip
def test_a_step_ends_before_its_update_if_fresh_tokens_are_not_the_trainers(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tokens: int, off: float, most: float, stops: bool
) -> None:
    """Tokens of older weights may be as far off as they like."""
    import torch

    from ajet_trainer.agreement import OtherWeights
    from ajet_trainer.attempts import Elsewhere
    from ajet_trainer.backends.verl import trainer

    assert not issubclass(OtherWeights, Elsewhere), "the batch is tried three times, and not for ever"
    made, old = a_trainer((), tiny, [], max_kl=most), 50
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


def test_an_engine_that_was_started_again_gets_the_last_weights_again(
    engines: tuple[Answering, Answering], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone. Another model ends the run, and is sent nothing."""
    from ajet_trainer import same_model
    from ajet_trainer.backends.verl import trainer
    from ajet_trainer.engines import EngineLost

    made = a_trainer(engines, tiny, [-1.0, -2.0, -3.0])
    said, given = list[str](), list[tuple[list[str], Path, int]]()
    made._adapter, made._apart, made._pushed, made._engines, made._say = None, False, (tmp_path, 3), {}, said.append
    made.permit = lambda: None
    monkeypatch.setattr(
        trainer.weights, "load_into", lambda urls, folder, version, key: given.append((urls, folder, version))
    )
    told = {one.url: same_model.Served((("policy", "m", 9),), "3") for one in engines}
    monkeypatch.setattr(same_model, "look", lambda config, before: dict(told))
    made.check()
    made.check()
    assert not given
    told[engines[1].url] = same_model.Served((("policy", "m", 9),), "default")
    made.check()
    assert given == [([engines[1].url], tmp_path, 3)] and len(engines[0].bodies) == 2, "and all are compared"
    assert said == [f"{engines[1].url} had been started again, and has the weights again"]

    def refuse(config: Config, before: Any) -> None:
        raise EngineLost("another model")

    monkeypatch.setattr(same_model, "look", refuse)
    pushed = list[str]()
    made._push = lambda: pushed.append("weights")
    for act in (made.check, made.push):
        with pytest.raises(EngineLost, match="another model"):
            act()
    assert not pushed
