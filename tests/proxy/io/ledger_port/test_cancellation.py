"""Calls whose episode is discarded while they run: the engine's work ends, the client hears of it, the gate drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import test_utils, web
from aiohttp.test_utils import make_mocked_request

from ajet_proxy.core.ledger.events import EpisodeDiscarded, Events
from ajet_proxy.io.ledger_port.cancellation import CallOff, DiscardWatch, called_off
from ajet_sdk.errors import Conflict
from ajet_sdk.routes import Abort, OpenEpisode
from tests.kit.engine_stub import EngineStub, Fault
from tests.proxy.io.capture.test_front_disconnects import request_for
from tests.proxy.io.front import CHAT, COMPLETIONS, MESSAGES, Front, leave, until

RESPONSES = "/v1/responses"
RAW = "/v1/completions?raw"


def body_for(path: str, *, stream: bool) -> bytes:
    if path == RESPONSES:
        return json.dumps({"model": "stub", "input": "hi", "stream": stream}).encode()
    if path == RAW:  # not captured, so that its call is lost from the beginning
        return json.dumps({"model": "stub", "prompt": "hi", "stream": stream, "use_beam_search": True}).encode()
    return request_for(path, stream=stream, content="say: " + "word " * 500)


@asynccontextmanager
async def calling(front: Front, path: str, *, stream: bool) -> AsyncIterator[asyncio.Task[aiohttp.ClientResponse]]:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        url = f"{front.url}/e/ep{path}"
        task = asyncio.get_running_loop().create_task(session.post(url, data=body_for(path, stream=stream)))
        yield task
        await leave(task)


def over(front: Front, how: str) -> None:
    """Discard the episode."""
    commands, now = front.store.commands, front.clock.now()
    if how == "abort":
        events: Events = commands.abort("ep", Abort(), at=now)
    else:
        events = (EpisodeDiscarded(now, "ep", how),)
    front.store.post(events)


@pytest.mark.parametrize("how", ["abort", "wall_timeout"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, RAW])
async def test_before_the_head_it_is_an_error(
    stub: EngineStub, front: Front, path: str, stream: bool, how: str
) -> None:
    stub.faults.append(Fault("hang"))
    async with calling(front, path, stream=stream) as asking:
        await until(stub.llm_requests)
        over(front, how)
        answer = await asking
        said = await answer.json()
    kind = "invalid_request_error" if path == MESSAGES else "conflict_error"
    assert answer.status == 409 and said["error"]["type"] == kind
    assert "was discarded while this call ran" in said["error"]["message"]
    await until(lambda: stub.llm_requests()[-1].cancelled)
    assert await front.gate.drained(300.0)
    await until(lambda: front.running == 0)
    assert front.lost == ["episode_discarded"] and not front.calls
    counted = front.metrics.render().splitlines()
    assert front.store.state.tallies.captures == {"episode_discarded": 1}
    assert f'ajet_requests_total{{route="{route_of(path)}",status="409"}} 1' in counted


async def hang(_: web.Request) -> web.Response:
    """An engine that never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_request_that_is_not_captured_ends_with_its_episode() -> None:
    engine = web.Application()
    engine.router.add_post("/v1/embeddings", hang)
    async with test_utils.TestServer(engine) as server, Front(str(server.make_url("")).rstrip("/")) as front:
        opening = front.store.commands.open_episode(OpenEpisode(), episode="ep", at=front.clock.now(), tenant="")
        front.store.post(opening)
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(f"{front.url}/e/ep/v1/embeddings", json={"model": "stub"}))
            await until(lambda: front.gate.in_flight == 1)
            over(front, "abort")
            async with await asking as answer:
                said = await answer.json()
        assert answer.status == 409 and said["error"]["code"] == "episode_discarded"
        assert await front.gate.drained(300.0)


def route_of(path: str) -> str:
    return {CHAT: "chat", RESPONSES: "responses", MESSAGES: "messages"}.get(path, "completions")


