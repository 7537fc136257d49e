"""Credit by turn through `AjetTrainer` to a gradient: against verl's own GRPO, and against one written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ajet_sdk.sample import BatchEpisode, Group, Sample
from ajet_trainer.advantage import Masked
from ajet_trainer.batch import Row, to_rows
from ajet_trainer.config import Config
from ajet_trainer.running import Known, of_step
from ajet_trainer.turns import ByTurn
from tests.kit.learner import verl_learner
from tests.trainer.engine.test_estimators import a_trainer, advantages, padding, passed
from tests.trainer.engine.test_gradient import MODES, close, conversation, gradient, step_data, unmerged
from tests.trainer.engine.whole_step import LIMIT, Steps

EARLY, LATE = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)


def episode(number: int, values: tuple[float, ...], *, whole: float = 0.0, split: bool = False) -> BatchEpisode:
    """An episode whose calls got `values`, as one timeline or as one for each call, in an order that is not theirs."""
    name = f"e{number}"
    talk = named(conversation(number, turns=len(values)), name)
    parts = [replace(part, turns=(turn,)) for turn, part in enumerate(unmerged(talk))][::-1] if split else [talk]
    given = [{"value": value, "call": call} for call, value in zip(talk.calls, values, strict=True) if value]
    rewards = tuple(given) if not whole else ({"value": whole}, *given)
    total = whole + sum(values)
    return BatchEpisode(name, "t", "policy", total, rewards, tuple(replace(part, reward=total) for part in parts))


def named(talk: Sample, name: str) -> Sample:
    """`talk` with calls that no other episode has."""
    return replace(
        talk, episode=name, calls=tuple(f"{name}/{call}" for call in talk.calls),
        spans=tuple((f"{name}/{call}", start, end) for call, start, end in talk.spans),
    )


def rows(*values: tuple[float, ...], how: ByTurn, split: bool = False, whole: tuple[float, ...] = ()) -> list[Row]:
    """One group of episodes; `split` breaks every other one."""
    extra = whole or (0.0,) * len(values)
    group = Group("t", tuple(
        episode(n, mine, whole=extra[n], split=split and n % 2 == 0) for n, mine in enumerate(values)
    ))  # fmt: skip
    return to_rows("b", [group], by_turn=how)


def by_call(rows: list[Row], values: dict[str, list[float]]) -> dict[str, list[float]]:
    """The advantages of each call's tokens. All other tokens have none."""
    out = {}
    for row in rows:
        left = np.array(values[row.key])
        for call, start, end in row.spans:
            out[call] = left[start:end].tolist()
            left[start:end] = 0
        assert not left.any()
    return out


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_with_whole_rewards_alone_it_is_verl_s_grpo(scaled: bool, split: bool, tiny: Path) -> None:
    """Also where episodes split, and where the batch is filled up."""
    mine = rows((0,) * 3, (0,) * 2, (0,) * 4, how=ByTurn(scaled=scaled), split=split, whole=(0.25, 1.0, -0.5))
    filled = [*mine, padding(0), padding(1)]
    options = {"norm_adv_by_std_in_grpo": scaled}
    ours, theirs = (
        advantages(tiny, filled, adv_estimator=name, **options) for name in ("ajet_turn", "grpo")
    )
    assert any(value for values in theirs.values() for value in values)
    for key, values in theirs.items():
        assert ours[key] == pytest.approx(values, abs=LIMIT), key


def test_every_token_has_what_its_call_is_due(tiny: Path) -> None:
    for split in (False, True):
        mine = rows(EARLY, LATE, how=ByTurn(scaled=False), split=split)
        found = by_call(mine, advantages(tiny, [*mine, padding(0)], adv_estimator="ajet_turn"))
        expected = {"e0/c0": 0.0, "e1/c0": 0.0} | {f"e0/c{n}": -0.5 for n in (1, 2, 3)}
        expected |= {f"e1/c{n}": 0.5 for n in (1, 2, 3)}
        assert {call: set(values) for call, values in found.items()} == {
            call: {value} for call, value in expected.items()
        }


def test_episodes_that_are_alone_have_what_the_running_mean_of_their_lane_tells(tiny: Path) -> None:
    """However they split, next to episodes that are compared."""
    known = Known().after([0.0, 1.0] * 16)
    scale = (known.squares / known.weight) ** 0.5
    for split in (False, True):
        lone, *pair = (episode(n, values, split=split) for n, values in enumerate((LATE, EARLY, LATE)))
        groups = [Group("t", (lone,)), Group("u", tuple(pair))]
        how, _ = of_step(groups, ByTurn(alone={}), {"default": known})
        mine = to_rows("b", groups, by_turn=how)
        found = by_call(mine, advantages(tiny, [*mine, padding(0)], adv_estimator="ajet_running"))
        for n in range(4):
            assert found[f"e0/c{n}"] == pytest.approx([(1 - known.mean) / scale] * len(found[f"e0/c{n}"]))
        turns = rows(EARLY, LATE, how=ByTurn(), split=split)
        compared = by_call(turns, advantages(tiny, turns, adv_estimator="ajet_turn"))
        for call, values in compared.items():
            assert set(found[f"e{int(call[1]) + 1}{call[2:]}"]) == set(values)


