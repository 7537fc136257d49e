from __future__ import annotations

from contextlib import suppress

from ajet_trainer.idle import Idle
from tests.trainer.test_link import Clock

A, B = "http://a", "http://b"


def test_shares_are_of_the_time_between_two_steps() -> None:
    clock = Clock()
    idle = Idle(clock)
    assert idle.shares({A: 100.0}) == {"trainer": 0.0, "engine": None}
    with idle.waiting():
        clock.now += 2.0
    clock.now += 5.0
    with idle.waiting():
        clock.now += 1.0
    assert idle.shares({A: 106.0}) == {"trainer": 0.375, "engine": 0.25}
    clock.now += 4.0
    assert idle.shares({A: 106.0}) == {"trainer": 0.0, "engine": 1.0}


def test_a_daemon_that_started_anew_counts_from_zero() -> None:
    clock = Clock()
    idle = Idle(clock)
    idle.shares({A: 100.0})
    clock.now += 10.0
    assert idle.shares({A: 4.0})["engine"] == 0.6
    clock.now += 10.0
    assert idle.shares({A: 9.0})["engine"] == 0.5


def test_of_several_daemons_the_mean_counts_and_one_that_was_away_does_not() -> None:
    clock = Clock()
    idle = Idle(clock)
    idle.shares({A: 0.0, B: 0.0})
    clock.now += 10.0
    assert idle.shares({A: 10.0, B: 5.0})["engine"] == 0.25
    clock.now += 10.0
    assert idle.shares({A: 12.0})["engine"] == 0.8
    clock.now += 10.0
    assert idle.shares({A: 12.0, B: 15.0})["engine"] == 1.0
    clock.now += 10.0
    assert idle.shares({})["engine"] is None


def test_clocks_of_two_processes_make_no_share_beyond_its_ends() -> None:
    clock = Clock()
    idle = Idle(clock)
    idle.shares({A: 0.0})
    clock.now += 1.0
    assert idle.shares({A: 1.0001})["engine"] == 0.0
    assert 0.0 <= (idle.shares({A: 1.0001})["engine"] or 0.0) <= 1.0


def test_a_wait_that_ends_in_an_error_was_one() -> None:
    clock = Clock()
    idle = Idle(clock)
    with suppress(KeyError), idle.waiting():
        clock.now += 1.0
        raise KeyError
    clock.now += 1.0
    assert idle.shares({})["trainer"] == 0.5
