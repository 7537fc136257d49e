"""A load generator on bare protocols: keep-alive connections that ask one thing after another, and note how it went.

A connection is one agent. What it costs here must be little beside what is measured, so an answer is not parsed: its
end is known by its last bytes, its status by its first ones, and of its events only the stamps of the engine are read.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.bench.servers import CREATED, END, length_in, post, stamp

OPENING = 50
"""So many connections are opened at a time."""
STAMP = b'"created":'
EVENT = b"data: "
FILLER = "hello " * 50
LOST_S = 60.0
"""Longer than this under way: the event bears another clock's time."""


@dataclass(frozen=True, slots=True)
class Load:
    """`agents` at once, each with `turns` requests one after another; a stream of `chunks` every `gap_ms`, or a
    document if there are none. Their starts are spread over `ramp_s`. ``{}`` in `path` is the episode: one for
    `per_episode` requests. Agents ask for one of `models` each, in turn."""

    agents: int
    turns: int
    chunks: int = 0
    gap_ms: int = 0
    ramp_s: float = 0.0
    per_episode: int = 10
    models: Sequence[str] = ("stub",)


@dataclass(slots=True)
class Seen:
    """Seconds: from request to first event (`first`), to the last byte (`whole`), of each event under way (`late`)."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


async def run(port: int, load: Load, *, path: str, name: str = "", limit_s: float = 60.0) -> Seen:
    """The events that the agents of `load` saw, who begin once all of them are connected; `name` makes their episodes
    unique."""
    seen, loop = Seen(), asyncio.get_running_loop()
    agents = [Agent(load, partial(_request, path, load, name, number), seen) for number in range(load.agents)]

    async def connect(agent: Agent) -> None:
        await loop.create_connection(lambda: agent, "127.0.0.1", port)

    for start in range(0, load.agents, OPENING):
        await asyncio.gather(*map(connect, agents[start : start + OPENING]))
    for number, agent in enumerate(agents):
        loop.call_later(load.ramp_s * number / load.agents, agent.ask)
    _, waiting = await asyncio.wait([agent.done for agent in agents], timeout=limit_s)
    seen.errors["not done in time"] += len(waiting)
    for agent in agents:
        agent.close()
    return seen


def _request(path: str, load: Load, name: str, number: int, turn: int) -> bytes:
    body = {
        "model": load.models[number % len(load.models)], "stream": load.chunks > 0, "max_tokens": load.chunks or 200,
        **({"seed": load.gap_ms} if load.chunks else {}), "messages": [{"role": "user", "content": FILLER}],
    }  # fmt: skip
    return post(path.format(f"{name}-{number}-{turn // load.per_episode}"), body)


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(seconds) or [float("nan")]
    return statistics.median(ordered) * 1e3, ordered[int(len(ordered) * 0.99)] * 1e3


class Agent(asyncio.Protocol):
    """One connection; `done` when its turns are over or one of them failed."""

    def __init__(self, load: Load, request: Callable[[int], bytes], seen: Seen) -> None:
        self._load = load
        self._request = request
        self._seen = seen
        self._turn = 0
        self._left = -1
        self._tail = b""
        self._first = False
        self._count = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self) -> None:
        self._tail, self._left, self._first, self._count = b"", -1, True, 0
        self._began = time.perf_counter()
        self._transport.write(self._request(self._turn))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._left < 0:
            if not self._head(data):
                return
            data = self._tail
            self._tail = b""
        if not data:
            return
        if self._load.chunks:
            self._events(data)
        ended = self._ended(data)
        self._tail = data[-len(END) :]
        if ended and self._count < self._load.chunks:
            self._fail("events missing")
        elif ended:
            self._end(now)

    def _ended(self, data: bytes) -> bool:
        """Tell whether `data` ends the answer: all of its length, or a last chunk."""
        if self._left:
            self._left -= len(data)
            return self._left == 0
        return data.endswith(END) or (len(data) < len(END) and (self._tail + data).endswith(END))

    def _head(self, data: bytes) -> bool:
        """Reads the answer's head; whether it is whole. What follows it is left in `_tail`."""
        self._tail += data
        head, found, rest = self._tail.partition(b"\r\n\r\n")
        if not found:
            return False
        if not head.startswith(b"HTTP/1.1 200"):
            self._fail(head[:16].decode("latin-1").strip())
            return False
        self._left = length_in(head)
        self._tail = rest
        return True

    def _events(self, data: bytes) -> None:
        self._count += data.count(EVENT)
        place = data.find(STAMP)
        if place >= 0:
            if self._first:
                self._first = False
                self._seen.first.append(time.perf_counter() - self._began)
            written = data[place + 10 : place + 20]
            late = (stamp() - int(written)) % CREATED / 1e6 if written.isdigit() and len(written) == 10 else LOST_S
            if late < LOST_S:
                self._seen.late.append(late)

    def _end(self, now: float) -> None:
        self._seen.whole.append(now - self._began)
        self._turn += 1
        if self._turn < self._load.turns:
            self.ask()
        elif not self.done.done():
            self.done.set_result(None)

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self._seen.errors[why] += 1
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection closed" if exc is None else type(exc).__name__)

    def close(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Reads one answer of a canned engine, whole."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"answered {head[:200]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        await reader.readuntil(b"\r\n" + END)
    else:
        await reader.readexactly(length_in(head))
