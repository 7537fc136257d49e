"""The short way of a stream carries everyday pieces, and leaves all else, untouched, to the task that it wakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from ajet_proxy.io.capture.streaming import Shortcut
from ajet_proxy.io.http.aiohttp_internals import Tap

CHUNKED = {"Transfer-Encoding": "chunked"}


class Reader(asyncio.Protocol):
    """Stands for aiohttp's side of the engine's connection: what comes is in `content`."""

    def __init__(self) -> None:
        protocol = BaseProtocol(asyncio.get_running_loop())
        protocol.connection_made(asyncio.Transport())
        self.content = aiohttp.StreamReader(protocol, 2**16, loop=asyncio.get_running_loop())

    def data_received(self, data: bytes) -> None:
        self.content.feed_data(data)


class Client:
    """Stands for the transport to the client; `waiting` bytes have not been sent yet."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.waiting = 0
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing


class Incoming:
    """Stands for the engine's answer, which has a connection until it is all there."""

    def __init__(self, content: aiohttp.StreamReader, protocol: object) -> None:
        self.content = content
        self._connection = SimpleNamespace(transport=SimpleNamespace(get_protocol=lambda: protocol))

    @property
    def connection(self) -> SimpleNamespace | None:
        return None if self.content.is_eof() else self._connection


