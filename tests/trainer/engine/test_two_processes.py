"""Two training processes do what one does, to the last digits of float32: temperatures, PPO and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet_trainer.forest import cut, prices
from tests.kit import learner
from tests.trainer.engine import one_of_two
from tests.trainer.engine.test_functions import by_turn, data_of_turns
from tests.trainer.engine.test_gradient import FULL, close, gradient, step_data
from tests.trainer.engine.test_temperature import EXACT, FOUR, four, gradient_by_hand, model
from tests.trainer.engine.whole_step import CHOOSING, LIMIT

Pair = Callable[[str], list[Any]]


@pytest.fixture
def pair(two: Path) -> Pair:
    """The findings of each of two processes in a part of `one_of_two`."""
    return lambda part: [np.load(two / f"{part}.{rank}.npz") for rank in range(2)]


def test_rows_at_their_own_temperature(pair: Pair, tiny: Path) -> None:
    expected = gradient_by_hand(model(tiny), four(), FOUR, [1.0] * 4)
    for found in pair("temperatures"):
        assert close(expected, found["gradient"]) < EXACT


def test_a_step_of_ppo(pair: Pair, tiny: Path) -> None:
    """With a critic and GAE, split episodes and padding: what the critic says and learns, and what the actor does."""
    alone, halves = one_of_two.ppo(tiny), pair("ppo")
    assert all(np.linalg.norm(found) > 0.01 for found in alone.values())
    assert close(alone["values"], np.concatenate([half["values"] for half in halves])) < EXACT
    for half in halves:
        for name in ("loss", "critic", "actor"):
            assert close(alone[name], half[name]) < EXACT, name


def test_an_adapter_and_what_engines_are_served(pair: Pair, tiny: Path) -> None:
    """The adapter alone moves, and engines are sent the same: merged weights, to the last digit of bfloat16, or the
    adapter apart, which each process has whole."""
    alone, halves = one_of_two.adapter(tiny), pair("adapter")
    weights = [name for name in alone if name.startswith("model.") and alone[name].ndim == 2]
    merged = [name for name in weights if not np.array_equal(alone[name], alone[f"start {name}"])]
    assert len(merged) == 14 and np.linalg.norm(alone["adapter"]) > 0.1
    apart = [name for name in alone if name.startswith("apart ")]
    assert len(apart) == 2 * len(merged)
    for half in halves:
        assert set(half.files) == set(alone)
        assert close(alone["adapter"], half["adapter"]) < EXACT
        assert all(close(alone[name], half[name]) < EXACT for name in apart)
        for name in weights:
            assert np.allclose(alone[name], half[name], rtol=2**-7, atol=1e-7), name
            assert np.mean(alone[name] != half[name]) < 1e-3, name


def test_every_loss_and_mean(pair: Pair, tiny: Path) -> None:
    """But for losses that choose among the tokens of a micro-batch: each process packs its own."""
    alone, halves = one_of_two.losses(tiny), pair("losses")
    assert len(alone) == 55
    for name, expected in alone.items():
        assert np.linalg.norm(expected) > 0, name
        moved = max(close(expected, half[name]) for half in halves)
        assert moved < LIMIT or name.startswith(CHOOSING), (name, moved)


def test_credit_by_turn_with_a_loss_of_the_users_own(pair: Pair, tiny: Path) -> None:
    """Against verl's loss in one process, of which it is the plain case."""
    worker, rows = learner.training_worker(tiny), by_turn()
    expected = gradient(worker, data_of_turns(worker, rows), loss_agg_mode="token-mean")
    assert np.linalg.norm(expected) > 0
    for half in pair("turns"):
        assert close(expected, half["gradient"]) < EXACT


def test_trees_that_are_cut_in_one_process_alone(pair: Pair, tiny: Path) -> None:
    """Against flat rows in one process. Both processes must have as many micro-batches."""
    rows = one_of_two.forests()
    tokens = [np.concatenate((row.prompt, row.response)) for row in rows]
    price, prompts = prices(10_000, 10_000, 2, 64), [len(row.prompt) for row in rows]
    first, last = (cut(tokens[half], prompts[half], [1.0] * 8, 110, price) for half in (slice(8), slice(8, None)))
    assert len(first) == 1 < len(last)
    data = step_data(rows, [0.3 * number - 2 for number in range(len(rows))], pack=4096)
    expected = gradient(learner.training_worker(tiny), data, loss_agg_mode="seq-mean-token-mean", **FULL)
    assert np.linalg.norm(expected) > 0
    for half in pair("trees"):
        assert close(expected, half["gradient"]) < LIMIT
