"""Drift is counted by model over whole episodes, its rate is that of the latest turns, and only a rate warns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import views
from ajet_proxy.core.trajectory.drift_rate import LEAST, LIMIT, WINDOW, Drift, by_model
from ajet_proxy.core.trajectory.timeline import merge
from tests.kit.ledger_rig import LedgerRig, picture
from tests.kit.strategies import make_call, tangled_calls

ANSWER = (5, 6, 7, 2)
GOES_ON = (1, 2, *ANSWER, 9)
RETOKENIZED = (1, 2, 5, 99, 98, 2, 9)


def counted(*reasons: str) -> Counter[str]:
    return Counter(reasons)


@given(tangled_calls())
def test_a_turn_is_a_call_behind_another_of_its_model_and_agent(calls: list) -> None:  # type: ignore[type-arg]
    timelines = merge(calls)
    found = by_model(timelines)
    kinds = {(call.model, call.agent) for call in calls}
    assert sum(turns for turns, _ in found.values()) == len(calls) - len(kinds)
    broken = sum((reasons for _, reasons in found.values()), Counter())
    assert broken == counted(*(timeline.broken_by for timeline in timelines if timeline.broken_by))
    assert all(turns >= reasons.total() for turns, reasons in found.values())


def test_models_are_counted_apart() -> None:
    calls = [
        make_call("a", (1, 2), ANSWER, at=1), make_call("b", GOES_ON, (8,), at=2),
        make_call("c", (1, 2), ANSWER, at=3, model="n"), make_call("d", RETOKENIZED, (8,), at=4, model="n"),
        make_call("e", (1,), (2,), at=5, model="alone"),
    ]
    assert by_model(merge(calls)) == {"m": (1, counted()), "n": (1, counted("retokenized"))}


def test_without_merging_nothing_is_known() -> None:
    calls = [make_call("a", (1, 2), ANSWER, at=1), make_call("b", RETOKENIZED, (8,), at=2)]
    assert by_model(merge(calls, "off")) == {}


def test_only_a_rate_over_the_limit_warns() -> None:
    drift = Drift()
    drift.add(LEAST - 1, Counter({"template": LEAST - 1}))
    assert (drift.rate, drift.alert("m")) == (None, None)
    drift.add(1, counted("retokenized"))
    assert drift.rate == 1.0
    line = drift.alert("m")
    assert line is not None
    for words in ("model 'm'", f"{LEAST} of the last {LEAST} turns (100.0%)", "over the limit of 5.0%",
                  f"retokenized 1, template {LEAST - 1}"):
        assert words in line
    seldom = Drift()
    seldom.add(100, Counter({"template": 5}))
    assert (seldom.rate, seldom.alert("m")) == (LIMIT, None)


def test_what_an_agent_does_to_its_history_is_no_drift() -> None:
    drift = Drift()
    drift.add(100, Counter({"history_edited": 40, "compacted": 20, "parallel": 20, "new_chain": 5}))
    assert drift.rate == 0.0
    assert drift.to_json()["broken_by"]["history_edited"] == 40


def test_the_rate_forgets_and_the_counters_do_not() -> None:
    drift = Drift()
    drift.add(WINDOW, Counter(template=WINDOW))
    assert drift.rate == 1.0
    for _ in range(WINDOW // 10):
        drift.add(10, counted())
    assert drift.rate == 0.0
    assert (drift.turns, drift.broken["template"]) == (2 * WINDOW, WINDOW)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=30))
def test_the_rate_is_that_of_the_shortest_end_that_fills_the_window(episodes: list[tuple[int, int]]) -> None:
    drift = Drift()
    for turns, drifted in episodes:
        drift.add(turns, Counter(template=min(turns, drifted)))
    turns = bad = 0
    for count, drifted in reversed(episodes):
        turns, bad = turns + count, bad + min(count, drifted)
        if turns >= WINDOW:
            break
    assert drift.rate == (bad / turns if turns >= LEAST else None)


def test_the_ledger_warns_and_shows_where() -> None:
    rig = LedgerRig(watch=True)
    for _ in range(LEAST):
        episode = rig.open(task="t", eval=True)
        rig.call(episode, (1, 2), ANSWER)
        assert rig.state.alerts() == {}
        rig.call(episode, RETOKENIZED, (8,))
        rig.reward(episode)
    assert len(rig.state.alerts()) == 1
    assert views.status(rig.state)["drift_by_model"]["m"] == {
        "turns": LEAST, "broken_by": {"retokenized": LEAST}, "rate": 1.0
    }
    assert views.record(rig.state, episode)["drift"] == {"m": {"turns": 1, "broken_by": {"retokenized": 1}}}
    again = LedgerRig(rig.state.settings)
    again.run(rig.events)
    assert picture(again.state) == picture(rig.state)
