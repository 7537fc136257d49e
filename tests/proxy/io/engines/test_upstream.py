"""The way to the engines: which one, over which connection, with which headers, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from ajet_proxy.io.engines import upstream as module
from ajet_proxy.io.engines.upstream import (
    AT_ONCE_S,
    COOLDOWN_S,
    LONGEST_COOLDOWN_S,
    EngineRequest,
    Engines,
    Forwarding,
    Upstream,
    response_headers,
)
from ajet_proxy.io.http import aiohttp_internals
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import AjetError, EngineError, EngineTimeout, NotReady
from ajet_sdk.sockets import WATCH
from tests.kit.answering import listening, saying

pytestmark = pytest.mark.usefixtures("flying")

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
DEAD = "http://127.0.0.1:9"


class Ticking(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0

    def now(self) -> float:
        return self.time


@asynccontextmanager
async def engine(*behaviour: str) -> AsyncIterator[tuple[str, list[list[bytes]]]]:
    """A server that does, request by request, what `behaviour` says, and goes on with the last: ``answer``, ``close``
    without one, ``hang``, ``half`` an answer, ``begin`` its body; ``reset``, ``half reset``: the same, and the
    connection is reset. Yields its URL and, for each connection, the requests that came."""
    connections: list[list[bytes]] = []
    todo = iter(behaviour)
    last = behaviour[-1]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen: list[bytes] = []
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /health "):  # an engine that is slow to answer is asked whether it is well
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    return
                if not seen:
                    connections.append(seen)
                seen.append(head)
                if not await act(next(todo, last), writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def act(what: str, writer: asyncio.StreamWriter) -> bool:
        if what == "hang":
            await asyncio.sleep(900)
        if what == "answer":
            writer.write(ANSWER)
        if what.startswith("half"):
            writer.write(ANSWER[:20])
        if what == "begin":
            writer.write(ANSWER[:-1])
        await writer.drain()
        if what.endswith("reset"):
            await asyncio.sleep(0.02)
            reset_on_close(writer)
        return what in ("answer", "begin")

    async with listening(serve) as url:
        yield url, connections


@asynccontextmanager
async def upstream(
    *urls: str, clock: Clock | None = None, read_timeout: float = 0.0
) -> AsyncIterator[tuple[Upstream, Metrics]]:
    metrics = Metrics()
    engines = Engines({"": urls} if urls else {}, lambda model: (), lambda: ())
    made = Upstream(engines, clock=clock or Clock(), metrics=metrics, read_timeout=read_timeout)
    async with made.connected():
        yield made, metrics


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def ask(method: str = "POST", sticky: str = "ep", body: bytes | None = None) -> EngineRequest:
    return EngineRequest(method, "/v1/x?a=%20", CIMultiDict({"X-Case": "Kept"}), body, "m", sticky)


async def answer(made: Upstream, request: EngineRequest | None = None) -> bytes:
    response = await made.send(request or ask())
    return await response.read()


def counted(metrics: Metrics, name: str) -> Iterator[str]:
    return (line for line in metrics.render().splitlines() if line.startswith(name) and "#" not in line)


# --- which engine


async def test_an_episode_stays_with_its_engine_and_episodes_spread() -> None:
    urls = [f"http://engine-{number}" for number in range(4)]
    async with upstream(*urls) as (made, _):
        first = {f"ep-{number}": made.order("m", f"ep-{number}") for number in range(400)}
        assert all(made.order("m", name) == order for name, order in first.items())
        assert all(sorted(order) == urls for order in first.values())
        assert all(60 < count < 140 for count in Counter(order[0] for order in first.values()).values())
    async with upstream(*urls[:3]) as (made, _):
        moved = [name for name, order in first.items() if made.order("m", name)[0] != order[0]]
        assert {first[name][0] for name in moved} == {urls[3]}, "only the episodes of an engine that went must move"


async def test_the_next_engine_is_tried_and_the_dead_one_left_alone_for_a_while() -> None:
    clock = Ticking()
    async with engine("answer") as (url, connections), upstream(url, DEAD, clock=clock) as (made, metrics):
        sticky = next(f"ep-{number}" for number in range(100) if made.order("m", f"ep-{number}")[0] == DEAD)
        assert await answer(made, ask(sticky=sticky)) == b"ok"
        assert made.order("m", sticky) == [url, DEAD]
        assert list(counted(metrics, "ajet_upstream_errors_total")) == ['ajet_upstream_errors_total{kind="connect"} 1']
        clock.time += COOLDOWN_S + 1
        assert made.order("m", sticky) == [DEAD, url]
        assert len(connections) == 1


async def test_a_host_that_is_gone_costs_ever_fewer_requests_their_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, gone = Ticking(), "http://gone"
    async with engine("answer") as (url, _), upstream(url, gone, clock=clock) as (made, _):
        sticky, real = next(f"ep-{at}" for at in range(100) if made.order("m", f"ep-{at}")[0] == gone), made._send_to
        looking, away = list[list[str]](), True

        async def send_to(to: str, request: EngineRequest) -> aiohttp.ClientResponse:
            if to != gone:
                return await real(to, request)
            looking.append(made.order("m", sticky))
            if away:
                raise aiohttp.ConnectionTimeoutError("nobody says a word")
            return await real(url, request)

        monkeypatch.setattr(made, "_send_to", send_to)
        for pause in (COOLDOWN_S, 2 * COOLDOWN_S, 4 * COOLDOWN_S, LONGEST_COOLDOWN_S, LONGEST_COOLDOWN_S):
            assert await answer(made, ask(sticky=sticky)) == b"ok"
            clock.time += pause - 1
            assert made.order("m", sticky) == [url, gone]
            clock.time += 2
            assert made.order("m", sticky) == [gone, url]
        assert looking == [[gone, url], *[[url, gone]] * 4], "while one looks, others leave it alone"
        away = False
        assert await answer(made, ask(sticky=sticky)) == b"ok"
        assert made.order("m", sticky) == [gone, url]
    assert [record.getMessage() for record in caplog.records if record.name == module.__name__] == [
        f"the engine at {gone} did not answer in time; where there are others they are asked first",
        f"the engine at {gone} is back",
    ]


async def test_when_no_engine_can_be_reached_the_caller_is_told() -> None:
    async with upstream(DEAD, "http://127.0.0.1:10") as (made, _):
        with pytest.raises(EngineError, match="cannot be reached") as caught:
            await answer(made)
        assert caught.value.code == "engine_connect"


async def test_when_no_engine_is_known_the_caller_may_come_back() -> None:
    async with upstream() as (made, _):
        with pytest.raises(NotReady) as caught:
            await answer(made)
        assert caught.value.retry_after


async def test_connections_end_with_their_context_and_can_be_had_again() -> None:
    async with engine("answer") as (url, connections):
        engines = Engines({"": (url,)}, lambda model: (), lambda: ())
        made = Upstream(engines, clock=Clock(), metrics=Metrics(), read_timeout=0)
        for _ in range(2):
            async with made.connected():
                assert await answer(made) == b"ok"
        assert [len(seen) for seen in connections] == [1, 1]


@pytest.mark.parametrize(("status", "well"), [(200, True), (302, True), (404, True), (503, False)])
async def test_an_engine_that_answers_is_alive_wherever_it_sends_who_asks(status: int, well: bool) -> None:
    async with saying("/health", status, Location=f"{DEAD}/health") as url, upstream(url) as (made, _):
        assert await made._is_healthy(url) == well


# --- over which connection


@pytest.mark.parametrize(("behaviour", "good", "seen", "retries"), [
    (["answer"], True, [2], 0), (["answer", "close", "answer"], True, [2, 1], 1),
    (["answer", "reset", "answer"], True, [2, 1], 1), (["answer", "half", "answer"], False, [2], 0),
    (["answer", "half reset", "answer"], False, [2], 0), (["answer", "close"], False, [2, 1], 1),
])  # fmt: skip
async def test_a_reused_connection_that_ends_without_a_byte_is_tried_once_more(
    behaviour: list[str], good: bool, seen: list[int], retries: int
) -> None:
    async with engine(*behaviour) as (url, connections), upstream(url) as (made, metrics):
        assert await answer(made) == b"ok"
        with contextlib.nullcontext() if good else pytest.raises(EngineError):
            assert await answer(made, ask(body=b"{}")) == b"ok"
        assert [len(requests) for requests in connections] == seen
        assert list(counted(metrics, "ajet_upstream_retries_total")) == [f"ajet_upstream_retries_total {retries}"]


@pytest.mark.parametrize("unasked", [
    ANSWER, b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", b"\r\n", b"x",
])  # fmt: skip
async def test_what_nobody_has_asked_for_answers_no_later_request(unasked: bytes) -> None:
    said = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in (b"1", b"2"):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER.replace(b"ok", b"%b%d" % (number, said.is_set())))
            await asyncio.sleep(0.02)
            writer.write(unasked)
            await writer.drain()
            said.set()

    async with listening(serve) as url, upstream(url) as (made, _):
        assert await answer(made) == b"10"
        await said.wait()
        await asyncio.sleep(0.05)
        assert await answer(made) == (b"21" if unasked == b"\r\n" else b"11")


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_aiohttp_repeats_a_get_itself(how: str) -> None:
    async with engine("answer", how, "answer") as (url, connections), upstream(url) as (made, metrics):
        assert [await answer(made), await answer(made, ask("GET"))] == [b"ok", b"ok"]
        assert [len(requests) for requests in connections] == [2, 1]
        assert list(counted(metrics, "ajet_upstream_retries_total")) == ["ajet_upstream_retries_total 0"]


async def test_what_an_engine_may_have_worked_on_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 0.0, 10.0, 10.0 + AT_ONCE_S + 0.1))
    monkeypatch.setattr(aiohttp_internals, "monotonic", lambda: next(times))
    async with engine("answer", "close", "answer") as (url, connections), upstream(url) as (made, metrics):
        assert await answer(made) == b"ok"
        with pytest.raises(EngineError):
            await answer(made, ask(body=b"{}"))
        assert [len(seen) for seen in connections] == [2]
        assert list(counted(metrics, "ajet_upstream_retries_total")) == ["ajet_upstream_retries_total 0"]


async def test_a_body_that_was_half_read_is_sent_again_whole() -> None:
    body, got = bytes(range(256)) * 3_900, []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not got:
            got.append(b"")
            writer.write(ANSWER)
            await reader.readuntil(b"\r\n\r\n")
            got.append(await reader.readexactly(1000))
            reset_on_close(writer)
        else:
            got.append(await reader.readexactly(len(body)))
            writer.write(ANSWER)
        writer.close()

    async with listening(serve) as url, upstream(url) as (made, _):
        assert await answer(made) == b"ok"
        assert await answer(made, ask(body=body)) == b"ok"
    assert got == [b"", body[:1000], body]


@pytest.mark.parametrize("before", [[], ["answer", "close"]], ids=["pooled", "fresh"])
async def test_the_system_asks_whether_the_host_of_an_engine_is_there(before: list[str]) -> None:
    async with engine(*before, "begin") as (url, _), upstream(url) as (made, _):
        if before:
            await answer(made)
        response = await made.send(ask())
        assert response.connection is not None and response.connection.transport is not None
        ours = response.connection.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        watched = {name: ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in WATCH}
        assert watched == WATCH
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        assert WATCH["TCP_KEEPIDLE"] + WATCH["TCP_KEEPINTVL"] * WATCH["TCP_KEEPCNT"] <= 120
        response.close()


async def test_a_fresh_connection_that_closes_without_a_byte_is_a_502() -> None:
    async with engine("close") as (url, connections), upstream(url) as (made, metrics):
        with pytest.raises(EngineError, match="without an answer"):
            await answer(made)
        assert [len(seen) for seen in connections] == [1]
        assert list(counted(metrics, "ajet_upstream_errors_total")) == ['ajet_upstream_errors_total{kind="broken"} 1']


async def test_an_engine_that_failed_in_the_middle_is_not_asked_again() -> None:
    async with engine("answer") as (other, spare), engine("half") as (url, connections):
        async with upstream(url, other) as (made, _):
            sticky = next(f"ep-{number}" for number in range(100) if made.order("m", f"ep-{number}")[0] == url)
            with pytest.raises(AjetError):
                await answer(made, ask(sticky=sticky))
        assert len(connections) == 1 and spare == []


async def test_silence_is_waited_for_unless_a_limit_is_set() -> None:
    async with engine("hang") as (url, _), upstream(url, read_timeout=0.1) as (made, metrics):
        with pytest.raises(EngineTimeout):
            await answer(made)
        assert list(counted(metrics, "ajet_upstream_errors_total")) == ['ajet_upstream_errors_total{kind="timeout"} 1']
    async with engine("hang") as (url, _), upstream(url) as (made, _metrics):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer(made), 0.3)


# --- with which headers


def to_engine(headers: dict[str, str], **more: Any) -> dict[str, str]:
    options: dict[str, Any] = {"is_ours": lambda key: key == "ours", "upstream_key": None, **more}
    identity = options.pop("identity", False)
    out = dict(Forwarding(daemon="me", **options).headers(headers.items(), identity=identity))
    assert out.pop("Via") == "1.1 me"
    return out


def test_headers_of_one_hop_and_of_ours_stay_here() -> None:
    kept = {"Accept": "*/*", "accept-encoding": "gzip", "User-Agent": "x", "Cookie": "a=b", "X-Forwarded-For": "1.2.3"}
    dropped = {
        "Host": "h", "Content-Length": "1", "Transfer-Encoding": "chunked", "Connection": "close, X-Hop", "X-Hop": "1",
        "Keep-Alive": "1", "TE": "trailers", "Upgrade": "h2c", "Expect": "100-continue", "Content-Encoding": "gzip",
        "X-AJet-Episode": "e", "x-ajet-reward": "1", "Proxy-Authorization": "x",
    }  # fmt: skip
    assert to_engine(kept | dropped) == kept


def test_keys() -> None:
    assert to_engine({"Authorization": "Bearer ours", "X-Api-Key": "ours"}) == {}
    theirs = {"Authorization": "Bearer theirs", "X-Api-Key": "theirs"}
    assert to_engine(theirs) == theirs
    assert to_engine(theirs, upstream_key="k") == {"Authorization": "Bearer k"}
    assert to_engine({"Authorization": "ours"}) == {}
    spaced = {"Authorization": "Bearer  a b c", "X-Api-Key": "a b c"}
    assert to_engine(spaced, is_ours=lambda key: key == "a b c") == {}


def test_a_captured_answer_must_not_be_compressed() -> None:
    assert to_engine({"accept-encoding": "gzip, br"}, identity=True) == {"Accept-Encoding": "identity"}


def test_headers_of_the_answer() -> None:
    headers = CIMultiDict([
        ("Content-Type", "text/event-stream"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("Connection", "x-hop"),
        ("X-Hop", "1"), ("Transfer-Encoding", "chunked"), ("Content-Length", "5"), ("Date", "now"),
        ("Server", "uvicorn"),
    ])  # fmt: skip
    kept = list(response_headers(headers, keep_length=False).items())
    assert kept == [
        ("Content-Type", "text/event-stream"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("Date", "now"),
        ("Server", "uvicorn"),
    ]  # fmt: skip
    assert response_headers(headers, keep_length=True)["content-length"] == "5"
