"""Openings that wait for room, with a room that is set by hand."""

from __future__ import annotations

import asyncio

import pytest

from ajet_proxy.core.ledger.progress import GroupKey
from ajet_proxy.io.control import pace
from ajet_proxy.io.control.pace import Pace

SIZE = 3


class Lanes:
    """`enter` takes a place of its lane's room, as an opening does, in a group of `SIZE` episodes."""

    def __init__(self, **room: int | None) -> None:
        self.room: dict[str, int | None] = dict(room)
        self.looks = 0
        self.lacking: dict[str, int] = {}
        self.pace = Pace(self.look, lambda group_key, models: self.lacking.get(group_key.task, 0))
        self.entered: list[str] = []

    def look(self, lane: str, models: tuple[str, ...]) -> int | None:
        self.looks += 1
        return self.room[lane]

    async def enter(self, lane: str, who: str = "", hold_s: float = 300.0, task: str = "t") -> bool:
        may = await self.pace.enter(GroupKey(lane, task, ""), hold_s, name=who or None)
        room = self.room[lane]
        if may and room is not None:
            assert room > 0
            self.room[lane] = room - 1
            self.lacking[task] = (self.lacking.get(task, 0) - 1) % SIZE
            self.pace.changed()
        self.entered += [who] if may else []
        return may

    def let_in(self, lane: str, room: int | None) -> None:
        self.room[lane] = room
        self.pace.changed()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_where_there_is_room_nobody_waits() -> None:
    lanes = Lanes(a=None, b=1)
    assert await lanes.enter("a") and await lanes.enter("b")
    assert not await lanes.enter("b", hold_s=0.01)
    assert lanes.pace._waiting == {}


async def test_who_came_first_goes_first_and_newcomers_stand_behind() -> None:
    lanes = Lanes(a=0, b=0)
    waiting = [asyncio.create_task(lanes.enter("a", who)) for who in "123"]
    other = asyncio.create_task(lanes.enter("b", "other"))
    await settled()
    lanes.let_in("a", 2)
    late = asyncio.create_task(lanes.enter("a", "late"))
    await settled()
    assert lanes.entered == ["1", "2"]
    lanes.let_in("a", None)
    await settled()
    assert lanes.entered == ["1", "2", "3", "late"]
    assert await asyncio.gather(*waiting, late) == [True] * 4
    lanes.let_in("b", 1)
    assert await other


async def test_who_completes_a_group_goes_before_who_begins_another() -> None:
    lanes = Lanes(a=0)
    names = ["x1", "y1", "z1", "x2", "y2", "z2", "x3", "y3", "z3", "x4"]
    waiting = [asyncio.create_task(lanes.enter("a", name, task=name[0])) for name in names]
    await settled()
    lanes.lacking["y"] = 2
    for _ in names:
        lanes.let_in("a", 1)
        await settled()
    assert lanes.entered == ["y1", "y2", "x1", "x2", "x3", "z1", "z2", "z3", "y3", "x4"]
    assert all(await asyncio.gather(*waiting))


async def test_room_for_several_goes_to_few_groups() -> None:
    lanes = Lanes(a=0)
    waiting = [asyncio.create_task(lanes.enter("a", f"{task}{at}", task=task)) for at in range(4) for task in "xyz"]
    await settled()
    lanes.let_in("a", 6)
    await settled()
    assert sorted(lanes.entered) == ["x0", "x1", "x2", "x3", "y0", "y1"]
    lanes.let_in("a", None)
    assert all(await asyncio.gather(*waiting))


async def test_who_leaves_keeps_nobody_waiting() -> None:
    lanes = Lanes(a=0)
    first, second = (asyncio.create_task(lanes.enter("a", who)) for who in "12")
    await settled()
    lanes.let_in("a", 1)
    first.cancel()
    assert await second, "the room of one who was woken and goes away is the next one's"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not lanes.pace._waiting and not lanes.pace._woken


