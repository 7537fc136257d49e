"""Silence is filled while the client has whole events, and by nothing else than one line a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet_proxy.io.capture.streaming import LOOKS, KeepAlive


class Exchange:
    keep_alive = b": still here\n\n"
    patient = True


class Response:
    """Takes what is written; `error` is what writing ends in, `reading` whether it ends."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.error: Exception | None = None
        self.reading = asyncio.Event()
        self.reading.set()

    async def write(self, data: bytes) -> None:
        self.written.append(data)
        await self.reading.wait()
        if self.error is not None:
            raise self.error


def keeping(response: Any, exchange: Any, every_s: float = 0.01) -> KeepAlive:
    return KeepAlive(response, exchange, every_s)


async def test_silence_is_filled_again_and_again() -> None:
    response = Response()
    with keeping(response, Exchange()):
        async with asyncio.timeout(20):
            while len(response.written) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    written = list(response.written)
    await asyncio.sleep(0.05)
    assert response.written == written == [Exchange.keep_alive] * len(written)


async def test_who_hears_something_hears_nothing_else() -> None:
    response = Response()
    with keeping(response, Exchange(), 60.0) as silence:
        for _ in range(3):
            for _ in range(LOOKS):
                silence._look()
            silence.looks = 0
    assert silence._writing is None


async def test_silence_is_filled_once_it_has_lasted_and_then_as_often() -> None:
    response, said = Response(), []
    with keeping(response, Exchange(), 60.0) as silence:
        for look in range(1, 3 * LOOKS + 2):
            silence._look()
            await asyncio.sleep(0)
            if len(response.written) > len(said):
                said.append(look)
    assert said == [LOOKS + 1, 2 * LOOKS + 1, 3 * LOOKS + 1]


@pytest.mark.parametrize("every_s", [0, 0.01])
async def test_nothing_is_said_in_the_middle_of_an_event_or_where_it_is_switched_off(every_s: float) -> None:
    response, exchange = Response(), Exchange()
    exchange.patient = not every_s
    with keeping(response, exchange, every_s):
        await asyncio.sleep(0.05)
    assert response.written == []


async def test_a_client_that_does_not_read_is_told_once() -> None:
    response = Response()
    response.reading.clear()
    with keeping(response, Exchange(), 60.0) as silence:
        for _ in range(3 * LOOKS):
            silence._look()
            await asyncio.sleep(0)
        assert response.written == [Exchange.keep_alive]
        response.reading.set()
        assert silence._writing is not None
        await silence._writing


async def test_what_was_about_to_be_said_is_not_said_after_the_end() -> None:
    response = Response()
    with keeping(response, Exchange(), 60.0) as silence:
        silence.looks = LOOKS
        silence._look()
    assert silence._writing is not None
    await silence._writing
    assert response.written == []


async def test_a_client_that_went_away_is_no_error() -> None:
    response = Response()
    response.error = ConnectionResetError()
    with keeping(response, Exchange()) as silence:
        await asyncio.sleep(0.05)
    assert silence._writing is not None
    await silence._writing
