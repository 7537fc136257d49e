"""The front door: which way a request goes, who may, and what happens on the way in."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger.events import CallStarted, EpisodeOpened
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.io.capture import front as http_front
from ajet_proxy.io.capture.front import MOST_MISSPELT
from tests.kit.answering import saying
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import send
from tests.proxy.io.front import BODY, CHAT, COMPLETIONS, SECRET, Front, bearer, error, get, leave, until

# --- routes


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/e/some-episode/v1/models"])
async def test_what_passes_is_untouched(stub: EngineStub, front: Front, path: str) -> None:
    direct = await get(stub.url + path.removeprefix("/e/some-episode"))
    answer = await get(front.url + path)
    headers = {name: value for name, value in direct.headers.items() if name != "date"}
    assert (answer.status, answer.body) == (direct.status, direct.body)
    assert {name: value for name, value in answer.headers.items() if name != "date"} == headers
    assert front.store.durable == []


@pytest.mark.parametrize("path", [*CAPTURED, "/v1/embeddings"])
async def test_a_body_that_is_no_request_is_read_once(front: Front, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out that it is none costs as much as to read one."""
    read: list[bytes] = []

    def reading(body: bytes, *more: Any) -> JsonBody:
        read.append(body)
        return JsonBody(body, *more)

    monkeypatch.setattr(http_front, "JsonBody", reading)
    await send(front.url + path, body=b'{"model": "stub",')
    assert read == [b'{"model": "stub",']


@pytest.mark.parametrize("path", [
    "/", "/pause", "/resume", "/reset_prefix_cache", "/stub/requests", "/metrics", "/v1", "/v2/rerank", "/e/x/pause",
    "/e/x", "/e/", "/e/x/e/y/v1/models", "//v1/models", "/v1/../pause", "/v1/%2e%2e/pause", "/v1/..%2fpause",
    "/v1/load_lora_adapter", "/v1/load_lora_adapter/", "/v1//load_lora_adapter", "/v1/unload%5Flora_adapter",
    "/v1/models%0a", "/v1/x%5c..", "/v1%2fload_lora_adapter", "/v1/x%2f..%2f..%2fpause", "/v1/%2fpause",
    "/inference/v1/generate",
])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_other_route_is_reachable(stub: EngineStub, front: Front, path: str, method: str) -> None:
    answer = await send(front.url + path, method=method)
    assert error(answer, 404)["type"] == "not_found_error"
    assert stub.requests == []


async def test_a_route_can_be_allowed() -> None:
    async with saying("/v2/rerank", 200) as engine, Front(engine, allow_route=("/v2/rerank",)) as front:
        assert (await send(f"{front.url}/v2/rerank")).status == 200
        assert (await send(f"{front.url}/pause")).status == 404


@pytest.mark.parametrize("path", [CHAT, CHAT + "/", "/v1/ch%61t/completions", "/e/x" + CHAT])
async def test_a_captured_route_is_captured_however_it_is_spelled(stub: EngineStub, front: Front, path: str) -> None:
    assert (await send(front.url + path, body=BODY)).status == 200
    assert len(front.calls) == 1
    assert stub.requests[0].path == CHAT


# --- bodies


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "ends in /v1"), ("/e/ep/chat/completions/", "ends in /v1"), ("/models", "ends in /v1"),
        ("/", "page is /ajet/"), ("/pause", ""), ("/e/ep", "/e/EPISODE: the base URL of an OpenAI client ends in"),
    ],
)
async def test_the_usual_mistakes_in_an_address_are_told(stub: EngineStub, front: Front, path: str, hint: str) -> None:
    message = error(await send(front.url + path, body=BODY), 404)["message"]
    assert hint in message
    assert (":" in message) is bool(hint)
    assert not stub.requests


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": "\xff"}'])
async def test_a_body_that_is_no_json_object_is_the_engines_to_refuse(
    stub: EngineStub, front: Front, body: bytes
) -> None:
    direct = await send(stub.url + CHAT, body=body)
    answer = await send(front.url + CHAT, body=body)
    assert (answer.status, answer.body) == (400, direct.body)
    assert front.store.durable == []


async def test_an_oversized_body_is_a_413() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 500

    async with EngineStub() as stub, Front(stub.url, max_body=2000) as front, aiohttp.ClientSession() as client:
        for path in (CHAT, "/v1/embeddings"):
            assert error(await send(front.url + path, body=b"x" * 2001), 413)["code"] == "body_too_large"
            async with client.post(front.url + path, data=chunks()) as answer:
                assert answer.status == 413
        assert (await send(front.url + "/v1/embeddings", body=b" " * 2000)).status == 200
        assert len(stub.requests) == 1


# --- identity and keys


async def test_every_call_of_a_name_joins_its_episode(front: Front) -> None:
    for headers in ({"X-AJet-Episode": "ep"}, {"session-id": "ep"}):
        assert (await send(front.url + CHAT, body=BODY, headers=headers)).headers["x-ajet-episode"] == "ep"
    other = {**BODY, "messages": [{"role": "user", "content": "and this"}], "user": "ep"}
    await send(front.url + CHAT, body=other)
    await send(f"{front.url}/e/ep{CHAT}", body=BODY)
    assert [call.identified_by for call in front.calls] == ["header", "harness", "body", "path"]
    assert {call.episode for call in front.calls} == {"ep"}
    assert len(front.of(EpisodeOpened)) == 1


