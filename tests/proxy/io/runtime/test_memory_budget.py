"""Memory for bodies: they are counted as they come, and none is read on for which nothing is left."""

from __future__ import annotations

import asyncio
import json

import pytest

from ajet_proxy.io.runtime.memory_budget import SMALL, MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import NotReady
from tests.kit.answering import Connected, connected
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.front import Front, until
from tests.proxy.serving import CHAT

LARGE = 10 * SMALL


def full(budget: MemoryBudget, size: int = LARGE, more: int = 1) -> bool:
    try:
        budget.check(size, more)
    except NotReady as error:
        return (error.code, error.retry_after) == ("memory_limit", 10.0)
    return False


def test_without_a_limit_there_is_room_for_all() -> None:
    budget = MemoryBudget(Metrics())
    budget.take(1 << 40)
    assert not full(budget)
    budget.leave(1 << 40, whole=True)
    budget.look(0)
    assert full(budget) and not full(budget, more=0), "what was taken before does not count as taken since"


def test_what_is_let_go_of_makes_room_and_what_is_whole_counts_until_the_next_look() -> None:
    metrics = Metrics()
    budget = MemoryBudget(metrics)
    budget.look(100)
    budget.take(60)
    budget.take(40)
    assert full(budget) and not full(budget, more=0) and not full(budget, SMALL), "small ones are always read"
    budget.leave(60, whole=True)
    assert full(budget)
    budget.leave(40, whole=False)
    assert full(budget, more=41) and not full(budget, more=40)
    budget.look(10)
    assert full(budget, more=11) and not full(budget, more=10)
    budget.look(-5)
    assert full(budget) and not full(budget, more=0)
    assert 'ajet_refused_total{reason="memory"} 5' in metrics.render()


def sending(url: str, path: str, length: int, *more: str) -> Connected:
    """A client that says that it sends `length` bytes."""
    said = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return connected(url, ("\r\n".join(said) + f"\r\nContent-Length: {length}\r\n\r\n").encode())


async def told(reader: asyncio.StreamReader) -> tuple[int, str | None, str]:
    """Status, ``Retry-After`` and the code of the error."""
    async with asyncio.timeout(300):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = json.loads(await reader.readuntil(b"}}"))
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    return int(head.split()[1]), headers.get("Retry-After"), body["error"]["code"]


def left(budget: MemoryBudget, size: int) -> bool:
    """Tell whether bodies may take so much more, and nothing beyond it."""
    return full(budget, more=size + 1) and not full(budget, more=size)


PATHS = ("/v1/chat/completions", "/v1/embeddings")


@pytest.mark.parametrize("path", PATHS)
async def test_unfinished_bodies_take_no_more_than_is_left(stub: EngineStub, front: Front, path: str) -> None:
    budget = front.budget
    budget.look(6 * LARGE)
    async with sending(front.url, path, 4 * LARGE) as (_, first), sending(front.url, path, 4 * LARGE) as second:
        first.write(b" " * 3 * LARGE)
        await until(lambda: left(budget, 3 * LARGE))
        reader, writer = second
        writer.write(b" " * 4 * LARGE)
        assert await told(reader) == (503, "10", "memory_limit")
        await until(lambda: left(budget, 3 * LARGE))
        async with sending(front.url, path, 4 * LARGE) as (reader, writer):  # answered before a byte of it
            assert await told(reader) == (503, "10", "memory_limit")
            writer.write(b" " * 4 * LARGE)  # which a client sends all the same, and is heard
            await writer.drain()
    await until(lambda: left(budget, 6 * LARGE))
    assert not stub.requests


async def test_a_body_for_which_there_is_room_is_read_whole(front: Front) -> None:
    front.budget.look(2 * LARGE)
    body = json.dumps(CHAT).encode() + b" " * LARGE
    for code in (200, 503, 200):
        async with sending(front.url, PATHS[0], len(body)) as (reader, writer):
            writer.write(body)
            status = (await reader.readuntil(b"\r\n")).split()[1]
            assert int(status) == code
        if code == 503:
            front.budget.look(2 * LARGE)


async def test_nobody_is_asked_for_a_body_for_which_there_is_no_room(front: Front) -> None:
    front.budget.look(0)
    async with sending(front.url, PATHS[1], LARGE, "Expect: 100-continue") as (reader, _):
        assert await told(reader) == (503, "10", "memory_limit")