async def test_who_asks_again_stands_where_he_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "AGAIN_S", 600.0)
    lanes = Lanes(a=0)
    assert not await lanes.enter("a", "1", hold_s=0.01, task="s")
    others = [asyncio.create_task(lanes.enter("a", who)) for who in "23"]
    await settled()
    again = asyncio.create_task(lanes.enter("a", "1", task="u"))
    await settled()
    lanes.let_in("a", 1)
    await settled()
    assert lanes.entered == ["1"] and await again
    monkeypatch.setattr(pace, "AGAIN_S", 0.0)
    assert not await lanes.enter("a", "4", hold_s=0.01)
    late = [asyncio.create_task(lanes.enter("a", who)) for who in "54"]
    await settled()
    lanes.let_in("a", None)
    await asyncio.gather(*others, *late)
    assert lanes.entered == ["1", "2", "3", "5", "4"]


async def test_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MOST_KEPT", 2)
    lanes = Lanes(a=0)
    for who in "1234":
        assert not await lanes.enter("a", who, hold_s=0.0)
    assert list(lanes.pace._kept) == ["3", "4"]
    monkeypatch.setattr(pace, "AGAIN_S", 0.0)
    for _ in range(3):
        assert not await lanes.enter("a", "5", hold_s=0.0)
    assert len(lanes.pace._kept) <= 2


async def test_it_says_where_anybody_waits() -> None:
    line = Pace(lambda lane, models: 0)
    waiting = [asyncio.create_task(line.enter(GroupKey(lane, "t", ""), 30.0)) for lane in "ab"]
    await settled()
    assert line.full() == [("a", ()), ("b", ())]
    line.stop()
    await asyncio.gather(*waiting)
    assert line.full() == []


async def test_room_that_is_gone_again_is_waited_for() -> None:
    lanes = Lanes(a=0)
    waiting = asyncio.create_task(lanes.enter("a", "1"))
    await settled()
    lanes.let_in("a", 1)
    lanes.room["a"] = 0
    await settled()
    assert not waiting.done()
    lanes.let_in("a", 1)
    assert await waiting


async def test_whatever_happens_few_of_many_look_again() -> None:
    lanes = Lanes(a=0)
    waiting = [asyncio.create_task(lanes.enter("a", str(number))) for number in range(1000)]
    await settled()
    lanes.looks = 0
    for _ in range(100):
        lanes.pace.changed()
    await settled()
    assert lanes.looks == 100
    lanes.pace.stop()
    assert await asyncio.gather(*waiting) == [False] * 1000
    assert not await lanes.enter("a")


@pytest.mark.parametrize("room", [None, 1000])
async def test_many_for_whom_there_is_room_are_woken_once_each(room: int | None) -> None:
    asked = list[str]()
    lanes = Lanes(a=0)
    line = lanes.pace = Pace(lanes.look, lambda group_key, models: asked.append(group_key.task) or 0)
    waiting = [asyncio.create_task(lanes.enter("a", str(number), task=str(number))) for number in range(1000)]
    await settled()
    lanes.let_in("a", room)
    assert await asyncio.gather(*waiting) == [True] * 1000
    assert len(asked) <= 1000 and not line._waiting and not line._woken


async def test_of_several_models_who_waits_for_longest_goes_first() -> None:
    """Both wait for the room of m, and it is enough for one."""
    room = {("m",): 0, ("m", "n"): 0}
    line, entered = Pace(lambda _, models: room[models]), list[str]()

    async def enter(who: str, models: tuple[str, ...]) -> None:
        if await line.enter(GroupKey("a", who, ""), 30.0, models):
            room.update(dict.fromkeys(room, 0))
            entered.append(who)

    names = {"team": ("m", "n"), "alone": ("m",), "late": ("m", "n")}
    waiting = [asyncio.create_task(enter(*item)) for item in names.items()]
    await settled()
    for _ in names:
        room.update(dict.fromkeys(room, 1))
        line.changed()
        await settled()
    await asyncio.gather(*waiting)
    assert entered == ["team", "alone", "late"]
