from __future__ import annotations

from ajet_trainer.idle import Idle
from tests.trainer.test_link import Clock


def test_shares_are_of_the_time_between_two_steps() -> None:
    clock = Clock()
    idle = Idle(clock)
    assert idle.shares(0.0, 100.0) == {"trainer": 0.0, "engine": None}
    clock.now += 8.0
    assert idle.shares(3.0, 106.0) == {"trainer": 0.375, "engine": 0.25}
    clock.now += 4.0
    assert idle.shares(3.0, 106.0) == {"trainer": 0.0, "engine": 1.0}


def test_a_daemon_that_started_anew_counts_from_zero() -> None:
    clock = Clock()
    idle = Idle(clock)
    idle.shares(0.0, 100.0)
    clock.now += 10.0
    assert idle.shares(0.0, 4.0)["engine"] == 0.6
    clock.now += 10.0
    assert idle.shares(0.0, 9.0)["engine"] == 0.5


def test_a_daemon_that_did_not_tell_at_both_ends_has_no_share() -> None:
    clock = Clock()
    idle = Idle(clock)
    for busy, share in ((0.0, None), (None, None), (5.0, None), (9.0, 0.6)):
        assert idle.shares(0.0, busy)["engine"] == share
        clock.now += 10.0


def test_clocks_of_two_processes_make_no_share_beyond_its_ends() -> None:
    clock = Clock()
    idle = Idle(clock)
    idle.shares(0.0, 0.0)
    clock.now += 1.0
    assert idle.shares(0.0, 1.0001)["engine"] == 0.0
    assert 0.0 <= (idle.shares(0.0, 1.0001)["engine"] or 0.0) <= 1.0