async def take(answer: aiohttp.ClientResponse, parts: list[bytes]) -> None:
    async for part in answer.content.iter_any():
        parts.append(part)  # noqa: PERF401 (those that came count, too, when it breaks off)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, RAW])
async def test_in_mid_stream_it_breaks_off(path: str) -> None:
    async with EngineStub(delay_s=0.02) as stub, Front(stub.url) as front:
        async with calling(front, path, stream=True) as asking, await asking as answer:
            assert answer.status == 200
            parts = [await answer.content.readany()]
            over(front, "abort")
            with pytest.raises(aiohttp.ClientPayloadError):
                await take(answer, parts)
        came = b"".join(parts)
        assert came.startswith((b"data: ", b"event: ")) and b"conflict" not in came and b"HTTP/1.1" not in came
        await until(lambda: stub.llm_requests()[-1].cancelled)
        assert await front.gate.drained(300.0)
        assert front.lost == ["beam_search" if path == RAW else "episode_discarded"] and not front.calls


async def test_only_what_runs_in_that_episode_ends(stub: EngineStub, front: Front) -> None:
    stub.paused.clear()
    front.open("other")
    front.open("sealed")
    async with calling(front, CHAT, stream=False) as asking:
        await until(stub.llm_requests)
        commands, now = front.store.commands, front.clock.now()
        front.store.post(commands.abort("other", Abort(), at=now))
        front.store.post(commands.seal("sealed", at=now))
        front.ledger_port._heard((EpisodeDiscarded(now, "ep", "stale", None, ("one of its models",)),))
        front.store.post(commands.seal("ep", at=now))
        stub.paused.set()
        assert (await asking).status == 200
    assert len(front.calls) == 1 and not front.lost


async def test_who_waits_at_the_gate_is_refused_there(stub: EngineStub, front: Front) -> None:
    front.open("ep")
    front.close_gate()
    async with calling(front, CHAT, stream=False) as asking:
        await until(lambda: front.gate.waiting == 1)
        over(front, "abort")
        front.open_gate(1)
        answer = await asking
        assert (answer.status, (await answer.json())["error"]["code"]) == (409, "episode_discarded")
    assert not stub.llm_requests()


# --- the parts


async def started() -> tuple[asyncio.Task[None], CallOff, Any]:
    made: list[CallOff] = []
    http = make_mocked_request("POST", "/")

    async def work() -> None:
        async with CallOff(http) as call_off:
            made.append(call_off)
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(work())
    await asyncio.sleep(0)
    assert not called_off(http)
    return task, made[0], http


async def test_what_is_called_off_ends_in_a_conflict_and_is_cancelled_no_more() -> None:
    task, call_off, http = await started()
    call_off.now()
    call_off.now()
    with pytest.raises(Conflict):
        await task
    assert called_off(http) and task.cancelling() == 0
    call_off.now()
    assert task.cancelling() == 0, "it is over"


async def test_a_client_that_goes_away_in_the_same_moment_is_gone() -> None:
    task, call_off, _ = await started()
    call_off.now()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_another_error_stays_what_it_is() -> None:
    async def fails() -> None:
        async with CallOff(make_mocked_request("POST", "/")) as call_off:
            try:
                call_off.now()
                await asyncio.sleep(0)
            except asyncio.CancelledError as error:
                raise ZeroDivisionError from error

    with pytest.raises(ZeroDivisionError):
        await fails()
    assert not called_off(make_mocked_request("POST", "/"))


def test_nobody_is_told_of_what_is_no_longer_under_way() -> None:
    told: list[str] = []
    watch = DiscardWatch()

    def say(name: str) -> Any:
        return lambda: told.append(name)

    a, b, c, gone = map(say, ("a", "b", "c", "gone"))
    with watch.watched("one", a), watch.watched("one", b), watch.watched("two", c):
        with watch.watched("one", gone):
            pass
        watch.discarded("one")
        watch.discarded("unknown")
    watch.discarded("one")
    assert told == ["a", "b"] and not watch._watching
