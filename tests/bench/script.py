"""A scripted agent of the soak: episodes of a few turns, streamed and not, with pauses and a reward at the end.

It works over one keep-alive connection, by bare streams, and writes down what it saw. Whatever goes wrong is counted
under a name and the next episode begins on a new connection.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from tests.bench import conversation
from tests.bench.servers import CREATED, length_in, post, stamp

TURNS, GAP_MS, THINK_S, GROUP = 6, 100, 4.0, 8
STAMP = b'"created":'


@dataclass(slots=True)
class Minute:
    """The seconds that all agents saw in a minute: to a stream's first event, of every tenth event under way, to the
    end of a plain call, to the answer of a reward."""

    first: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    calls: int = 0
    episodes: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class Broken(Exception):
    """An answer was not what it must be; the message says how."""


@dataclass(slots=True)
class Agent:
    """`number` is unique to it; `episodes` counts those of all agents, which take them in turn, so that those of one
    group begin one after another; `minute` gives what counts now; `over` ends it after the episode at hand."""

    port: int
    number: int
    episodes: Iterator[int]
    minute: Callable[[], Minute]
    over: asyncio.Event

    async def live(self) -> None:
        dice = random.Random(self.number)
        await asyncio.sleep(dice.random() * THINK_S * TURNS)
        while not self.over.is_set():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
                try:
                    while not self.over.is_set():
                        await self._episode(next(self.episodes), dice, reader, writer)
                finally:
                    writer.close()
            except (Broken, OSError, EOFError, ValueError) as error:
                what = str(error) if isinstance(error, Broken) else type(error).__name__
                self.minute().errors[what] += 1
                await asyncio.sleep(1)

    async def _episode(
        self, episode: int, dice: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name, task = f"soak-{episode}", f"task-{episode // GROUP}"
        for turn in range(TURNS):
            began = perf_counter()
            writer.write(post(f"/e/{name}/v1/chat/completions", asked(turn), f"x-ajet-task: {task}\r\n"))
            if turn % 2:
                await _document(reader)
                self.minute().plain.append(perf_counter() - began)
            else:
                await self._stream(reader, began)
            self.minute().calls += 1
            await asyncio.sleep(dice.random() * 2 * THINK_S)
        began = perf_counter()
        writer.write(post(f"/ajet/v1/episodes/{name}/rewards", {"value": float(dice.random() < 0.5)}))
        await _document(reader)
        self.minute().reward.append(perf_counter() - began)
        self.minute().episodes += 1

    async def _stream(self, reader: asyncio.StreamReader, began: float) -> None:
        minute, count, last = self.minute(), 0, b""
        await _head(reader)
        while size := int(await reader.readline(), 16):
            last = await reader.readexactly(size + 2)
            count += 1
            if count == 1:
                minute.first.append(perf_counter() - began)
            elif count % 10 == 0 and (place := last.find(STAMP)) >= 0:
                minute.late.append((stamp() - int(last[place + 10 : place + 20])) % CREATED / 1e6)
        await reader.readline()
        if b"[DONE]" not in last:
            raise Broken("stream without its end")


def asked(turn: int) -> dict[str, Any]:
    body = {"model": "stub", "stream": turn % 2 == 0, "max_tokens": conversation.CHUNKS, "seed": GAP_MS}
    return body | {"messages": conversation.messages(turn)}


async def _head(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise Broken(head[9:12].decode("latin-1"))
    return head


async def _document(reader: asyncio.StreamReader) -> None:
    await reader.readexactly(length_in(await _head(reader)))
