"""Rows at their own temperature, and truncated ones, through verl's engine: equal to what is written out by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from ajet_trainer.backends.verl import rows as queue
from ajet_trainer.backends.verl import settings
from ajet_trainer.backends.verl.cpu_worker import CpuActorWorker
from ajet_trainer.backends.verl.worker import ROW_TEMPERATURE, RowWorker, at_own_temperature
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from tests.kit.learner import old_logprobs, verl_learner
from tests.trainer.engine.test_estimators import MemoryQueue, padding
from tests.trainer.engine.test_gradient import close, conversation, gradient, rows_of, step_data
from tests.trainer.engine.whole_step import Steps

HEATS = [0.7, 1.3, 1.0]
EXACT = 5e-6
TOP_P = 0.8


@cache
def model(folder: Path) -> Any:
    """The tiny model without verl."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def mixed() -> list[Row]:
    """Three episodes, each at a temperature of its own."""
    rows = rows_of([[conversation(seed, turns=3)] for seed in range(len(HEATS))])
    return [replace(row, temperature=heat) for row, heat in zip(rows, HEATS, strict=True)]


FOUR = [1.3, -0.4, -0.9, 0.6]
"""The advantages of `four`."""


def four() -> list[Row]:
    return [*mixed(), replace(rows_of([[conversation(9, turns=2)]])[0], session=3, temperature=HEATS[0])]


def by_hand(policy: Any, row: Row) -> Any:
    """The logprob of each token of the response at the row's temperature; 0 where the mask is 0."""
    ids = torch.from_numpy(np.concatenate([row.prompt, row.response])).unsqueeze(0)
    logits = policy(input_ids=ids).logits[0, len(row.prompt) - 1 : -1] / row.temperature
    found = logits.log_softmax(dim=-1).gather(-1, torch.from_numpy(row.response).unsqueeze(-1)).squeeze(-1)
    return found * torch.from_numpy(row.mask)


def gradient_by_hand(policy: Any, rows: list[Row], advantages: list[float], weights: list[Any]) -> Any:
    """Of the mean over tokens of - advantage * weight * logprob, which a first policy gradient is."""
    policy.zero_grad()
    total = sum(
        -(advantage * weight * by_hand(policy, row)).sum()
        for row, advantage, weight in zip(rows, advantages, weights, strict=True)
    )
    (total / sum(row.sampled for row in rows)).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()]).double().numpy()


def data_of(rows: list[Row], advantages: list[float]) -> Any:
    """As the workers get them, but for who puts the temperatures in place; old logprobs are those by hand."""
    data = step_data(rows, advantages)
    data[ROW_TEMPERATURE] = torch.tensor([row.temperature for row in rows])
    return data


def test_old_logprobs_are_those_of_each_rows_temperature(worker: Any, tiny: Path) -> None:
    rows = mixed()
    for row, found in zip(rows, old_logprobs(worker, rows), strict=True):
        expected = by_hand(model(tiny), row).detach().numpy()
        assert np.abs(found.numpy() * row.mask - expected).max() < EXACT
    same = [replace(row, temperature=1.0) for row in rows]
    assert np.abs(old_logprobs(worker, same)[0].numpy() - old_logprobs(worker, rows)[0].numpy()).max() > 1e-3


