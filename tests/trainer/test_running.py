"""Episodes that are alone: the running mean of their lane, what a step knows of it, and what no reward reaches."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.sample import BatchEpisode, Group
from ajet_trainer.admission import admit, has_signal
from ajet_trainer.attempts import NoUpdate
from ajet_trainer.batch import to_rows
from ajet_trainer.config import Config, check
from ajet_trainer.overlong import Shaping
from ajet_trainer.running import FEW, HALF_LIFE, LEAST, MOST, Known, Lanes, of_step
from ajet_trainer.sampling import Rule
from ajet_trainer.trained_batches import TrainedBatches
from ajet_trainer.turns import ByTurn, credit, turn_sessions, unjudged
from tests.trainer.making import batch, duel, episode
from tests.trainer.test_step import Setting
from tests.trainer.test_turns import found, played

HOW = ByTurn(alone={})
RULE = Rule(by_turn=HOW, compares=False)


def single(name: str, reward: float, lane: str = "default") -> Group:
    return Group(f"t-{name}", (episode(name, reward),), lane=lane)


def step(groups: Sequence[Group], lanes: Lanes, how: ByTurn = HOW) -> tuple[dict[str, float], Lanes]:
    """The advantage of each call of `groups`, and what is known of the lanes after the step."""
    told, after = of_step(groups, how, lanes)
    sets = [(mine, credit(mine, told)) for group in groups for mine in turn_sessions(group)]
    return {call: value for _, each in sets for calls in each for call, value in calls.items()}, after


def alone(rewards: Sequence[float], lanes: Lanes, lane: str = "default") -> tuple[list[float], Lanes]:
    """The advantages of episodes of one call, each in a group of its own."""
    told, after = step([single(f"e{number}", reward, lane) for number, reward in enumerate(rewards)], lanes)
    return list(told.values()), after


def test_a_first_step_compares_with_the_other_episodes_of_the_lane() -> None:
    told, after = alone([0.0, 0.0, 0.0, 1.0], {})
    scale = math.sqrt(3 / 16)
    assert told == pytest.approx([-1 / 3 / scale] * 3 + [1 / scale])
    assert sum(told) == pytest.approx(0)
    assert after["default"].calls == 4
    assert alone([1.0], {})[0] == [0.0], "nothing is known of what it may expect"
    groups = [single("a", 1.0, "one"), single("b", 5.0, "two"), single("c", 2.0, "one")]
    apart, _ = step(groups, {})
    assert apart == {"a/0/c0": -2.0, "b/0/c0": 0.0, "c/0/c0": 2.0}, "lanes know nothing of one another"


def test_the_calls_of_one_episode_are_no_baseline_for_each_other() -> None:
    long, short = played("a", [0, 0, 0], whole=1), played("b", [0], whole=0)
    told, _ = step([Group("t", (long,)), Group("u", (short,))], {})
    scale = math.sqrt(3 / 16)
    assert told == pytest.approx({f"a/0/c{n}": 1 / scale for n in range(3)} | {"b/0/c0": -1 / scale})


def test_later_steps_compare_with_what_was_known_before_them() -> None:
    known = Known().after([0.0, 1.0] * (FEW // 2))
    lanes = {"default": known}
    scale = math.sqrt(known.squares / known.weight)
    for rewards in ([1.0], [1.0, 0.0], [0.5, 1.0, 0.25]):
        told, _ = alone(rewards, lanes)
        assert told == pytest.approx([(reward - known.mean) / scale for reward in rewards])
    few = {"default": Known().after([0.0, 1.0] * (FEW // 2 - 1) + [0.0])}
    assert alone([1.0], few)[0] == [0.0], "one call too few are known"


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300))
def test_a_call_counts_half_as_much_as_one_that_came_a_half_life_later(returns: list[float]) -> None:
    known = Known().after(returns)
    weights = 0.5 ** (np.arange(len(returns))[::-1] / HALF_LIFE)
    mean = np.average(returns, weights=weights)
    variance = np.average((np.array(returns) - mean) ** 2, weights=weights)
    assert known.weight == pytest.approx(weights.sum())
    assert known.mean == pytest.approx(mean, abs=1e-9)
    assert known.squares / known.weight == pytest.approx(variance, abs=1e-6)


@pytest.mark.parametrize("calls", [0, FEW])
@given(rewards=st.lists(st.floats(-1, 1), min_size=2, max_size=8), other=st.floats(-1, 1))
def test_what_an_episode_earns_does_not_move_its_own_baseline(calls: int, rewards: list[float], other: float) -> None:
    """Its advantage is its distance from a mean without it. While little is known, the deviation is the step's."""
    known = Known().after([0.5, -0.5] * (calls // 2))
    for first in (rewards[0], other):
        mine = [first, *rewards[1:]]
        variance = known.squares / known.weight if calls else float(np.var(mine))
        base = known.mean if calls else math.fsum(rewards[1:]) / len(rewards[1:])
        told, _ = alone(mine, {"default": known})
        expected = max(-MOST, min(MOST, (first - base) / max(math.sqrt(variance), LEAST)))
        assert told[0] == pytest.approx(expected, abs=1e-9)


def test_an_advantage_is_four_at_most() -> None:
    lanes = {"default": Known().after([0.0, 0.0, 1.0, 0.0] * 8)}
    assert alone([1e9, -1e9], lanes)[0] == [MOST, -MOST]
    flat = {"default": Known().after([0.0] * FEW)}
    assert alone([0.3, 0.0], flat)[0] == pytest.approx([3.0, 0.0]), "by a deviation of 0.1"


@pytest.mark.parametrize("value", [0.7, -3.3, 0.0, 1e6])
def test_equal_rewards_have_no_advantage_however_often_they_come(value: float) -> None:
    lanes: Lanes = {}
    for _ in range(25):
        told, lanes = alone([value] * 8, lanes)
        assert told == [0.0] * 8
    assert lanes["default"].calls == 200
    assert math.sqrt(lanes["default"].squares) < LEAST
    summed = [Group("t", (played(name, [0.1, 0.1, 0.1]),)) for name in "ab"]
    even = [Group("t", (played(name, [0.3, 0.0, 0.0]),)) for name in "cd"]
    told, _ = step([*summed, *even], {"default": Known().after([0.3] * FEW)}, replace(HOW, gamma=1.0))
    assert [told[f"{name}/0/c0"] for name in "abcd"] == [0.0] * 4, "sums that differ by their rounding alone"


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_that_stays_has_no_advantage_on_average(seed: int) -> None:
    """Within three standard errors, in each lane, however unequal these are."""
    chance = random.Random(seed)
    draw = {
        "easy": lambda: float(chance.random() < 0.8), "hard": lambda: float(chance.random() < 0.2),
        "wide": lambda: chance.gauss(5, 3),
    }  # fmt: skip
    of: dict[str, list[float]] = {lane: [] for lane in draw}
    lanes: Lanes = {}
    for _ in range(300):
        groups = [single(f"{lane}{n}", draw[lane](), lane) for lane in draw for n in range(chance.randint(0, 6))]
        told, lanes = step(groups, lanes)
        for call, value in told.items():
            of[call.rstrip("/c0123456789")].append(value)
    for lane, values in of.items():
        error = np.std(values) / math.sqrt(len(values))
        assert len(values) > 700 and np.std(values) > 0.5
        assert abs(np.mean(values)) < 3 * error, lane


def test_a_lane_whose_judge_changes_its_scale_is_centered_again() -> None:
    """A judge between -1 and -0.8 gives way to one between 0.8 and 1."""
    lanes: Lanes = {}
    for _ in range(HALF_LIFE // 4):
        _, lanes = alone([-1.0, -0.8] * 8, lanes)
    told, lanes = alone([0.8, 1.0] * 8, lanes)
    assert set(told) == {MOST}
    for _ in range(6 * HALF_LIFE // 16):
        told, lanes = alone([0.8, 1.0] * 8, lanes)
    assert set(np.sign(told[::2])) == {-1.0} and set(np.sign(told[1::2])) == {1.0}


def test_where_episodes_are_compared_it_is_credit_by_turn() -> None:
    """In the same step, and with all of them a lane is known better."""
    pair = Group("t", (played("a", [1, 0]), played("b", [0, 1])))
    lone = Group("u", (played("c", [2]),))
    lanes = {"default": Known().after([0.0, 1.0] * FEW)}
    told, after = step([pair, lone], lanes)
    (first, second) = found(*pair.episodes, how=ByTurn())
    assert told == {
        "a/0/c0": first[0], "a/0/c1": first[1], "b/0/c0": second[0], "b/0/c1": second[1],
        "c/0/c0": step([lone], lanes)[0]["c/0/c0"],
    }  # fmt: skip
    assert after["default"] == lanes["default"].after([1.0, 0.0, 1.0, 1.0, 2.0])
    late = Group("t", (played("a", [1, 0]),), (played("b", [0, 1]),))
    told, after = step([late], lanes)
    assert [told["a/0/c0"], told["a/0/c1"]] == first
    assert after["default"] == lanes["default"].after([1.0, 0.0]), "what was leased before was counted then"


def test_agents_of_an_episode_that_is_alone_are_not_compared_with_each_other() -> None:
    lanes = {"default": Known().after([0.0, 1.0] * FEW)}
    scale = math.sqrt(lanes["default"].squares / lanes["default"].weight)
    told, after = step([Group("t", (duel("a", 1.0),))], lanes)
    mean = lanes["default"].mean
    assert told == pytest.approx({"a/0/c0": (1 - mean) / scale, "a/1/c0": (-1 - mean) / scale})
    assert after["default"].calls == 2 * FEW + 2


talks = st.tuples(st.sampled_from("ab"), st.lists(st.floats(-10, 10), min_size=1, max_size=3))
steps = st.lists(st.lists(talks, min_size=1, max_size=6), min_size=1, max_size=8)


@given(steps=steps, data=st.data())
def test_a_run_that_goes_on_from_a_checkpoint_repeats_to_the_last_bit(
    steps: list[list[tuple[str, list[float]]]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(steps) - 1))
    made = [
        [Group("t", (played(f"e{number}", values),), lane=lane) for number, (lane, values) in enumerate(one)]
        for one in steps
    ]
    batches, whole, restored = TrainedBatches(), [], list[Mapping[str, float]]()
    for number, groups in enumerate(made):
        if number == cut:
            state = json.loads(json.dumps(batches.state()))
        told, batches.lanes = step(groups, batches.lanes)
        whole.append(told)
    again = TrainedBatches.from_state(state)
    for groups in made[cut:]:
        told, again.lanes = step(groups, again.lanes)
        restored.append(told)
    assert restored == whole[cut:]
    assert again.state() == batches.state()


def judged(name: str, values: Sequence[float | None], whole: float | None = None) -> BatchEpisode:
    """An episode of one timeline, of whose calls some have a reward."""
    one = played(name, [value or 0.0 for value in values])
    given = [item for item, value in zip(one.rewards[1:], values, strict=True) if value is not None]
    if whole is not None:
        given.append({"value": whole, "final": True})
    return replace(one, rewards=tuple(given))


@pytest.mark.parametrize(
    ("values", "whole", "gamma", "expected"),
    [
        ([None, 1.0, None], None, 0.0, [0, 2]),
        ([None, 1.0, None], None, 1.0, [2]),
        ([0.0, None, None], None, 0.5, [1, 2]),
        ([None, 1.0, None], 0.0, 0.0, []),
        ([None, None], 1.0, 0.0, []),
        ([1.0, 0.0], None, 0.0, []),
    ],
)
def test_a_reward_reaches_its_call_and_those_before_it(
    values: list[float | None], whole: float | None, gamma: float, expected: list[int]
) -> None:
    one = judged("a", values, whole)
    calls = {f"a/0/c{number}" for number in expected}
    how = replace(HOW, gamma=gamma)
    assert unjudged(one, gamma) == calls
    admission = admit(batch("b", Group("t", (one,))), replace(RULE, by_turn=how))
    assert admission.left_out == ({"unjudged": len(calls)} if calls else {})
    told, after = of_step(admission.groups, how, {})
    rows = to_rows("b", admission.groups, by_turn=told)
    assert {call for row in rows for call, _, _ in row.spans} == {*one.samples[0].calls} - calls
    assert after["default"].calls == len(values) - len(calls)


def test_calls_without_a_reward_stay_where_episodes_are_compared() -> None:
    pair = Group("t", (judged("a", [1.0, None]), judged("b", [0.0, None])))
    admission = admit(batch("b", pair), RULE)
    assert admission.left_out == {}
    assert of_step(admission.groups, HOW, {})[1]["default"].calls == 2
    refused = replace(judged("b", [0.0, None]), samples=())
    admission = admit(batch("b", replace(pair, episodes=(pair.episodes[0], refused))), RULE)
    assert admission.left_out == {"unjudged": 1}, "the other one was refused"


def test_a_punishment_for_length_is_no_reward() -> None:
    """And counts in that of a call which has one."""
    rule = replace(RULE, shaping=Shaping(limit=4, buffer=2, factor=1.0))
    admission = admit(batch("b", Group("t", (judged("a", [1.0, None]),))), rule)
    assert admission.left_out == {"unjudged": 1}
    _, after = of_step(admission.groups, HOW, {})
    assert after["default"] == Known().after([1.0 - 0.5 - 0.5]), "of both calls, as long as gamma is 1"


def test_nothing_is_trained_of_an_episode_whose_rewarded_call_is_left_out() -> None:
    one = judged("a", [1.0, None])
    (talk,) = one.samples
    greedy = replace(talk, sampling=(({"temperature": 0.0}, 3), talk.sampling[1]))
    admission = admit(batch("b", Group("t", (replace(one, samples=(greedy,)),))), RULE)
    assert admission.groups == ()
    assert {rejection.reason for rejection in admission.rejected} == {"sampling"}
    assert admission.left_out == {"greedy": 1, "unjudged": 1}


def test_an_episode_that_is_alone_is_not_dropped_for_want_of_a_signal() -> None:
    rule = replace(RULE, no_signal="drop")
    admission = admit(batch("b", single("a", 0.5), Group("t", (episode("b"), episode("c")))), rule)
    assert [one.reason for one in admission.rejected] == ["no_signal", "no_signal"]
    lanes = {"default": Known().after([0.0, 1.0] * FEW)}
    told, _ = of_step([single("a", 0.9)], HOW, lanes)
    assert has_signal(single("a", 0.9), told)
    assert not has_signal(single("a", 0.9), HOW)


def setting(folder: Path, count: int) -> Setting:
    """Batches of two groups of one, in two lanes in turn."""
    made = Setting(folder, count)
    made.proxy.make = lambda task: (judged(f"{task}e", [float(task[-1]), None]),)
    return made


def test_a_step_keeps_what_it_has_trained_and_says_what_it_left_out(tmp_path: Path) -> None:
    run = setting(tmp_path / "run", 9)
    run.begun(rule=RULE)
    for _ in range(9):
        run.run.step()
    last = run.lines()[-1]
    assert last["left_out_calls"] == {"unjudged": 2} and last["groups_without_signal"] == 0
    assert [said for said in run.said if said.startswith("calls are left out (unjudged): no reward reaches them")]
    kept = TrainedBatches.from_state(run.disk.batches).lanes
    assert kept == {"default": Known().after([0.0, 1.0] * 9)}
    before = Known().after([0.0, 1.0] * 8)
    scale = math.sqrt(before.squares / before.weight)
    rows = [set(row.advantages.tolist()) for row in run.learner.rows if row.advantages is not None]
    assert rows == [{np.float32(-before.mean / scale)}, {np.float32((1 - before.mean) / scale)}]


def test_a_step_that_made_no_update_counts_once(tmp_path: Path) -> None:
    made = setting(tmp_path / "run", 3)
    run = made.begun(rule=RULE)
    run.step()
    train, after = made.learner.train, run.batches.lanes

    def fails(rows: object) -> dict[str, float]:
        raise NoUpdate("no gradient is finite")

    made.learner.train = fails  # type: ignore[method-assign]
    run.step()
    assert run.batches.lanes == after == {"default": Known().after([0.0, 1.0])}
    made.learner.train = train  # type: ignore[method-assign]
    run.step()
    assert run.batches.lanes == {"default": Known().after([0.0, 1.0] * 2)}
    assert TrainedBatches.from_state(made.disk.batches).lanes == run.batches.lanes


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 2), ({"group_size": 1}, 1), ({"group_size": 2}, 2), ({"min_group_size": 0}, 0)]
)
def test_the_least_group_follows_the_size_of_a_group(given: dict[str, int], expected: int) -> None:
    config = Config(model="m", proxy_url="http://127.0.0.1:1", **given)
    assert check(config).min_group_size == expected
