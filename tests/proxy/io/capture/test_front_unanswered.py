"""An agent's attempts at the model that the world failed stand in the record: they are listed until one is answered
that begins with the same messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import CallStarted
from tests.kit.answering import listening, saying
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.ports import free_port
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Front, bearer, leave, until

pytestmark = pytest.mark.usefixtures("flying")

DIALECTS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
FIRST = [{"role": "user", "content": "say: one two three"}]
AFTER = [*FIRST, {"role": "assistant", "content": "nothing came"}, {"role": "user", "content": "say: go on"}]
LONG = [{"role": "user", "content": "say: " + "word " * 500}]
OTHER = [{"role": "user", "content": "say: something else"}]


def body_of(path: str, said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "stub"} | more
    if path == COMPLETIONS:
        return body | {"prompt": "".join(f"{one['role']}: {one['content']}\n" for one in said), "max_tokens": 20}
    if path == RESPONSES:
        return body | {"input": said, "max_output_tokens": 20}
    return body | {"messages": said, "max_tokens": 20}


async def ask(
    front: Front, path: str, said: list[dict[str, Any]], *, agent: str = "", episode: str = "x", **more: Any
) -> int:
    """The status of the answer to a request of `agent`, read to its end or as far as it comes; 0 if there is none."""
    headers = {"X-AJet-Agent": agent} if agent else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as http:
        with contextlib.suppress(aiohttp.ClientError):
            url = f"{front.url}/e/{episode}{path}"
            async with http.post(url, json=body_of(path, said, **more), headers=headers) as answer:
                with contextlib.suppress(aiohttp.ClientError):
                    await answer.read()
                return answer.status
    return 0


def unanswered(front: Front, episode: str = "x") -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = views.record(front.store.state, episode)["unanswered"]
    return shown


def reasons(front: Front) -> list[str]:
    return [one["reason"] for one in unanswered(front)]


STATUSES = (401, 403, 404, 408, 409, 429, 500, 502, 503, 504)
BOTH_WAYS = (
    *((Fault("status", status=status, times=9), "refused") for status in STATUSES),
    (Fault("cut", after=40), "truncated"), (Fault("reset", after=40), "truncated"),
    (Fault("silent_close", times=9), "engine_error"), (Fault("abort"), "engine_aborted"),
)
STREAMED = ((Fault("error_event", after=1), "engine_error"), (Fault("no_finish"), "truncated"))


def cases() -> list[Any]:
    return [
        pytest.param(path, stream, fault, reason, id=f"{path[4:]} {fault.kind} {fault.status} {stream=}")
        for path in DIALECTS for stream in (False, True)
        for fault, reason in (*BOTH_WAYS, *(STREAMED if stream else ()))
        if (path, fault.kind) != (RESPONSES, "abort")  # which knows no such finish
    ]


@pytest.mark.parametrize(("path", "stream", "fault", "reason"), cases())
async def test_an_engine_fails(
    stub: EngineStub, front: Front, path: str, stream: bool, fault: Fault, reason: str
) -> None:
    """The attempt is unanswered, whatever else is answered, until a request is that begins with the same messages."""
    stub.faults.append(fault)
    await ask(front, path, FIRST, stream=stream)
    stub.faults.clear()
    (lost,) = unanswered(front)
    assert (lost["reason"], lost["call"], lost["model"]) == (reason, front.of(CallStarted)[0].calls[0], "stub")
    assert reason != "refused" or str(fault.status) in lost["detail"]
    assert await ask(front, path, OTHER, stream=stream) == 200
    assert await ask(front, path, FIRST, stream=stream, agent="judge") == 200
    assert unanswered(front) == [lost]
    assert await ask(front, path, AFTER, stream=not stream, temperature=0.3) == 200
    assert unanswered(front) == []


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_the_agent_sent_is_its_own_fault(stub: EngineStub, front: Front, path: str, status: int) -> None:
    stub.faults.append(Fault("status", status=status, times=9))
    assert await ask(front, path, FIRST) == status
    assert front.lost == ["refused"]
    assert unanswered(front) == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_several_choices_are_one_attempt(stub: EngineStub, front: Front, path: str) -> None:
    stub.faults.append(Fault("cut", after=40))
    await ask(front, path, FIRST, n=3)
    assert reasons(front) == ["truncated"]
    assert await ask(front, path, FIRST, n=2) == 200
    assert unanswered(front) == []


async def gives_up(front: Front, path: str, *, after_s: float = 1.5, said: Any = FIRST, **more: Any) -> None:
    """A client that waits so long, and goes away."""
    lost, body = len(front.lost), body_of(path, said, **more) | ({"max_tokens": 1000} if said is LONG else {})
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=after_s)) as http:
        with pytest.raises(TimeoutError):
            await (await http.post(f"{front.url}/e/x{path}", json=body)).read()
    await until(lambda: len(front.lost) > lost)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gives_up_on_a_dead_engine(stub: EngineStub, front: Front, path: str, stream: bool) -> None:
    """Nothing came, not even an answer to ``/health``. An engine that answers that may be at work for a policy that
    rambles."""
    stub.faults.append(Fault("hang", times=9))
    await gives_up(front, path, stream=stream)
    assert (front.lost, unanswered(front)) == (["disconnected"], [])
    stub.deaf = True
    await gives_up(front, path, stream=stream)
    assert reasons(front) == ["engine_silent"]
    stub.faults.clear()
    stub.deaf = False
    assert await ask(front, path, FIRST) == 200
    assert unanswered(front) == []


async def test_a_client_gives_up_on_an_engine_that_answers_others(stub: EngineStub, front: Front) -> None:
    stub.faults.append(Fault("hang"))
    stub.deaf = True
    giving_up = asyncio.create_task(gives_up(front, CHAT))
    await until(lambda: front.of(CallStarted))
    while not giving_up.done():
        assert await ask(front, CHAT, OTHER, episode="y") == 200
        await asyncio.sleep(0.05)
    await giving_up
    assert (front.lost, unanswered(front)) == (["disconnected"], [])


async def test_a_client_gives_up_on_a_dead_engine_while_others_are_answered_by_the_next() -> None:
    """Its host is gone. Whoever asks it anew cannot reach it, so another engine is asked first from then on."""
    stubs = EngineStub(keepalive_s=0.01), EngineStub(keepalive_s=0.01)
    async with stubs[0] as one, stubs[1] as two, Front(one.url, two.url) as front:
        assert await ask(front, CHAT, OTHER) == 200  # by the engine of this episode
        gone = one if one.llm_requests() else two
        gone.faults.append(Fault("hang"))
        giving_up = asyncio.create_task(gives_up(front, CHAT, after_s=60.0))
        await until(lambda: gone.llm_requests()[1:])
        connections = await gone.stop_listening()
        await until(lambda: connections() == 1)  # its idle ones are closed
        assert await ask(front, CHAT, OTHER) == 200
        await giving_up
        assert reasons(front) == ["engine_silent"]


async def test_a_client_gives_up_on_an_engine_that_was_sending() -> None:
    async with EngineStub(delay_s=0.1) as stub, Front(stub.url) as front:
        stub.deaf = True
        await gives_up(front, CHAT, stream=True, said=LONG)
        assert (front.lost, unanswered(front)) == (["disconnected"], [])


CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"stub","choices":[{"index":0,%s}]}\n\n'
ROLE = CHUNK % b'"delta":{"role":"assistant","content":""},"finish_reason":null'
CREATED = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"r",'
    b'"object":"response","status":"in_progress","model":"stub","output":[]}}\n\n'
)
FIRST_BYTES = (
    (CHAT, b""), (CHAT, b": keep-alive\n\n"), (CHAT, ROLE), (CHAT, b'{"id":"c",'),
    (CHAT, ROLE + CHUNK % b'"delta":{"content":"a"},"token_ids":[97],"finish_reason":null'),
    (COMPLETIONS, b": keep-alive\n\n"), (MESSAGES, ROLE), (RESPONSES, CREATED),
)


async def test_a_client_gives_up_on_an_engine_that_went_dead_after_its_first_bytes() -> None:
    """Whatever came before, the engine is to blame if it does not even answer ``/health`` any more, and only then."""

    async def given_up(path: str, first: bytes, healthy: bool) -> list[str]:
        stream = not first.startswith(b"{")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                if healthy:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    return
            else:
                kind = b"text/event-stream" if stream else b"application/json"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: 99999\r\n\r\n" % kind + first)
            await asyncio.Event().wait()

        async with listening(serve) as url, Front(url) as front:
            await gives_up(front, path, after_s=4.0, stream=stream)
            assert front.lost == (["disconnected"] if healthy else ["engine_silent"]), (path, first)
            return reasons(front)

    cases = [(*one, healthy) for one in FIRST_BYTES for healthy in (False, True)]
    for case, found in zip(cases, await asyncio.gather(*(given_up(*case) for case in cases)), strict=True):
        assert found == ([] if case[-1] else ["engine_silent"]), case


@pytest.mark.parametrize("gate_mode", ["pause", "drain"])
async def test_a_client_gives_up_while_the_weights_change(gate_mode: str) -> None:
    """An engine that is frozen for them cannot answer. One that is drained goes on with the call."""
    async with EngineStub(delay_s=0.05) as stub, Front(stub.url, gate_mode=gate_mode) as front:
        giving_up = asyncio.create_task(gives_up(front, CHAT, stream=True, said=LONG))
        await until(lambda: front.of(CallStarted))
        front.close_gate()
        await giving_up
        assert reasons(front) == (["engine_silent"] if gate_mode == "pause" else [])


async def test_a_client_gives_up_on_an_engine_of_which_nothing_was_known_yet(stub: EngineStub, front: Front) -> None:
    """Such an engine is asked about itself before the first request is sent."""
    stub.faults.append(Fault("hang", times=9))
    stub.deaf = True
    await gives_up(front, CHAT, include_reasoning=False)
    assert reasons(front) == ["engine_silent"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
NOT_CAPTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "beam_search": (COMPLETIONS, {"use_beam_search": True}), "background": (RESPONSES, {"background": True}),
    "multimodal": (CHAT, {}),
}  # fmt: skip


def seeing(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that were `said`, with an image."""
    return [{**one, "content": [{"type": "text", "text": one["content"]}, IMAGE]} for one in said]