class Scene:
    """A flow with nothing real around it but the reader; `ended` is what `enough` says."""

    def __init__(
        self, *, headers: dict[str, str] | None = None, pooled: bool = True, client: bool = True,
        take: Callable[[bytes], list[bytes]] = lambda data: [data],
    ) -> None:
        self.reader, self.client, self.ended = Reader(), Client(), False
        self.content = self.reader.content
        self.way = Tap(self.reader)
        http: Any = SimpleNamespace(transport=self.client if client else None)
        answer: Any = Incoming(self.content, self.way if pooled else self.reader)
        response: Any = SimpleNamespace(headers=CHUNKED if headers is None else headers)
        self.flow = Shortcut(http, answer, response, take=take, enough=lambda: self.ended)

    def come(self, data: bytes) -> None:
        self.way.data_received(data)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[asyncio.Task[None]]:
    """The task in `run`, once it waits. It is cancelled unless it ends by itself."""
    with scene.flow:
        task = asyncio.ensure_future(scene.flow.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        async with asyncio.timeout(300):
            yield task
        task.cancel()


async def test_a_piece_leaves_as_one_chunk_before_any_task_has_run() -> None:
    scene = Scene(take=lambda data: [data[:3], data[3:]])
    async with running(scene) as task:
        scene.come(b"hello")
        scene.come(b"x" * 20)
        assert scene.client.written == [b"5\r\nhello\r\n", b"14\r\n" + b"x" * 20 + b"\r\n"]
        assert not task.done()


async def test_a_piece_of_which_the_client_gets_nothing_leaves_nothing() -> None:
    """An empty chunk would be the end of the answer."""
    scene = Scene(take=lambda data: [])
    async with running(scene) as task:
        scene.come(b"for the proxy alone")
        assert scene.client.written == []
        assert not task.done()


async def test_what_came_before_the_task_waits_is_carried_first() -> None:
    scene = Scene()
    scene.come(b"early")
    async with running(scene):
        assert scene.client.written == [b"5\r\nearly\r\n"]


@pytest.mark.parametrize("change", [{"waiting": 1}, {"closing": True}])
async def test_a_client_that_takes_nothing_now_is_left_to_the_task(change: dict[str, Any]) -> None:
    scene = Scene()
    async with running(scene) as task:
        for name, value in change.items():
            setattr(scene.client, name, value)
        scene.come(b"hello")
        scene.come(b" world")
        await task
        assert scene.client.written == []
        assert await scene.content.readany() == b"hello world"


async def test_the_task_wakes_when_it_has_something_to_do() -> None:
    scene = Scene()
    async with running(scene) as task:
        scene.ended = True
        scene.come(b"last")
        scene.come(b"[DONE]")
        await task
        assert scene.client.written == [b"4\r\nlast\r\n"]
        assert await scene.content.readany() == b"[DONE]"


async def test_the_task_wakes_at_the_end() -> None:
    scene = Scene()
    async with running(scene) as task:
        scene.content.feed_eof()
        await task
        assert await scene.content.readany() == b""


async def test_the_task_wakes_when_the_answer_breaks_off_and_what_came_with_that_is_still_there() -> None:
    scene = Scene()
    async with running(scene) as task:
        scene.content.set_exception(aiohttp.ClientPayloadError("broken"))
        scene.come(b"rest")
        await task
        assert scene.client.written == []
        with pytest.raises(aiohttp.ClientPayloadError, match="broken"):
            await scene.content.readany()
        assert scene.content._read_nowait(-1) == b"rest"


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("ran", [True, False])
async def test_after_the_end_there_is_nothing_to_wait_for(broken: bool, ran: bool) -> None:
    scene = Scene()
    with scene.flow:
        if ran:
            scene.ended = True
            scene.come(b"hello")
            await scene.flow.run()
        if broken:
            scene.content.set_exception(aiohttp.ClientPayloadError("broken"))
        else:
            scene.content.feed_eof()
        async with asyncio.timeout(300):
            await scene.flow.run()
            await scene.flow.run()


async def test_a_break_before_the_end_is_waited_for_wakes_the_task() -> None:
    scene = Scene()
    with scene.flow:
        task = asyncio.ensure_future(scene.flow.run())
        asyncio.get_running_loop().call_soon(scene.content.set_exception, aiohttp.ClientPayloadError("broken"))
        await task


async def test_what_goes_wrong_with_a_piece_is_the_tasks_to_handle() -> None:
    def take(data: bytes) -> list[bytes]:
        raise ValueError(data)

    scene = Scene(take=take)
    async with running(scene) as task:
        scene.come(b"hello")
        with pytest.raises(ValueError, match="hello"):
            await task


async def test_a_connection_that_has_gone_on_to_another_request_is_left_alone() -> None:
    """aiohttp gives a connection back when its answer is all there, which may be while the task still writes."""
    scene, heard = Scene(), []
    scene.come(b"all of it")
    scene.content.feed_eof()
    scene.reader.data_received = heard.append  # type: ignore[method-assign, assignment]
    scene.way.listen()
    scene.way.data_received(b"another's head")
    scene.way.follow(lambda: heard.append(b"another's flow"))
    with scene.flow:
        await scene.flow.run()
    scene.way.data_received(b"another's piece")
    assert heard == [b"another's head", b"another's piece", b"another's flow"]
    assert scene.client.written == []
    assert await scene.content.readany() == b"all of it"


@pytest.mark.parametrize("kind", [{"headers": {"Content-Length": "5"}}, {"pooled": False}, {"client": False}])
async def test_answers_of_another_form_are_the_tasks_own(kind: dict[str, Any]) -> None:
    scene = Scene(**kind)
    with scene.flow:
        async with asyncio.timeout(300):
            await scene.flow.run()
        scene.come(b"hello")
    assert scene.client.written == []
    assert await scene.content.readany() == b"hello"


async def test_whoever_has_left_hears_no_more() -> None:
    scene = Scene()
    async with running(scene) as task:
        task.cancel()
        await asyncio.wait([task])
    scene.flow._woken = asyncio.get_running_loop().create_future()
    scene.come(b"late")
    assert scene.client.written == []
    assert await scene.content.readany() == b"late"


async def test_leaving_late_disturbs_nobody_who_has_the_connection_by_then() -> None:
    """aiohttp gives a connection back as soon as its answer is all there, which is before the task leaves."""
    reader = Reader()
    way, heard = Tap(reader), []
    way.follow(lambda: heard.append("first"))

    def second() -> None:
        heard.append("second")

    way.listen()
    way.leave(lambda: None)
    way.data_received(b"a")
    assert way.heard
    way.follow(second)
    way.leave(lambda: None)
    way.data_received(b"b")
    way.leave(second)
    way.data_received(b"c")
    assert heard == ["second"]
    assert reader.content.read_nowait() == b"abc"
