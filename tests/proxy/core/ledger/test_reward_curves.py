"""Curves that always span the whole run, and the rewards of tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.reward_curves import MAX_POINTS, MAX_TASKS, RECENT, Curve, RewardCurves
from tests.kit.ledger_rig import LedgerRig

REWARDS = st.lists(st.integers(-5, 5), min_size=1, max_size=3 * MAX_POINTS)


@given(REWARDS, st.data())
def test_the_points_of_a_curve_add_up_to_all_rewards_also_to_corrected_ones(rewards: list[int], data: st.DataObject
) -> None:
    curve = Curve()
    assert [curve.add(reward, at, at // 7) for at, reward in enumerate(rewards)] == list(range(len(rewards)))
    number = data.draw(st.integers(0, len(rewards) - 1))
    curve.correct(number, 3 - rewards[number])
    rewards[number] = 3
    assert len(curve.points) <= MAX_POINTS
    at = 0
    for point in curve.points:
        covered = rewards[at : at + point.count]
        assert point.total == sum(covered)
        assert (point.first_at, point.last_at) == (at, at + point.count - 1)
        assert (point.oldest, point.newest) == (at // 7, (at + point.count - 1) // 7)
        assert point.count == curve.width or point is curve.points[-1]
        at += point.count
    assert at == curve.count == len(rewards)


def test_a_curve_of_many_has_few_points() -> None:
    curve = Curve()
    for at in range(100 * MAX_POINTS):
        curve.add(1.0, at, 0)
    assert MAX_POINTS // 2 <= len(curve.points) <= MAX_POINTS


def test_tasks_are_shown_as_they_were_rewarded_last() -> None:
    curves = RewardCurves()
    for number, task in enumerate(["a", "b", "a", "c"]):
        curves.add("train", f"ep-{number}", task, float(number), at=float(number), version=0)
    curves.add("eval", "ep-9", "b", 7.0, at=9.0, version=0)
    assert [(item["task"], item["eval"], item["mean"]) for item in curves.tasks(3)] == [
        ("b", True, 7.0), ("c", False, 3.0), ("a", False, 1.0),
    ]


def test_of_a_task_the_latest_rewards_stand_apart() -> None:
    curves = RewardCurves()
    for number in range(RECENT + 2):
        curves.add("train", f"ep-{number}", "t", float(number), at=0.0, version=0)
    (task,) = curves.tasks(1)
    assert task["recent"] == [float(number) for number in range(2, RECENT + 2)]
    assert (task["mean"], task["recent_mean"]) == (4.5, 5.5)


def test_tasks_that_were_long_not_rewarded_are_forgotten() -> None:
    curves = RewardCurves()
    for number in range(MAX_TASKS + 3):
        curves.add("train", f"ep-{number}", f"t{number}", 1.0, at=0.0, version=0)
    assert len(list(curves.tasks(2 * MAX_TASKS))) == MAX_TASKS
    curves.correct("train", 0, "ep-0", "t0", 2.0, 1.0)
    assert curves.curves["train"].points[0].to_json()["mean"] > 1.0


def test_the_recent_mean_is_of_enough_episodes() -> None:
    curves = RewardCurves()
    assert curves.recent_mean("train", 2) is None
    for number in range(4):
        curves.add("train", f"ep-{number}", "t", float(number), at=0.0, version=0)
    assert curves.recent_mean("train", 2) == 2.5
    assert curves.recent_mean("train", 99) == 1.5


def mean(rig: LedgerRig, kind: str = "train") -> list[float]:
    return [point.to_json()["mean"] for point in rig.state.tallies.reward_curves.curves[kind].points]


def test_settled_episodes_are_counted_once_and_corrections_follow(rig: LedgerRig) -> None:
    first = rig.ready(reward=1.0)
    rig.ready(reward=0.0)
    assert mean(rig) == [1.0, 0.0]
    rig.reward(first, 0.5)
    assert mean(rig) == [0.5, 0.0]
    (task,) = rig.state.tallies.reward_curves.tasks(1)
    assert (task["mean"], task["recent"], task["episodes"]) == (0.25, [0.5, 0.0], 2)
    rig.nack(rig.batch(group_size=2))
    assert mean(rig) == [0.5, 0.0]


def test_an_evaluation_may_be_rewarded_after_it_is_recorded(rig: LedgerRig) -> None:
    episode = rig.open(task="t", eval=True)
    rig.ends(episode, None, version=4)
    assert mean(rig, "eval") == []
    rig.reward(episode, 0.5)
    rig.reward(episode, 1.0)
    assert (mean(rig, "eval"), mean(rig)) == ([1.0], [])
    assert rig.state.tallies.reward_curves.curves["eval"].points[0].newest == 4


@pytest.mark.parametrize("why", ["no reward", "nothing sampled"])
def test_what_is_discarded_is_not_counted(rig: LedgerRig, why: str) -> None:
    episode = rig.open(task="t")
    if why == "no reward":
        rig.ends(episode, None)
    else:
        rig.reward(episode)
    assert rig.state_of(episode) == "discarded"
    assert mean(rig) == []