@pytest.mark.parametrize("mean", MODES)
def test_the_gradient_is_the_one_written_by_hand(mean: str, tiny: Path, worker: Any) -> None:
    """Of 1,0,0,0 against 0,0,0,1: each call's tokens times what the call is due, whether episodes split or not."""
    steps = Steps(tiny, worker, "ajet_turn")
    whole, split = (rows(EARLY, LATE, how=ByTurn(), split=split) for split in (False, True))
    due = {"e0": (0.0, -0.5, -0.5, -0.5), "e1": (0.0, 0.5, 0.5, 0.5)}
    scale = np.sqrt(2 * (3 * 0.25) / 4) + 1e-6
    data = step_data(whole, [0.0, 0.0], mean=mean)
    told = []
    for row in whole:
        tokens = torch.zeros(len(row.mask))
        for call, start, end in row.spans:
            name, number = call.split("/c")
            tokens[start:end] = due[name][int(number)] / scale
        told.append(tokens)
    data["advantages"] = torch.nested.as_nested_tensor(told, layout=torch.jagged)
    expected = gradient(worker, data, loss_agg_mode=mean, entropy_coeff=0.01)
    assert np.linalg.norm(expected) > 0
    for mine in (whole, split, [*split, padding(0), padding(1)]):
        assert close(expected, steps.gradient(mine, mean=mean)) < LIMIT


def test_rewards_of_another_turn_make_another_gradient(tiny: Path, worker: Any) -> None:
    """`grpo` makes nothing at all of their sums."""
    steps = Steps(tiny, worker, "ajet_turn")
    one, other = (steps.gradient(rows(*values, how=ByTurn())) for values in ((EARLY, LATE), (LATE, EARLY)))
    assert close(one, other) > 0.5
    summed = Steps(tiny, worker, "grpo")
    plain = [replace(row, advantages=None) for row in rows(EARLY, LATE, how=ByTurn())]
    made = passed(summed.trainer, plain)
    assert not any(made[row.key]["advantages"].any() for row in plain)


def test_the_trainer_says_how_credit_goes_to_turns(tiny: Path) -> None:
    for verl, expected in (
        ({"adv_estimator": "ajet_turn"}, ByTurn(0.5, True)),
        ({"adv_estimator": "ajet_turn", "norm_adv_by_std_in_grpo": False}, ByTurn(0.5, False)),
        ({"adv_estimator": "ajet_running"}, ByTurn(0.5, True, {})),
        ({"adv_estimator": "grpo"}, None),
    ):
        made = verl_learner(a_trainer(tiny, **verl).config, ours=Config(model=str(tiny), turn_gamma=0.5))
        assert (made.rule.by_turn, made.rule.shaping) == (expected, None)
        assert made.rule.compares == (verl["adv_estimator"] != "ajet_running")


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized"])
def test_an_episode_of_which_nothing_is_trained_counts_in_the_baseline(estimator: str, tiny: Path) -> None:
    """As much as if it were: overlong answers are masked, and their reward says what may be expected."""
    talks = [episode(n, (0.0, 0.0), whole=reward) for n, reward in enumerate((1.0, 0.25, 0.0))]
    (last,) = talks[2].samples
    cut = {"token_ids": last.token_ids[:2], "loss_mask": (0, 0), "logprobs": (0.0, 0.0), "spans": ()}
    told = {name: getattr(last, name) for name in last.__dataclass_fields__}
    silent = replace(talks[2], samples=(Masked(**(told | cut)),))
    full, short = (to_rows("b", [Group("t", (*talks[:2], one))]) for one in (talks[2], silent))
    assert [row.sampled > 0 for row in short] == [True, True, False]
    one, other = (advantages(tiny, mine, adv_estimator=estimator) for mine in (full, short))
    for row in short[:2]:
        assert other[row.key] == pytest.approx(one[row.key], rel=1e-5)
    assert other[short[2].key] == [0.0]


def test_such_an_episode_is_none_of_those_in_a_mean(tiny: Path, worker: Any) -> None:
    """A mean over sequences is one over the others."""
    steps = Steps(tiny, worker, "rloo")
    mine = rows((1.0, 0.0), (0.0, 0.0), how=ByTurn())
    silent = replace(padding(0), group=mine[0].group, session=2, reward=0.5)
    for mean in ("seq-mean-token-mean", "seq-mean-token-sum"):
        made = passed(steps.trainer, [*mine, silent])
        assert not made[silent.key]["advantages"].any()
        alone = steps.gradient([*mine, silent], mean=mean)
        filled = steps.gradient([*mine, silent, padding(1)], mean=mean)
        assert close(alone, filled) < LIMIT