async def test_labels_reach_the_episode_and_not_the_engine(stub: EngineStub, front: Front) -> None:
    labels = {"X-AJet-Task": "t", "X-AJet-Agent": "a", "X-AJet-Eval": "1", "X-AJet-Anything": "x"}
    await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=labels)
    assert not [name for name in stub.requests[0].headers if name.startswith("x-ajet")]
    (opened,) = front.of(EpisodeOpened)
    assert (opened.task, opened.eval, front.calls[0].agent) == ("t", True, "a")


async def test_a_later_call_that_says_it_is_of_an_evaluation_is_a_409(stub: EngineStub, front: Front) -> None:
    await send(f"{front.url}/e/ep{CHAT}", body=BODY)
    answer = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers={"X-AJet-Eval": "1"})
    said = error(answer, 409)
    assert (said["code"], said["param"]) == ("no_evaluation", "X-AJet-Eval")
    assert len(stub.requests) == len(front.calls) == 1


async def test_an_unusable_label_is_a_400(stub: EngineStub, front: Front) -> None:
    assert error(await send(f"{front.url}/e/a%20b{CHAT}", body=BODY), 400)["param"] == "episode"
    answer = await send(front.url + CHAT, body=BODY, headers={"X-AJet-Eval": "x"})
    assert error(answer, 400)["param"] == "X-AJet-Eval"
    assert stub.requests == [] and front.store.durable == []


async def test_behind_an_admin_secret_every_request_needs_a_key() -> None:
    async with EngineStub() as stub, Front(stub.url, admin_secret=SECRET) as front:
        own = front.open("ep", tenant="t1")
        tenant = front.keys.issue(Claims("agent", "t1"))
        other = front.keys.issue(Claims("agent", "t2"))
        for path in (CHAT, "/v1/models", "/health"):
            assert (await send(front.url + path, body=BODY if path == CHAT else None, method="POST")).status == 401
        assert (await send(front.url + CHAT, body=BODY, headers=bearer("sk-x"))).status == 401
        assert (await send(front.url + CHAT, body=BODY, headers=bearer(own + "x"))).status == 401
        assert (await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=bearer(other))).status == 403
        assert (await send(f"{front.url}/e/other{CHAT}", body=BODY, headers=bearer(own))).status == 403
        for headers, path in (
            (bearer(own), CHAT), ({"x-api-key": own}, CHAT), ({}, f"/e/{own}{CHAT}"), (bearer(SECRET), f"/e/ep{CHAT}"),
            (bearer(tenant), f"/e/ep{CHAT}"), (bearer(own), f"/e/ep{CHAT}"),
        ):  # fmt: skip
            assert (await send(front.url + path, body=BODY, headers=headers)).headers["x-ajet-episode"] == "ep"
        assert len(stub.requests) == 6
        for request in stub.requests:
            assert not set(request.headers) & {"authorization", "x-api-key"}, "no engine sees a key of ours"


async def test_a_key_of_ours_reaches_no_engine_wherever_it_stands() -> None:
    async with EngineStub() as stub, Front(stub.url, admin_secret=SECRET) as front:
        own = front.open("ep")
        for path in (CHAT, "/v1/embeddings"):
            name = "ajet-run-of-a-long-name"
            astray = {"api-key": own, "cookie": f"a=b; key={own}", "x-note": f"ajet {own}!", "x-run": name}
            await send(front.url + path, body=BODY, headers=bearer(own) | astray)
            received = stub.requests[-1].headers
            assert own not in str(received)
            assert received["x-run"] == name
            answer = await send(f"{front.url}{path}?key={own}", body=BODY, headers=bearer(own))
            assert error(answer, 400)["code"] == "key_in_query"
        assert len(stub.requests) == 2


