"""The servers that the proxy is measured against: a canned engine that costs next to nothing, two relays that only
relay, and one that captures in memory, in the plainest way.

    python -m tests.bench.servers engine PORT
    python -m tests.bench.servers asyncio PORT ENGINE_PORT
    python -m tests.bench.servers aiohttp PORT ENGINE_PORT
    python -m tests.bench.servers keeping PORT ENGINE_PORT

The engine answers every POST with bytes made beforehand: one JSON document, or a stream of ``max_tokens`` events,
``seed`` milliseconds apart, when asked for one; ``/tokenize`` gets the prompt of that turn of the `conversation`. They
carry token ids and logprobs, as the proxy asks for, whoever asks: all relays carry the same bytes. Each event says in
``created`` when it was written (`stamp`), so that whoever reads it knows how long it was under way. One timer serves
all streams; each keeps to its own millisecond, so that events are spread over time and share no system call.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from tests.bench import conversation
from tests.kit.engine_dialect import Reply, chat_body, chat_events
from tests.kit.engine_tokens import Output

CHUNKS = 200
CREATED = 1_000_000_000
HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: "
STREAM_HEAD = HEAD + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
SLOTS = 1024
KEPT = 1000
"""The relay that captures has so many of the latest calls in memory."""


def stamp() -> int:
    """Microseconds of a clock that all processes share, as ten digits that begin again every 1,000 s."""
    return CREATED + time.monotonic_ns() // 1000 % CREATED


def reply(turn: int, count: int) -> Reply:
    """An answer of `count` tokens in a turn of the `conversation`."""
    ids = conversation.sampled(count)
    output = Output(ids, tuple(-0.1 - i / 1000 for i in range(count)), tuple(map(chr, ids)), "stop", None)
    body = {"model": "stub", "return_token_ids": True, "logprobs": True}
    return Reply("chatcmpl-0123456789abcdef", CREATED, body, [conversation.prompt(turn)], [[output]])


def framed(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


def whole(body: bytes) -> bytes:
    return HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@cache
def document(turn: int = 0) -> bytes:
    return whole(chat_body(reply(turn, conversation.LETTERS)))


@cache
def tokenized(turn: int) -> bytes:
    ids = conversation.prompt(turn)
    return whole(json.dumps({"count": len(ids), "max_model_len": 100_000, "tokens": ids}).encode())


@cache
def events(count: int, turn: int = 0) -> tuple[tuple[bytes, bytes], ...]:
    """The events of a stream of `count` chunks, each in two parts with its stamp between them; the end is the last."""
    *parts, last, done = (framed(event) for event in chat_events(reply(turn, count - 1)))
    halves = [part.split(b"%d" % CREATED, 1) for part in (*parts, last + done + END)]
    return tuple((before, after) for before, after in halves)


@cache
def canned() -> tuple[bytes, bytes]:
    """``(document, stream)`` as whole HTTP/1.1 responses; the stream is one event a chunk."""
    chunks = b"".join(before + b"%d" % CREATED + after for before, after in events(CHUNKS))
    return document(), STREAM_HEAD + chunks


class Wheel:
    """Streams under way, each in the millisecond in which its next event is due."""

    def __init__(self) -> None:
        self._slots: list[list[Stream]] = [[] for _ in range(SLOTS)]
        self._loop = asyncio.get_running_loop()
        self._now = 0
        self._count = 0
        self._began = 0.0

    def add(self, stream: Stream) -> None:
        if not self._count:
            self._now, self._began = 0, self._loop.time()
            self._loop.call_later(0.001, self._tick)
        self._count += 1
        self._slots[(self._now + stream.gap_ms) % SLOTS].append(stream)

    def _tick(self) -> None:
        until = int((self._loop.time() - self._began) * 1000)
        while self._now < until:
            self._now += 1
            due, self._slots[self._now % SLOTS] = self._slots[self._now % SLOTS], []
            for stream in due:
                if stream.step():
                    self._slots[(self._now + stream.gap_ms) % SLOTS].append(stream)
                else:
                    self._count -= 1
        if self._count:
            self._loop.call_at(self._began + (self._now + 1) / 1000, self._tick)


class Stream:
    __slots__ = ("_events", "_place", "_transport", "gap_ms")

    def __init__(self, transport: asyncio.Transport, count: int, gap_ms: int, turn: int) -> None:
        self.gap_ms = gap_ms
        self._events = events(count, turn)
        self._transport = transport
        before, after = self._events[0]
        transport.write(STREAM_HEAD + before + b"%d" % stamp() + after)
        self._place = 1

    def step(self) -> bool:
        """Writes the next event; whether there is another one to come."""
        if self._transport.is_closing():
            return False
        before, after = self._events[self._place]
        self._transport.write(b"%s%d%s" % (before, stamp(), after))
        self._place += 1
        return self._place < len(self._events)


class Engine(asyncio.Protocol):
    """One connection to the canned engine."""

    def __init__(self, wheel: Wheel, listing: bytes) -> None:
        self._wheel = wheel
        self._listing = listing
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (found := split(self._seen)) is not None:
            head, body, self._seen = found
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._transport.write(self._listing)
            return
        turn = body.count(b'"assistant"')
        if head.startswith(b"POST /tokenize"):
            self._transport.write(tokenized(turn))
            return
        asked = json.loads(body or b"{}")
        if not asked.get("stream"):
            self._transport.write(document(turn))
        elif gap_ms := asked.get("seed"):
            self._wheel.add(Stream(self._transport, asked["max_tokens"], gap_ms, turn))
        else:
            self._transport.write(canned()[1])


def length_in(head: bytes) -> int:
    """The length of the body behind a head; 0 if that does not say it."""
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0


def post(path: str, body: Any, more: str = "") -> bytes:
    """A request; `more` are further lines of its head."""
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{more}content-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


def split(seen: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The first whole request in `seen` as head and body, and what comes after it."""
    head, end, rest = seen.partition(b"\r\n\r\n")
    if not end:
        return None
    size = length_in(head)
    return (head, rest[:size], rest[size:]) if len(rest) >= size else None


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """``(head, body)`` of the next request; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b"", b""
    return head, await reader.readexactly(length_in(head))


async def engine(port: int) -> asyncio.Server:
    models = b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"vllm","max_model_len":100000}]}'
    listing = whole(models)
    wheel = Wheel()
    return await asyncio.get_running_loop().create_server(
        lambda: Engine(wheel, listing), "127.0.0.1", port, backlog=4096
    )


async def asyncio_relay(port: int, engine_port: int) -> asyncio.Server:
    """Parses nothing but the request's length; the answer is copied as it comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", engine_port)

        async def back() -> None:
            while data := await up_reader.read(65536):
                writer.write(data)
                await writer.drain()

        copying = asyncio.ensure_future(back())
        while (request := await read_request(reader))[0]:
            up_writer.write(b"".join(request))
        copying.cancel()
        up_writer.close()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", port, backlog=4096)


