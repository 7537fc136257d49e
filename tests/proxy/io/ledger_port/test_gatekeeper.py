"""The gate: hold, count, drain."""

from __future__ import annotations

import asyncio

import pytest

from ajet_proxy.io.ledger_port import gatekeeper
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_sdk.errors import NotReady


class Door:
    open = True


def make(hold_s: float = 300.0) -> tuple[Door, Gatekeeper]:
    door = Door()
    return door, Gatekeeper(is_open=lambda model: door.open, hold_s=hold_s)


async def visit(gate: Gatekeeper, log: list[str], name: str, leave: asyncio.Event | None = None) -> None:
    async with gate.enter():
        log.append(name)
        if leave is not None:
            await leave.wait()


async def test_an_open_gate_lets_through_at_once_and_counts() -> None:
    _, gate = make()
    async with gate.enter(), gate.enter():
        assert gate.in_flight == 2
    assert (gate.in_flight, gate.waiting) == (0, 0)


async def test_a_closed_gate_holds_until_it_opens() -> None:
    door, gate = make()
    door.open = False
    log: list[str] = []
    tasks = [asyncio.create_task(visit(gate, log, str(number))) for number in range(3)]
    await asyncio.sleep(0.01)
    assert (log, gate.waiting, gate.in_flight) == ([], 3, 0)
    gate.changed()
    await asyncio.sleep(0.01)
    assert log == []
    door.open = True
    gate.changed()
    await asyncio.gather(*tasks)
    assert log == ["0", "1", "2"]
    assert gate.waiting == 0


async def test_the_seconds_in_which_anybody_is_inside_are_counted_once_and_never_fall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, (door, gate) = [100.0], make()
    monkeypatch.setattr(gatekeeper, "perf_counter", lambda: now[0])
    assert gate.busy_s == 0
    now[0] += 5
    async with gate.enter():
        now[0] += 1
        async with gate.enter():
            now[0] += 2
            assert gate.busy_s == 3
        now[0] += 4
        assert gate.busy_s == 7
    now[0] += 50
    assert gate.busy_s == 7
    door.open = False
    held = asyncio.create_task(visit(gate, [], "held"))
    await asyncio.sleep(0)
    now[0] += 50
    assert (gate.waiting, gate.busy_s) == (1, 7)
    door.open = True
    gate.changed()
    await held
    log, leave = list[str](), asyncio.Event()
    cancelled = asyncio.create_task(visit(gate, log, "cancelled", leave))
    await asyncio.sleep(0)
    now[0] += 0.5
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    now[0] += 50
    assert (log, gate.busy_s) == (["cancelled"], 7.5)


async def test_how_long_each_was_held_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told, door = [100.0], list[float](), Door()
    monkeypatch.setattr(gatekeeper, "perf_counter", lambda: now[0])
    gate = Gatekeeper(is_open=lambda model: door.open, hold_s=300.0, waited=told.append)
    async with gate.enter():
        assert told == [0.0]
    door.open = False
    held = asyncio.create_task(visit(gate, [], "held"))
    await asyncio.sleep(0)
    now[0] += 5
    door.open = True
    gate.changed()
    await held
    assert told == [0.0, 5.0]


async def test_who_waits_too_long_is_told_when_to_come_back() -> None:
    door, gate = make(hold_s=0.02)
    door.open = False
    with pytest.raises(NotReady, match="gate is closed") as caught:
        await visit(gate, [], "a")
    assert caught.value.retry_after is not None
    assert gate.waiting == 0


async def test_no_engine_is_a_closed_gate_with_its_own_words() -> None:
    _, gate = make(hold_s=0.02)
    with pytest.raises(NotReady, match="no engine"):
        async with gate.enter(ready=lambda: False):
            pass
    async with gate.enter(ready=lambda: True):
        assert gate.in_flight == 1


async def test_draining_waits_for_those_inside() -> None:
    door, gate = make()
    leave = asyncio.Event()
    log: list[str] = []
    inside = asyncio.create_task(visit(gate, log, "inside", leave))
    await asyncio.sleep(0)
    door.open = False
    assert not await gate.drained(0.02)
    drained = asyncio.create_task(gate.drained(300.0))
    late = asyncio.create_task(visit(gate, log, "late"))
    await asyncio.sleep(0.01)
    leave.set()
    assert await drained
    await inside
    assert log == ["inside"]
    door.open = True
    gate.changed()
    await late
    assert await gate.drained(0)