def test_the_gradient_is_that_of_each_rows_temperature(worker: Any, tiny: Path) -> None:
    """With a row of padding, which has the first row's temperature as verl's own has."""
    rows, advantages = mixed(), [1.3, -0.4, -0.9]
    filled = [*rows, replace(padding(0), session=3, temperature=HEATS[0])]
    old = old_logprobs(worker, filled)
    weights = [torch.linspace(0.5, 1.5, len(row.response)) for row in filled]
    data = at_own_temperature(data_of(filled, [*advantages, 0.0]))
    data["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    data["rollout_is_weights"] = torch.nested.as_nested_tensor(weights, layout=torch.jagged)
    found = gradient(worker, data, loss_agg_mode="token-mean")
    expected = gradient_by_hand(model(tiny), rows, advantages, weights[:3])
    assert np.linalg.norm(found) > 1e-3
    assert close(expected, found) < EXACT
    cold = [replace(row, temperature=1.0) for row in rows]
    assert close(expected, gradient_by_hand(model(tiny), cold, advantages, weights[:3])) > 1e-2


def test_verls_worker_is_given_the_rows_temperatures(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the one for all, for what it infers and for what it trains."""
    seen: list[Any] = []
    for method in ("infer_batch", "train_mini_batch"):
        monkeypatch.setattr(TrainingWorker, method, lambda self, data: seen.append(data))
        getattr(worker, method)(data_of(mixed(), [0.0] * 3))
        getattr(worker, method)(step_data(mixed(), [0.0] * 3))
    for own, common in zip(seen[::2], seen[1::2], strict=True):
        assert own["temperature"].tolist() == pytest.approx(HEATS) and ROW_TEMPERATURE not in own
        assert common["temperature"] == 1.0
    assert ActorRolloutRefWorker in CpuActorWorker.__mro__
    assert CpuActorWorker.actor_worker_cls is CpuActorWorker.ref_worker_cls is RowWorker


def test_rows_bring_temperatures_only_where_one_is_not_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step without any is no slower."""
    for temperature, rows, brought in (
        (1.0, mixed(), HEATS), (1.0, mixed()[2:], [None]), (0.7, mixed()[:1], [None]), (0.7, mixed()[2:], [1.0]),
    ):
        memory = MemoryQueue()
        monkeypatch.setattr(queue, "tq", memory)
        queue.put_rows(rows, 1, temperature)
        found = [memory.rows[row.key].get(ROW_TEMPERATURE) for row in rows]
        assert found == [None if value is None else pytest.approx(value) for value in brought]


def test_padding_is_at_the_temperature_of_the_row_it_is_made_of() -> None:
    """verl copies a row with all its fields, and packs the copies."""
    filling, _ = construct_minimal_padding_template(data_of(mixed(), [0.0] * 3)[0], {}, 0)
    packed = list_of_dict_to_tensordict([{ROW_TEMPERATURE: filling[ROW_TEMPERATURE]}] * 2)
    assert packed[ROW_TEMPERATURE].tolist() == pytest.approx([HEATS[0]] * 2)


@pytest.mark.parametrize(
    ("verl", "several"),
    [
        ({}, True), ({"model_engine": "megatron"}, True), ({"model_engine": "torchtitan"}, False),
        ({"actor_rollout_ref.model.use_fused_kernels": True}, False),
    ],
)  # fmt: skip
def test_a_learner_whose_kernels_take_one_temperature_says_so(verl: dict[str, Any], several: bool, tiny: Path) -> None:
    warm = {"actor_rollout_ref.rollout.temperature": 0.7}
    made = verl_learner(settings.compose(Config(model=str(tiny), verl=verl | warm), "cuda", None))
    assert (made.rule.several, made.rule.temperature) == (several, 0.7)


def weights_of(worker: Any, tiny: Path, rows: list[Row]) -> list[np.ndarray[Any, Any]]:
    """The weights that verl's trainer gives to the tokens of each row, from old logprobs of its worker."""
    made = Steps(tiny, worker, "grpo", own=True, **{"rollout_correction.rollout_is": "token"}).put(rows)
    return [made[row.key]["rollout_is_weights"].numpy() for row in rows]


def truncated(policy: Any, seed: int, temperature: float) -> tuple[Row, np.ndarray[Any, Any]]:
    """A row sampled from the smallest set of tokens that holds `TOP_P`, and what this set holds, token by token."""
    dice, length = torch.Generator().manual_seed(seed), 10 + seed
    ids, logprobs, kept = torch.randint(0, 500, (6 + seed,), generator=dice).tolist(), [], []
    for _ in range(length):
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([ids])).logits[0, -1]
        likely, order = (logits / temperature).softmax(dim=-1).sort(descending=True)
        inside = likely.cumsum(dim=-1) - likely < TOP_P
        mass = likely[inside].sum()
        place = int(torch.multinomial(likely[inside] / mass, 1, generator=dice))
        ids.append(int(order[place]))
        logprobs.append(float((likely[place] / mass).log()))
        kept.append(float(mass))
    (row,) = rows_of([[conversation(seed, turns=1)]])
    made = replace(
        row, session=seed, prompt=np.array(ids[:-length]), response=np.array(ids[-length:]),
        mask=np.ones(length, dtype=np.int64), logprobs=np.array(logprobs, dtype=np.float32), temperature=temperature,
    )  # fmt: skip
    return made, np.array(kept)


def test_a_truncated_call_has_weights_of_what_the_trainer_says_over_what_it_was_sampled_with(
    worker: Any, tiny: Path
) -> None:
    """p / q is the share of the trainer's distribution that the engine kept, to the last digits of float32."""
    made = [truncated(model(tiny), seed, heat) for seed, heat in enumerate((0.7, 1.0, 1.3))]
    rows = [row for row, _ in made]
    for weights, (_, mass) in zip(weights_of(worker, tiny, rows), made, strict=True):
        assert mass.min() >= TOP_P and mass.max() < 0.95
        assert np.abs(weights - mass).max() < EXACT


def test_each_token_is_weighed_by_the_version_that_sampled_it(worker: Any, tiny: Path) -> None:
    """A row whose first tokens other weights sampled: they are weighed against those, and the others are not weighed
    down for them."""
    older = copy.deepcopy(model(tiny))
    with torch.no_grad():
        for index, parameter in enumerate(older.parameters()):
            noise = torch.Generator().manual_seed(index)
            parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
    row, other = rows_of([[conversation(3, turns=4)], [conversation(4, turns=1)]])
    half = len(row.response) // 2
    now, then = (by_hand(policy, row).detach().numpy() for policy in (model(tiny), older))
    logprobs = np.concatenate([then[:half], now[half:]]).astype(np.float32)
    row = replace(row, logprobs=logprobs, min_version=4, max_version=5)
    weights, _ = weights_of(worker, tiny, [row, other])
    expected = np.minimum(np.exp(now - logprobs), 2.0) * row.mask
    assert np.abs(weights - expected).max() < 2e-5 and np.abs(expected[:half] - row.mask[:half]).max() > 0.1
    assert np.abs(weights[half:] - row.mask[half:]).max() < 1e-5
