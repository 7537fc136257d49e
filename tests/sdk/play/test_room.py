"""A world that is full: no attempt, fewer at once, pauses that grow, and an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import aio
from ajet_sdk.play import schedule
from ajet_sdk.play.program import Program, run_program
from ajet_sdk.play.schedule import FULL_S, MOST_S, Room, pause_after
from tests.kit.control_stub import ControlStub


@pytest.fixture(autouse=True)
def undrawn(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_sdk.client.Client.chance", staticmethod(lambda: 0.0))


def test_pauses_grow_up_to_a_bound_and_chance_takes_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "AGAIN_S", 1.0)
    assert [pause_after(failures) for failures in (0, 1, 2, 3, 9999)] == [1.0, 4.0, 16.0, MOST_S, MOST_S]
    monkeypatch.setattr("ajet_sdk.client.Client.chance", staticmethod(lambda: 1.0))
    assert pause_after(0) == 0.5


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_as_many_begin_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "AGAIN_S", 1.0)
    clock = Clock()
    room = Room(clock)
    assert [room.begins() for _ in range(8)] == [True] * 8
    for _ in range(7):
        room.ended(full=True)
    assert (room.playing, room.begins()) == (1, False)
    clock.now = 1.0
    assert [room.begins(), room.begins()] == [True, False], "one finds out"
    room.ended(full=True)
    clock.now = 4.9
    assert not room.begins(), "the pause has grown"
    room.ended(full=False)
    assert [room.begins(), room.begins()] == [True, False], "the place of one that ended is taken at once"
    room.ended(full=True)
    assert not room.begins()
    clock.now = 5.9
    assert room.begins(), "and if it was not free yet, after a short pause"
    clock.now = 70.0
    assert room.begins()
    room.ended(full=False)
    room.left()
    assert [room.begins() for _ in range(3)] == [True, True, False], "two have found room together"
    assert not room.over


def test_a_world_that_stays_full_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "AGAIN_S", 1.0)
    clock = Clock()
    room = Room(clock)
    tries = 0
    while not room.over:
        if room.begins():
            tries += 1
            room.ended(full=True)
        clock.now += 1.0
    assert FULL_S <= clock.now <= FULL_S + MOST_S and tries < 40


async def test_eight_players_of_one_place_play_everything(stub: ControlStub) -> None:
    place, at_once = asyncio.Lock(), asyncio.Event()
    refused = 0

    async def agent(task: str, episode: Any) -> float:
        nonlocal refused
        if place.locked():
            refused += 1
            if refused == 7:
                at_once.set()
            try:
                raise RuntimeError("no session")
            except RuntimeError as error:
                raise ajet_sdk.Busy("the server has one place") from error
        async with place:
            await at_once.wait()
            return 1.0

    results = await aio.run(agent, [f"t{number}" for number in range(16)], repeat=1, parallel=8, retries=0)
    assert (len(results.rewards), results.failures) == (16, []), "none of it was an attempt"
    assert refused >= 7 and {item.reason for item in results if not item.ok} == {"the server has one place"}
    ended = [(record["detail"], record["cause"]) for record in stub.episodes.values() if record["state"] == "discarded"]
    assert ended == [("the server has one place", "infra")] * refused


@pytest.mark.parametrize("play", [None, "d"])
async def test_a_run_of_a_full_world_ends_and_says_so(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch, play: str | None
) -> None:
    clock = iter(range(0, 10**9, 500))
    monkeypatch.setattr("ajet_sdk.client.Client.clock", staticmethod(lambda: float(next(clock))))
    said: list[str] = []

    async def agent(task: str, episode: Any) -> float:
        raise RuntimeError(ajet_sdk.Busy())

    how: dict[str, Any] = {"play": play, "retries": 0, "deadline": 9e9}
    results = await aio.run(agent, ["a", "b"], repeat=1, parallel=1, say=said.append, **how)
    assert said[-1] == "the world has been full for 30 minutes in which nothing of this run played: no more begins"
    assert not results.rewards and [item.infra for item in results if not item.again] == [True]
    assert "open" not in {record["state"] for record in stub.episodes.values()}


def test_a_program_says_it_by_exit_code_69(stub: ControlStub, tmp_path: Any) -> None:
    script = f"test -e {tmp_path}/place && exit 0; touch {tmp_path}/place; exit 69"
    first, second = run_program(Program(("sh", "-c", script)), ["t"], retries=0)
    assert (first.reason, first.infra, first.again, second.reward) == ("exit code 69", True, True, 1.0)
    assert stub.episodes["ep-0"]["cause"] == "infra"