async def test_an_exception_or_a_cancelled_wait_leaves_the_counts_right() -> None:
    door, gate = make()
    with pytest.raises(ZeroDivisionError):
        async with gate.enter():
            raise ZeroDivisionError
    door.open = False
    held = asyncio.create_task(visit(gate, [], "held"))
    await asyncio.sleep(0.01)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert (gate.in_flight, gate.waiting) == (0, 0)


async def test_when_the_proxy_stops_those_held_are_sent_away() -> None:
    door, gate = make()
    door.open = False
    held = asyncio.create_task(visit(gate, [], "held"))
    await asyncio.sleep(0.01)
    gate.stop()
    with pytest.raises(NotReady, match="stopping"):
        await held
    with pytest.raises(NotReady, match="stopping"):
        await visit(gate, [], "new")
    door.open = True
    async with gate.enter():
        pass


async def test_each_model_is_held_counted_and_drained_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shut = [0.0], {"a"}
    monkeypatch.setattr(gatekeeper, "perf_counter", lambda: now[0])
    gate = Gatekeeper(is_open=lambda model: model not in shut, hold_s=300.0)
    leave, inside = asyncio.Event(), asyncio.Event()

    async def ask(model: str) -> None:
        async with gate.enter(lambda: model):
            inside.set()
            await leave.wait()

    held, free = asyncio.create_task(ask("a")), asyncio.create_task(ask("b"))
    await inside.wait()
    now[0] = 3.0
    assert [(one.in_flight, one.waiting, one.busy_s) for one in (gate.of("a"), gate.of("b"), gate)] == [
        (0, 1, 0.0), (1, 0, 3.0), (1, 1, 3.0),
    ]  # fmt: skip
    assert await gate.drained(0.0, lambda model: model == "a")
    assert not await gate.drained(0.0, lambda model: model == "b")
    assert (gate.inside(), gate.inside(lambda model: model == "a")) == (1, 0)
    drained = asyncio.create_task(gate.drained(300.0, lambda model: model == "b"))
    leave.set()
    await free
    assert await drained
    shut.clear()
    gate.changed()
    await held
    assert (gate.of("nobody").busy_s, gate.in_flight, gate.waiting) == (0.0, 0, 0)


async def test_those_who_are_held_do_not_look_again_as_others_come_and_go() -> None:
    looks = list[str]()
    gate = Gatekeeper(is_open=lambda model: looks.append(model) or model == "b", hold_s=300.0)

    async def held() -> None:
        async with gate.enter(lambda: "a"):
            pass

    waiting = [asyncio.create_task(held()) for _ in range(100)]
    await asyncio.sleep(0)
    before = looks.count("a")
    for _ in range(10):
        async with gate.enter(lambda: "b"):
            pass
        await asyncio.sleep(0)
    assert looks.count("a") == before
    gate.is_open = lambda model: True
    gate.changed()
    await asyncio.gather(*waiting)


async def test_who_waits_is_known_by_episode() -> None:
    door, gate = make()
    door.open = False

    async def ask(episode: str) -> None:
        async with gate.enter(episode=episode):
            assert episode not in gate.held

    held = [asyncio.create_task(ask(episode)) for episode in ("a", "b", "a")]
    await asyncio.sleep(0)
    assert gate.held == {"a": 2, "b": 1}
    held[0].cancel()
    await asyncio.gather(held[0], return_exceptions=True)
    assert gate.held == {"a": 1, "b": 1}
    door.open = True
    gate.changed()
    await asyncio.gather(*held[1:])
    assert gate.held == {}


async def test_as_whose_a_request_counts_may_change_while_it_waits() -> None:
    home = ["a"]
    gate = Gatekeeper(is_open=lambda model: model != "a", hold_s=300.0)
    entered = asyncio.Event()

    async def ask() -> None:
        async with gate.enter(lambda: home[0]):
            assert (gate.of("a").waiting, gate.of("b").in_flight) == (0, 1)
            entered.set()

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    assert gate.of("a").waiting == 1
    home[0] = "b"
    gate.changed()
    await asking
    assert entered.is_set()
