"""Held-out traffic: its rewards by version, and the alert that users are served worse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ajet_proxy.core.ledger.holdouts import ENOUGH, MOST_SPANS, Holdouts
from tests.kit.ledger_rig import SETTINGS, LedgerRig


def told(found: Holdouts) -> list[tuple[int, int, int]]:
    return [(*one["policy_versions"], one["episodes"]) for one in found.to_json().get("m", ())]


def served(*means: float, spread: float = 0.3, number: int = ENOUGH, seed: int = 0) -> Holdouts:
    """Versions with so many chats each, whose rewards scatter around their means."""
    found, chance = Holdouts(), random.Random(seed)
    for version, mean in enumerate(means):
        for _ in range(number):
            found.add("m", version, chance.gauss(mean, spread))
    return found


def test_versions_of_which_there_is_little_are_one_span() -> None:
    found = Holdouts()
    for version in range(4):
        for _ in range(ENOUGH // 2):
            found.add("m", version, 0.5)
    assert told(found) == [(0, 1, ENOUGH), (2, 3, ENOUGH)]
    found.add("m", 1, 0.5)
    assert told(found) == [(0, 1, ENOUGH + 1), (2, 3, ENOUGH)]
    for version in (9, 5):
        found.add("m", version, 0.5)
    assert told(found)[2:] == [(4, 9, 2)], "what comes late has a span too"


def test_few_spans_are_kept_and_what_comes_later_of_others_does_not_count() -> None:
    found = served(*[0.5] * (MOST_SPANS + 2))
    found.add("m", 0, 0.5)
    assert told(found) == [(version, version, ENOUGH) for version in range(2, MOST_SPANS + 2)]


def test_a_version_that_is_served_again_is_the_latest() -> None:
    found = served(0.5, 0.6, 0.7)
    found.serves("other", 0)
    found.serves("m", 1)
    assert [version for version, _, _ in told(found)] == [0, 1]
    found.serves("m", -1)
    assert found.to_json() == {} and found.alerts() == {}


@pytest.mark.parametrize(
    ("means", "alerts"),
    [((0.5, 0.0), 1), ((0.0, 0.5), 0), ((0.5,), 0), ((0.5, 0.0, 0.5), 0), ((0.5, 0.5), 0), ((0.9, 0.5, 0.0), 1)],
)
def test_users_who_are_served_worse_are_an_alert(means: tuple[float, ...], alerts: int) -> None:
    assert len(served(*means).alerts()) == alerts


def test_the_line_tells_both() -> None:
    (line,) = served(0.5, -0.5, spread=0.0).alerts().values()
    assert f"-0.500 at version 1 ({ENOUGH} chats), and 0.500 at version 0 ({ENOUGH} chats)" in line


def test_of_few_chats_nothing_is_said() -> None:
    found = served(1.0, spread=0.0)
    for _ in range(ENOUGH - 1):
        found.add("m", 1, -1.0)
    assert found.alerts() == {}
    found.add("m", 1, -1.0)
    assert len(found.alerts()) == 1
    found.add("m", 2, 1.0)
    assert len(found.alerts()) == 1, "until as many tell otherwise"


def test_equals_are_an_alert_in_few_of_a_hundred() -> None:
    false = sum(bool(served(0.5, 0.5, seed=seed).alerts()) for seed in range(1000))
    assert 10 <= false <= 45  # of one side, 2.5 %


def test_a_chat_of_another_run_or_of_what_was_taken_back_tells_nothing_of_what_serves() -> None:
    rig = LedgerRig(replace(SETTINGS, traffic_holdout=1.0), watch=True)
    for run, version in (("r1", 50), ("r2", 3)):
        rig.announce("m", version, run=run)
        for name in ("late", "judged"):
            rig.call(f"{run}-{name}", traffic="chat")
            rig.seal(f"{run}-{name}")
        rig.judge(f"{run}-judged")
    rig.call("ahead", traffic="chat", version=4)
    rig.seal("ahead")
    for late in ("r1-late", "r2-late", "ahead"):
        rig.judge(late)
    assert [one["episodes"] for one in rig.commands.judging.status(rig.at)["holdout"]["m"]] == [2]


def test_the_rewards_of_held_out_chats_count_and_no_others() -> None:
    rig = LedgerRig(replace(SETTINGS, traffic_holdout=1.0, traffic_idle=50.0), watch=True)
    rig.announce("m", 3)
    for name in ("a", "b"):
        calls = [rig.call(name, traffic="chat") for _ in range(2)]
        rig.later(50)
        rig.judge(name, 1.0 if name == "a" else -1.0, call=calls[0])
    rig.call(other := rig.open(trial=True, judged=True))
    rig.seal(other)
    rig.judge(other)
    (call,) = rig.begin("c", traffic="chat")
    rig.lose("c", call)
    rig.reward("c")
    assert rig.state_of("c") == "recorded"
    status = rig.commands.judging.status(rig.at)
    assert status["holdout"] == {"m": [{"policy_versions": [3, 3], "episodes": 2, "mean": 0.0}]}
    rig.announce("m", 2)
    assert rig.commands.judging.status(rig.at)["holdout"] == {}
