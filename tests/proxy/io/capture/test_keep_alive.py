"""A client that hears nothing is told something in time, whatever the engine says meanwhile. The clock is scripted: the
loop's time moves on to whatever comes next."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.io.capture.streaming import KeepAlive
from tests.proxy.core.protocol.test_keep_alive import STREAMS, messages, strictly
from tests.proxy.core.replaying import exchange_of

EVERY_S = 15.0
COMMENT = b": keep-alive\n\n"


class ScriptedLoop(asyncio.SelectorEventLoop):
    """A loop that sleeps no second: its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing would ever happen"
            self.now += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def play(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=ScriptedLoop) as runner:
        runner.run(story)


def scripted(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is played in such a loop."""

    @functools.wraps(story)
    def test(*args: Any, **more: Any) -> None:
        play(story(*args, **more))

    return test


class Saying:
    said = b": still here\n\n"

    def keep_alive(self) -> bytes:
        return self.said


class Response:
    """Takes what is written, and notes when; `error` is what writing ends in, `reading` whether it ends."""

    def __init__(self) -> None:
        self.written: list[tuple[float, bytes]] = []
        self.error: Exception | None = None
        self.reading = asyncio.Event()
        self.reading.set()

    async def write(self, data: bytes) -> None:
        self.written.append((asyncio.get_running_loop().time(), data))
        await self.reading.wait()
        if self.error is not None:
            raise self.error

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.written]


def keeping(response: Any, exchange: Any = None, every_s: float = EVERY_S) -> KeepAlive:
    return KeepAlive(response, exchange or Saying(), every_s)


@scripted
async def test_silence_is_filled_once_it_has_lasted_and_then_as_often() -> None:
    response = Response()
    with keeping(response) as silence:
        await asyncio.sleep(10)
        silence.heard()
        await asyncio.sleep(50)
    await asyncio.sleep(100)
    assert response.times == pytest.approx([25, 40, 55])


@pytest.mark.parametrize(("every_s", "said"), [(0, Saying.said), (EVERY_S, b"")])
@scripted
async def test_nothing_is_said_where_it_is_switched_off_or_there_is_nothing_to_say(every_s: float, said: bytes) -> None:
    response, exchange = Response(), Saying()
    exchange.said = said
    with keeping(response, exchange, every_s):
        await asyncio.sleep(100)
    assert response.written == []


@scripted
async def test_a_client_that_does_not_read_is_told_once() -> None:
    response = Response()
    response.reading.clear()
    with keeping(response):
        await asyncio.sleep(100)
        assert len(response.written) == 1
        response.reading.set()


@scripted
async def test_what_was_about_to_be_said_is_not_said_after_the_end() -> None:
    response = Response()
    silence = keeping(response).__enter__()
    asyncio.get_running_loop().call_later(EVERY_S, silence.__exit__)
    await asyncio.sleep(100)
    assert response.written == []


@scripted
async def test_a_client_that_went_away_is_no_error() -> None:
    response, errors = Response(), list[dict[str, Any]]()
    response.error = ConnectionResetError()
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    with keeping(response):
        await asyncio.sleep(20)
    del response  # with the error, which holds the task
    gc.collect()  # an error that nobody asks for is told as its task is freed
    assert not errors


# --- whatever is hidden


def schedule(exchange: Exchange, chunks: list[bytes], dice: random.Random) -> tuple[bytes, list[float]]:
    """The pieces that the client gets if the engine says `chunks`, with gaps and comments between them, and the call is
    on disk some time after it ended. Also the times between what it heard, up to the end."""
    got = Response()
    ended: list[float] = []

    async def story() -> None:
        with keeping(got, exchange) as silence:

            async def give(parts: list[bytes]) -> None:
                if parts:
                    await got.write(b"".join(parts))
                if exchange.heard:
                    exchange.heard = False
                    silence.heard()

            for chunk in chunks:
                for _ in range(dice.choice((0, 0, 0, 1, 8))):
                    await asyncio.sleep(dice.choice((1.0, 5.0, 14.0)))
                    await give(exchange.feed(COMMENT))
                await asyncio.sleep(dice.choice((0.0, 0.01, 7.0, 40.0)))
                await give(exchange.feed(chunk))
                if exchange.settled and not ended:
                    await asyncio.sleep(dice.choice((0.0, 50.0)))
                    ended.append(asyncio.get_running_loop().time())
                    await give(exchange.release())
        await give(exchange.finish())

    play(story())
    times = [0.0, *(at for at, data in got.written if data.replace(COMMENT, b"") and at <= ended[0]), ended[0]]
    gaps = [after - before for before, after in pairwise(times)]
    return b"".join(data for _, data in got.written), gaps


def without_comments(stream: bytes) -> bytes:
    return stream.replace(COMMENT, b"")


@pytest.mark.parametrize("name", [*STREAMS])
def test_every_client_hears_an_event_in_time(name: str) -> None:
    asked, told = STREAMS[name]
    dice = random.Random(name)
    for _ in range(3):
        exchange = exchange_of(asked)
        exchange.on_headers(told.status, told.headers["content-type"])
        stream, gaps = schedule(exchange, [chunk.encode() for chunk in told.chunks], dice)
        strictly(without_comments(stream))
        assert max(gaps) <= EVERY_S + 1e-6


@pytest.mark.parametrize("name", [name for name in STREAMS if name.startswith("chat") and "-n" not in name])
def test_every_messages_client_hears_an_event_in_time(name: str) -> None:
    chunks = [chunk.encode() for chunk in STREAMS[name][1].chunks]
    stream, gaps = schedule(messages(), chunks, random.Random(name))
    assert COMMENT not in stream and max(gaps) <= EVERY_S + 1e-6 and strictly(stream)