class Kept:
    """The part of a call that the plainest capture keeps: its messages, and the ids and logprobs of its answer."""

    def __init__(self, body: bytes) -> None:
        asked = json.loads(body)
        self.body = json.dumps(asked | {"return_token_ids": True, "logprobs": True}).encode()
        self.messages = asked["messages"]
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self._streamed = asked.get("stream", False)
        self._left = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the answer; none at its end."""
        self._left += data
        if self._streamed:
            *events, self._left = self._left.split(b"\n\n")
            for event in events:
                if event != b"data: [DONE]":
                    self._keep(event.removeprefix(b"data: "))
        elif not data:
            self._keep(self._left)

    def _keep(self, document: bytes) -> None:
        for choice in json.loads(document)["choices"]:
            self.ids += choice.get("token_ids") or ()
            self.logprobs += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()]


async def aiohttp_relay(port: int, engine_port: int, kept: deque[Kept] | None = None) -> object:
    """A relay that is written in the proxy's own library and does nothing else, or only fills `kept`: to see its
    cost."""
    from aiohttp import ClientSession, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)

    async def serve(request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{engine_port}{request.path_qs}"
        body, call = await request.read(), None
        if kept is not None and body:
            kept.append(call := Kept(body))
            body = call.body
        async with session.request(request.method, url, data=body) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            with suppress(ConnectionResetError):  # the client went away
                async for data in answer.content.iter_any():
                    if call is not None:
                        call.feed(data)
                    await response.write(data)
                if call is not None:
                    call.feed(b"")
                await response.write_eof()
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    return runner


async def main() -> None:
    kind, *ports = sys.argv[1:]
    kinds: dict[str, Callable[..., Awaitable[object]]] = {
        "engine": engine, "asyncio": asyncio_relay, "aiohttp": aiohttp_relay,
        "keeping": partial(aiohttp_relay, kept=deque(maxlen=KEPT)),
    }  # fmt: skip
    start = kinds[kind]
    server = await start(*map(int, ports))
    sys.stdout.write(f"ready {type(server).__name__}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
