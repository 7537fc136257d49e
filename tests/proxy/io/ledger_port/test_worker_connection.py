"""Two ends of a socket that ask and tell each other: order, errors, withdrawal, and the death of one of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest
from msgspec import Struct

from ajet_proxy.io.ledger_port.worker_connection import LARGE, Form, Values, WorkerConnection, fields
from ajet_sdk.errors import AjetError, Conflict, NotReady
from tests.proxy.io.front import leave, until


class Point(Struct, frozen=True):
    x: int
    name: str


class Line(Struct, frozen=True):
    ends: tuple[Point, Point]
    labels: frozenset[str]


VALUES = Values((fields(Point), Form(
    Line, lambda line: [line.ends, sorted(line.labels)], lambda told: Line(told[0], frozenset(told[1]))
)))  # fmt: skip


class Other:
    """Remembers what it hears, and answers once it may."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.may = asyncio.Event()
        self.withdrawn = 0
        self.alone = asyncio.Event()

    def ask(self, what: str, values: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        return self.answer(what, values)

    def notified(self, what: str, values: Sequence[Any]) -> None:
        self.heard.append((what, *values))

    def lost(self) -> None:
        self.alone.set()

    async def answer(self, what: str, values: Sequence[Any]) -> Any:
        self.heard.append((what, *values))
        if what == "raise":
            raise values[0]
        if what == "wait":
            try:
                await self.may.wait()
            except asyncio.CancelledError:
                self.withdrawn += 1
                raise
        return values


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[WorkerConnection, Other]]:
    loop, other, sockets = asyncio.get_running_loop(), Other(), socket.socketpair()
    _, there = await loop.create_connection(lambda: WorkerConnection(VALUES, lambda _: other), sock=sockets[0])
    mine = Other()
    _, here = await loop.create_connection(lambda: WorkerConnection(VALUES, lambda _: mine), sock=sockets[1])
    try:
        yield here, other
    finally:
        here.close()
        there.close()
        await asyncio.gather(other.alone.wait(), mine.alone.wait())
        await asyncio.sleep(0)


@pytest.mark.parametrize("value", [
    Point(1, "a"), Line((Point(1, "a"), Point(2, "\ud800")), frozenset("xy")), {"deep": (Point(1, ""),)}, None, 2**63,
    -0.5, float("inf"), b"\x00" * 3_000_000, tuple(range(100_000)), {1: "one"},
], ids=lambda value: type(value).__name__)  # fmt: skip
async def test_a_value_crosses_and_comes_back(value: Any) -> None:
    async with pair() as (here, _):
        assert await here.ask("echo", value, 1) == (value, 1)


def test_what_neither_end_knows_does_not_cross() -> None:
    packer = VALUES.packer()
    for _ in range(2):
        with pytest.raises(TypeError, match="set does not cross"):
            packer.pack([Point(1, "a"), {1}])
        assert packer.pack([1]) == b"\x91\x01", "nothing is left of what was refused"


async def test_the_memory_of_a_large_message_is_let_go() -> None:
    async with pair() as (here, _):
        packer = here._packer
        await here.ask("echo", b"small")
        assert here._packer is packer
        await here.ask("echo", bytes(LARGE))
        assert here._packer is not packer


async def test_messages_arrive_in_order_and_a_question_begins_at_once() -> None:
    async with pair() as (here, other):
        waiting = [asyncio.ensure_future(here.ask("wait", number)) for number in range(2)]
        await asyncio.sleep(0)
        here.notify("word", 7)
        assert await here.ask("echo", 8) == (8,)
        assert other.heard == [("wait", 0), ("wait", 1), ("word", 7), ("echo", 8)]
        other.may.set()
        assert await asyncio.gather(*waiting) == [(0,), (1,)]


@pytest.mark.parametrize("error", [
    Conflict("so", code="c", param="p"), NotReady("later", retry_after=2.5), AjetError("what"),
])  # fmt: skip
async def test_an_error_crosses_as_what_it_is(error: AjetError) -> None:
    async with pair() as (here, other):
        other.answer = lambda what, values: failing(error)  # type: ignore[method-assign]
        with pytest.raises(type(error)) as caught:
            await here.ask("raise")
        assert vars(caught.value) == vars(error)


async def failing(error: Exception) -> None:
    raise error


async def test_a_defect_is_logged_here_and_no_more_than_a_defect_there(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as (here, other):
        other.answer = lambda what, values: failing(ZeroDivisionError("secret"))  # type: ignore[method-assign]
        with pytest.raises(AjetError) as caught:
            await here.ask("raise")
    assert caught.value.code == "internal_error" and "secret" not in str(caught.value)
    assert "ZeroDivisionError" in caplog.text


async def test_whoever_goes_away_withdraws_the_question() -> None:
    async with pair() as (here, other):
        asked = asyncio.ensure_future(here.ask("wait"))
        await until(lambda: other.heard)
        await leave(asked)
        await until(lambda: other.withdrawn)
        assert await here.ask("echo") == ()


async def test_when_one_end_dies_the_other_is_told_and_nobody_waits() -> None:
    async with pair() as (here, other):
        asked = asyncio.ensure_future(here.ask("wait"))
        await until(lambda: other.heard)
        here.notify("last word")
        here.close()
        await other.alone.wait()
        with pytest.raises(ConnectionResetError):
            await asked
        with pytest.raises(ConnectionResetError):
            await here.ask("echo")
        here.notify("nobody hears this")
        await until(lambda: other.withdrawn)
        assert other.heard[-1] == ("last word",)
