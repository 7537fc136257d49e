"""Calls that a stop of the daemon ends, whose clients were sent their answers, and those that are taken back. These are
lost while nothing has settled with them: their client was not sent the end, or the engine contradicted it."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from tests.kit.ledger_rig import LedgerRig


@pytest.mark.parametrize("sealed", [False, True])
def test_a_call_whose_end_was_not_sent_is_complete_no_longer(rig: LedgerRig, sealed: bool) -> None:
    """While its episode is unsettled, and whether or not that is sealed; nothing of it is trained."""
    episode = rig.open()
    first, gone = rig.call(episode), rig.call(episode, (1, 2, 3, 4), (5,))
    (running,) = rig.begin(episode)
    if sealed:
        rig.reward(episode)
    assert rig.lose(episode, gone) == ()
    assert rig.lose(episode, gone, taken_back=True) == (ev.CallLost(rig.at, episode, gone, "disconnected"),)
    assert rig.lose(episode, gone, "again", taken_back=True) == () == rig.finish(episode, gone)
    rig.lose(episode, running, taken_back=True)
    if not sealed:
        rig.reward(episode)
    assert [turn.call for turn in rig.state.episodes[episode].transcript.turns()] == [first]
    assert rig.state.tallies.calls == {"running": 0, "complete": 1, "lost": 2}
    assert rig.state.tallies.captures == {"complete": 2, "disconnected": 2}
    batch = rig.batch(group_size=1)
    (delivered,) = views.batch(rig.state, batch).groups[0].episodes
    assert [call for sample in delivered.samples for call in sample.calls] == [first]


@pytest.mark.parametrize("state", ["ready", "leased", "trained", "recorded", "discarded"])
def test_what_an_episode_has_settled_with_is_taken_back_no_more(rig: LedgerRig, state: str) -> None:
    episode = rig.in_state(state)
    before = views.record(rig.state, episode, tokens="all")
    for call in rig.state.episodes[episode].transcript.calls:
        assert rig.lose(episode, call, taken_back=True) == ()
    assert views.record(rig.state, episode, tokens="all") == before


def test_a_restart_ends_calls_in_flight_and_nothing_else(rig: LedgerRig) -> None:
    open_one, sealed = rig.open(), rig.open()
    rig.call(sealed)
    rig.begin(sealed)
    rig.reward(sealed)
    rig.begin(open_one)
    rig.at += 700
    rig.restart()
    assert rig.state.tallies.calls["running"] == 0
    assert [rig.state_of(name) for name in (open_one, sealed)] == ["open", "ready"]
    assert rig.expire() == ()
    rig.later(100)
    assert rig.state.episodes[open_one].reason == "idle_timeout"


def test_whose_clients_were_sent_their_answers(rig: LedgerRig) -> None:
    episode = rig.open()
    first = rig.call(episode)
    rig.at += 1
    second = rig.call(episode)
    third = rig.call(episode)
    assert rig.state.episodes.unsent == {first, second, third}
    assert rig.run(rig.commands.answers_sent([first, "?"], at=rig.at)) == (ev.AnswersSent(rig.at, (first,)),)
    assert rig.state.episodes.unsent == {second, third}
    assert rig.commands.answers_sent([first], ["?"], at=rig.at) == ()
    rig.run(rig.commands.lose_call(episode, second, "disconnected", at=rig.at, taken_back=True))
    rig.run(rig.commands.answers_sent([], [third], at=rig.at))
    assert rig.state.episodes.unsent == set()
    assert [entry.doubtful for entry in rig.state.episodes[episode].transcript.calls.values()] == [False, False, True]
