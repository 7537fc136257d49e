"""Counts over the whole life of the journal, and what an operator is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.ledger import tallies
from ajet_sdk.errors import AjetError
from ajet_sdk.routes import Judgement
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused
from tests.kit.traffic_rig import TrafficRig


def test_tokens_and_drift_are_counted_when_an_episode_seals(rig: LedgerRig) -> None:
    episode = rig.open(task="t")
    rig.call(episode, (1, 2), (3, 4))
    rig.call(episode, (1, 2, 3, 4, 5), (6,))
    rig.call(episode, (9,), (8,))
    assert rig.state.tallies.tokens == {"prompt": 0, "sampled": 0, "merged": 0, "generated": 4}
    rig.reward(episode)
    assert rig.state.tallies.tokens == {"prompt": 8, "sampled": 4, "merged": 4, "generated": 4}
    assert rig.state.tallies.drift == {"new_chain": 1}
    assert rig.state.tallies.drifts["m"].to_json() == {"turns": 2, "broken_by": {"new_chain": 1}, "rate": None}


def test_every_call_that_is_lost_is_counted_once_with_its_first_reason(rig: LedgerRig) -> None:
    episode = rig.open()
    (gone,) = rig.begin(episode, body="same")
    rig.lose(episode, gone)
    rig.begin(episode, body="same", retry=True)
    (late,) = rig.begin(episode, model="other")
    rig.restart()
    rig.finish(episode, late)
    assert rig.state.tallies.captures == {"disconnected": 1, "restarted": 2}
    (dead,) = rig.begin(episode)
    rig.abort(episode)
    rig.finish(episode, dead)
    assert rig.state.tallies.captures == {"disconnected": 1, "restarted": 2, "episode_discarded": 1}


def test_what_judges_use_is_counted_by_name_and_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of a judgement. What is refused or said again is not counted."""
    rig = TrafficRig()

    def judged(name: str, judge: str, **body: Any) -> None:
        body = {"rewards": ({"value": 1.0},), "tokens": 10} | body
        rig.run(rig.commands.judging.judge(name, Judgement(judge, **body), at=rig.at))

    def tokens() -> Any:
        return rig.commands.judging.status(rig.at)["tokens_today"]

    for name in ("a", "b", "c"):
        rig.awaiting(name)
    judged("a", "one")
    judged("a", "one")
    with refused(AjetError, "already_judged"):
        judged("a", "two")
    judged("b", "one", rewards=(), tokens=5)
    judged("c", "two", withdraw=True)
    assert tokens() == {"one": 15, "two": 10}
    rig.at += 86400
    assert tokens() == {}
    monkeypatch.setattr(tallies, "MOST_JUDGES", 1)
    for name in ("d", "e"):
        rig.awaiting(name)
        judged(name, name)
    assert tokens() == {"e": 10}


def test_calls_that_are_never_scored_are_a_way_out() -> None:
    rig = TrafficRig(watch=False)
    for number in range(30):
        one, two = (rig.chat(f"e{number}") for _ in range(2))
        rig.later(50)
        rig.judge(f"e{number}", 1.0, call=one)
        assert two in rig.state.episodes[f"e{number}"].transcript.calls
    assert rig.commands.judging.status(rig.at)["unjudged_calls"] == {"stop": 30}
    assert "30 of 60 calls with finish reason 'stop'" in rig.state.alerts()["unjudged 'stop'"]


def test_so_are_those_of_episodes_that_a_judge_gives_no_reward_at_all() -> None:
    """Nobody can tell by those that nobody has judged."""
    rig = TrafficRig(watch=False)
    for number in range(60):
        rig.awaiting(f"e{number}")
        rig.judge(f"e{number}", 1.0 if number < 10 else None)
    for number in range(60, 120):
        rig.awaiting(f"e{number}")
    assert "50 of 60 calls with finish reason 'stop'" in rig.state.alerts()["unjudged 'stop'"]


def test_the_latest_calls_count_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "MANY_CALLS", 4)
    rig = TrafficRig()
    for number in range(4):
        rig.awaiting(f"e{number}")
        rig.judge(f"e{number}")
    assert rig.state.tallies.judged_calls == {"stop": 2}
