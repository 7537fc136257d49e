"""The life of episodes as time alone goes on: silence, clocks, stops of the daemon, and the policy of a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.state import LedgerSettings
from tests.kit.ledger_rig import LedgerRig


def test_silence_discards_an_open_episode(rig: LedgerRig) -> None:
    silent, busy, alive = rig.open(), rig.open(), rig.open()
    (call,) = rig.begin(busy)
    rig.at += 60
    rig.heartbeat(alive)
    rig.later(40)
    assert [rig.state_of(name) for name in (silent, busy, alive)] == ["discarded", "open", "open"]
    assert rig.state.episodes[silent].reason == "idle_timeout"
    rig.finish(busy, call)
    rig.later(99)
    assert [rig.state_of(name) for name in (busy, alive)] == ["open", "discarded"]


def test_an_episode_that_is_too_old_is_discarded_whatever_it_does(rig: LedgerRig) -> None:
    episode, ended = rig.open(), rig.open()
    rig.begin(episode)
    rig.call(ended)
    rig.begin(ended)
    rig.reward(ended)
    rig.at += 500
    rig.lose(episode, rig.begin(episode)[0], "truncated")
    rig.later(499)
    assert rig.state_of(episode) == "open"
    rig.later(1)
    assert [rig.state.episodes[name].reason for name in (episode, ended)] == ["wall_timeout"] * 2


def test_time_does_not_run_backwards(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.at -= 500
    (call,) = rig.begin(episode)
    assert rig.state.episodes[episode].transcript.calls[call].asked.started_at == 1000.0
    rig.finish(episode, call)
    rig.reward(episode)
    batch = rig.batch(group_size=1, lease_s=10.0)
    assert rig.state.batches[batch].lease_until == 1010.0
    assert [event.at for event in rig.events] == [1000.0] * len(rig.events)


def test_a_clock_that_was_set_back_over_a_restart(rig: LedgerRig) -> None:
    rig.ready()
    batch = rig.batch(group_size=1, lease_s=60.0)
    episode = rig.open()
    rig.at -= 900
    rig.restart()
    assert (rig.state.batches[batch].lease_until, rig.state.episodes[episode].opening.at) == (rig.at + 60.0, rig.at)


@pytest.mark.parametrize("model", [None, "m"])
@pytest.mark.parametrize("back", [3600.0, 0.0])
def test_an_hour_back_on_the_clock_keeps_no_silent_episode_open(rig: LedgerRig, model: str | None, back: float) -> None:
    """Although a gate was opened by the old clock just before the stop."""
    rig.at = 1e6
    rig.announce("m", 1)
    rig.gate_close(model)
    rig.gate_open(2, model)
    episode = rig.open()
    timeout = rig.state.episodes[episode].opening.idle_timeout
    rig.at -= back
    rig.restart()
    rig.later(timeout - 1)
    assert rig.state_of(episode) == "open"
    rig.later(2)
    assert rig.state.episodes[episode].reason == "idle_timeout"


def test_an_episode_is_merged_by_the_policy_of_its_time() -> None:
    rig = LedgerRig(LedgerSettings(merge_policy="repair"))
    delivered = []
    for policy in ("repair", "strict"):
        rig.state.settings = replace(rig.state.settings, merge_policy=policy)
        rig.restart()
        episode = rig.open(task="t")
        first = rig.call(episode, (1,), (2, 3))
        rig.call(episode, (1, 9, 4), (5,), same_text=(first, 2))
        shown = views.record(rig.state, episode)["timelines"]
        rig.reward(episode)
        assert views.record(rig.state, episode)["timelines"] == shown
        delivered.append((len(shown), [item.get("repaired_tokens") for item in shown]))
    assert delivered == [(1, [1]), (2, [None, None])]
    ready = list(views.ready_episodes(rig.state))
    assert [len(episode.samples) for episode in ready] == [1, 2]
    drift = views.status(rig.state)["drift_by_model"]["m"]
    assert drift["turns"] == 2 and sum(drift["broken_by"].values()) == 2, "what was joined has drifted all the same"