@pytest.mark.parametrize(("fault", "reason"), [
    (fault, reason) for fault, reason in (*BOTH_WAYS[len(STATUSES):], *STREAMED, (Fault("not_vllm"), "capture_failed"))
    if fault.kind != "silent_close"
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", NOT_CAPTURED)
async def test_an_answer_that_is_not_captured_fails(
    stub: EngineStub, front: Front, kind: str, stream: bool, fault: Fault, reason: str
) -> None:
    """The agent does not care whether it could have been trained."""
    path, more = NOT_CAPTURED[kind]
    if (fault.kind in ("error_event", "no_finish") and not stream) or (path == RESPONSES and fault.kind == "abort"):
        return
    first, other = (seeing(said) if kind == "multimodal" else said for said in (FIRST, OTHER))
    assert await ask(front, path, other, **more, stream=stream) == 200
    assert (front.lost, unanswered(front)) == ([kind], [])
    stub.faults.append(fault)
    await ask(front, path, first, **more, stream=stream)
    await until(lambda: unanswered(front))
    assert (reasons(front), front.lost) == ([reason], [kind, kind, reason])
    assert await ask(front, path, first, **more, stream=stream) == 200
    assert unanswered(front) == []


def says(value: Any, *, stream: bool = False) -> Fault:
    """An engine whose whole answer is `value`, as an event if it is a `stream`."""
    body = value if isinstance(value, str) else json.dumps(value)
    return Fault("says", body=f"data: {body}\n\n", media="text/event-stream") if stream else Fault("says", body=body)


UNWELL = {"error": {"message": "unwell", "type": "InternalServerError", "code": 500}}
OPEN = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "stub", "choices": [
    {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
]}  # fmt: skip


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(("body", "among"), [
    (UNWELL, {"engine_error"}), ({}, {"truncated", "capture_failed"}),
    ({"object": "error", "message": "unwell", "code": 500}, {"engine_error", "truncated", "capture_failed"}),
])  # fmt: skip
async def test_an_error_in_an_answer_with_status_200_is_no_answer(
    stub: EngineStub, front: Front, path: str, body: dict[str, Any], among: set[str]
) -> None:
    stub.faults.append(says(body))
    await ask(front, path, FIRST)
    (reason,) = reasons(front)
    assert reason in among


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
async def test_a_response_that_has_not_ended_is_no_answer(
    stub: EngineStub, front: Front, status: str, stream: bool
) -> None:
    body = {"id": "r", "object": "response", "status": status, "output": [], "error": None}
    last = {"type": f"response.{status}", "response": body, "sequence_number": 1}
    stub.faults.append(says(last if stream else body, stream=stream))
    await ask(front, RESPONSES, FIRST, stream=stream)
    assert reasons(front) == ["truncated"]


@pytest.mark.parametrize(("kind", "stream", "fault", "expected"), [
    ("multimodal", False, says(UNWELL), ["engine_error"]), ("multimodal", False, says("<html>"), ["capture_failed"]),
    ("multimodal", True, says(OPEN, stream=True), ["truncated"]),
    ("multimodal", False, Fault("slow"), []), ("multimodal", True, Fault("no_done"), []),
    ("background", False, says({"id": "r", "status": "failed", "output": []}), ["engine_error"]),
    ("background", False, says({"id": "r", "status": "queued", "output": []}), []),
])  # fmt: skip
async def test_a_call_that_is_not_captured_is_answered_by_an_answer_alone(
    stub: EngineStub, front: Front, kind: str, stream: bool, fault: Fault, expected: list[str]
) -> None:
    path, more = NOT_CAPTURED[kind]
    stub.faults.append(fault)
    await ask(front, path, seeing(FIRST) if kind == "multimodal" else FIRST, **more, stream=stream)
    await until(lambda: front.lost)
    assert reasons(front) == expected


@pytest.mark.parametrize(("stream", "fault", "expected"), [
    (False, Fault("abort"), ["engine_aborted"]), (True, Fault("abort"), ["engine_aborted"]),
    (False, Fault("not_vllm"), ["capture_failed"]), (True, Fault("not_vllm"), ["capture_failed"]),
    (True, says(OPEN, stream=True), ["truncated"]), (True, None, []),
])  # fmt: skip
async def test_a_question_that_was_put_again_is_answered_by_an_answer_alone(
    stub: EngineStub, front: Front, stream: bool, fault: Fault | None, expected: list[str]
) -> None:
    stub.faults += [Fault("status", status=400), *([fault] if fault else [])]
    await ask(front, CHAT, FIRST, stream=stream)
    await until(lambda: len(front.lost) == 1 + len(expected))
    assert (reasons(front), front.lost) == (expected, ["unaskable", *expected])


async def test_the_gate_is_not_waited_for() -> None:
    """The client gives up, or gets a 503; and a retry that is answered makes both good."""
    async with EngineStub() as stub, Front(stub.url, hold_s=0.05) as front:
        front.open("x")
        front.close_gate()
        assert await ask(front, CHAT, FIRST) == 503
        (lost,) = unanswered(front)
        assert (lost["reason"], lost["detail"], "call" in lost) == ("unserved", "gate_closed", False)
        front.gate._hold_s = 60.0
        waiting = asyncio.create_task(ask(front, CHAT, OTHER))
        await until(lambda: front.gate.waiting)
        await leave(waiting)
        await until(lambda: len(unanswered(front)) == 2)
        assert reasons(front) == ["unserved", "held"]
        front.open_gate(1)
        assert await ask(front, CHAT, FIRST) == 200
        assert reasons(front) == ["held"]
        assert await ask(front, CHAT, OTHER) == 200
        assert unanswered(front) == []


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_request_that_is_not_even_read(front: Front, path: str) -> None:
    """Memory has no room for its body. Nobody knows what it said, so whatever is answered next makes it good."""
    front.open("x")
    front.budget.look(0)
    large = [{"role": "user", "content": "say: " + "word " * 50_000}]
    assert await ask(front, path, large) == 503
    await until(lambda: unanswered(front))
    (lost,) = unanswered(front)
    assert (lost["reason"], lost["detail"]) == ("unserved", "memory_limit")
    assert await ask(front, path, FIRST, agent="any") == 200
    assert unanswered(front) == []


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/v1/models"), ("POST", "/v1/embeddings"), ("POST", "/v1/messages/count_tokens"),
])  # fmt: skip
@pytest.mark.parametrize(("status", "detail"), [
    (503, "status 503"), (429, "status 429"), (0, "engine_connect"), (404, None), (501, None), (200, None),
])  # fmt: skip
async def test_what_is_not_captured_fails_its_agent_too(
    stub: EngineStub, front: Front, method: str, path: str, status: int, detail: str | None
) -> None:
    key = front.open("x")
    async with saying(path, status or 200) as url:
        front.fixed[""] = (url if status else f"http://127.0.0.1:{free_port()}",)
        sent = b"{}" if method == "POST" else None
        await send(front.url + path, method=method, body=sent, headers=bearer(key))
    assert [lost["detail"] for lost in unanswered(front)] == ([] if detail is None else [detail])
    front.fixed[""] = (stub.url,)
    assert await ask(front, CHAT, FIRST, agent="any") == 200
    assert unanswered(front) == [], "it went on"


async def test_a_reward_that_the_disk_does_not_take(front: Front) -> None:
    """Its request goes no further."""
    key = front.open("x")
    front.store.full = True
    headers = bearer(key) | {"X-AJet-Reward": "0.5"}
    assert (await send(front.url + CHAT, body=body_of(CHAT, FIRST), headers=headers)).status == 503
    await until(lambda: unanswered(front))
    assert (unanswered(front)[0]["reason"], unanswered(front)[0]["detail"]) == ("unserved", "journal")


async def test_one_who_comes_again_and_again_is_noted_once() -> None:
    async with EngineStub() as stub, Front(stub.url, hold_s=0.01) as front:
        front.open("x")
        front.close_gate()
        before = len(front.store.durable)
        for _ in range(5):
            assert await ask(front, CHAT, FIRST) == 503
        assert reasons(front) == ["unserved"]
        assert len(front.store.durable) == before + 1