async def test_a_misspelt_header_of_ours_is_named_once_in_the_log(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks for what was meant only then: it takes long, and nobody's key is known yet."""
    looked = Mock(wraps=http_front.meant)
    monkeypatch.setattr(http_front, "meant", looked)
    many = (f"x-ajet-no-{number}" for number in range(MOST_MISSPELT + 5))
    for name in ("x-ajet-rewards", "X-AJet-Rewards", *many):
        assert (await send(front.url + CHAT, body=BODY, headers={name: "1"})).status == 200
    told = [line.getMessage() for line in caplog.records if line.name == "ajet_proxy.io.capture.front"]
    assert told[0] == "a request has the header 'x-ajet-rewards', which means nothing; was X-AJet-Reward meant?"
    assert len(told) == MOST_MISSPELT == len(set(told)) == looked.call_count


# --- the gate, the disk, the engine


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/%76%31/embeddings"])
async def test_while_the_gate_is_closed_requests_wait(front: Front, path: str) -> None:
    front.close_gate()
    asking = asyncio.create_task(send(f"{front.url}/e/ep{path}", body={**BODY, "prompt": "x"}))
    await until(lambda: front.gate.waiting == 1)
    assert (await get(f"{front.url}/v1/models")).status == 200, "what is no generation does not wait"
    assert front.of(CallStarted) == []
    front.open_gate(4)
    assert (await asking).status == 200
    assert [call.policy_versions[0][0] for call in front.calls] == ([] if "embeddings" in path else [4])


async def test_a_gate_that_stays_closed_is_a_503() -> None:
    async with EngineStub() as stub, Front(stub.url, hold_s=0.1) as front:
        front.close_gate()
        answer = await send(front.url + CHAT, body=BODY)
        assert error(answer, 503) and int(answer.headers["retry-after"]) > 0
        assert stub.requests == [] and front.of(CallStarted) == []


async def test_without_an_engine_a_request_waits_for_one() -> None:
    async with EngineStub() as stub, Front() as front:
        asking = asyncio.create_task(send(front.url + CHAT, body=BODY))
        await until(lambda: front.gate.waiting == 1)
        assert error(await get(f"{front.url}/v1/models"), 503)["code"] == "no_engine"
        front.fixed[""] = (stub.url,)
        front.gate.changed()
        assert (await asking).status == 200


async def test_a_request_for_too_many_choices_is_refused_before_anything_happens(
    stub: EngineStub, front: Front
) -> None:
    refused = await send(f"{front.url}/e/ep{CHAT}", body={**BODY, "n": 1025})
    assert error(refused, 400)["code"] == "too_many_choices"
    assert stub.requests == [] and front.store.durable == []
    assert (await send(front.url + CHAT, body={**BODY, "n": 2})).status == 200


async def test_a_full_disk_stops_intake(stub: EngineStub, front: Front) -> None:
    front.store.full = True
    answer = await send(front.url + CHAT, body=BODY)
    assert error(answer, 503) and answer.headers["retry-after"] == "5"
    assert stub.requests == []


async def test_an_engine_that_is_down_is_a_502_and_the_call_is_lost() -> None:
    async with Front("http://127.0.0.1:9") as front:
        assert error(await send(f"{front.url}/e/ep{CHAT}", body=BODY), 502)["code"] == "engine_connect"
        assert error(await get(f"{front.url}/v1/models"), 502)
        assert front.lost == ["engine_error"] and front.running == 0
        await until(lambda: front.gate.in_flight == 0)


async def test_a_request_names_its_engine_by_its_model() -> None:
    async with EngineStub(models=("a",)) as one, EngineStub(models=("b",)) as two, Front() as front:
        front.fixed.update({"a": (one.url,), "b": (two.url,)})
        for path in (CHAT, "/v1/embeddings"):
            for model in ("a", "b"):
                assert (await send(front.url + path, body={**BODY, "model": model})).status == 200
        assert [[request.body["model"] for request in stub.requests] for stub in (one, two)] == [["a", "a"], ["b", "b"]]
        assert (await send(f"{front.url}/v1/embeddings", body=b"no json")).status == 200


async def test_requests_are_counted(stub: EngineStub, front: Front) -> None:
    await send(front.url + CHAT, body=BODY)
    await send(front.url + CHAT, body=b"no")
    await get(f"{front.url}/v1/models")
    await get(f"{front.url}/pause")
    stub.faults.append(Fault("hang"))
    asking = asyncio.create_task(send(front.url + COMPLETIONS, body={**BODY, "prompt": "x"}))
    await until(lambda: len(stub.llm_requests()) == 3)
    await leave(asking)
    await until(lambda: front.lost == ["disconnected"])
    text = front.metrics.render()
    for line in (
        'ajet_requests_total{route="chat",status="200"} 1', 'ajet_requests_total{route="chat",status="400"} 1',
        'ajet_requests_total{route="passthrough",status="200"} 1',
        'ajet_requests_total{route="completions",status="499"} 1',
        'ajet_requests_total{route="refused",status="404"} 1',
        'ajet_first_byte_seconds_count{route="chat"} 2', 'ajet_first_byte_seconds_count{route="passthrough"} 1',
    ):  # fmt: skip
        assert line in text


@pytest.mark.parametrize("upgrade", ["websocket", "WebSocket", "h2c, websocket/13"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime", "/e/x/v1/chat/completions", "/anything"])
async def test_a_probe_for_a_websocket_is_told_at_once_to_use_http(path: str, upgrade: str) -> None:
    async with EngineStub() as stub, Front(stub.url, admin_secret="s" * 16) as front:
        front.close_gate()
        told = {"Upgrade": upgrade, "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        answer = await send(front.url + path, method="GET", headers=told)
        assert (answer.status, answer.json()["error"]["code"]) == (426, "no_websockets")
        assert answer.headers["upgrade"] == "HTTP/1.1" and stub.requests == []


async def test_a_client_that_would_rather_speak_another_http_is_answered(front: Front) -> None:
    answer = await send(f"{front.url}/v1/models", method="GET", headers={"Upgrade": "h2c", "Connection": "Upgrade"})
    assert answer.status == 200
