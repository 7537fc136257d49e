"""The gate in its pausing mode, over HTTP: engines are frozen, told their version and woken; nobody waits longer."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy.io.engines import pause
from tests.kit.engine_stub import EngineStub
from tests.kit.ports import free_port
from tests.proxy.serving import CHAT, Client, eventually, serving


async def test_after_an_update_no_call_uses_what_other_weights_left_in_the_prefix_cache(tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        await client.chat("one")
        await client.control("POST", "/gate/close", {})
        held = asyncio.create_task(client.chat("two"))
        await client.until(lambda status: status["requests"]["waiting"])
        await client.control("POST", "/gate/open", {"policy_version": 1})
        await held
        since = (await client.status())["gate"]["since"]
        assert [r.body.get("cache_salt") for r in stub.llm_requests()] == [None, f"#1.{round(since * 1000)}"]
        records = [await client.record(name) for name in ("one", "two")]
        before, after = (record["calls"][0]["altered"] for record in records)
        assert after == [*before, "cache_salt"]


async def test_who_gives_up_on_an_engine_that_is_frozen_for_its_weights_is_not_to_blame(tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        await client.chat("one")
        stub.paused.clear()
        asking = asyncio.create_task(client.chat("one", "again"))
        await eventually(lambda: len(stub.llm_requests()) == 2)
        await client.control("POST", "/gate/close", {})
        asking.cancel()
        await eventually(partial(blamed, client, ["engine_silent"]))


async def blamed(client: Client, reasons: list[str]) -> bool:
    record = (await client.control("GET", "/episodes/one")).json
    return [one["reason"] for one in record["unanswered"]] == reasons


async def test_a_gate_that_drains_leaves_the_prefix_cache_to_the_trainer(client: Client, stub: EngineStub) -> None:
    await client.control("POST", "/gate/open", {"policy_version": 1})
    await client.chat("one")
    assert "cache_salt" not in stub.llm_requests()[0].body


class Curious(EngineStub):
    """An engine that looks, when it is woken, which version the proxy says it has."""

    client: Client
    version: int

    async def resume(self, request: web.Request) -> web.Response:
        self.version = (await self.client.control("GET", "/status")).json["models"]["stub"]["policy_version"]
        return await super().resume(request)


async def test_the_new_version_stands_before_a_frozen_engine_goes_on(tmp_path: Path) -> None:
    async with Curious() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",), gate_mode="pause") as client:
        stub.client = client
        await client.control("POST", "/gate/close", {})
        await client.control("POST", "/gate/open", {"policy_version": 5})
        assert stub.version == 5


class Busy(EngineStub):
    """An engine that is woken only when somebody has asked it something."""

    async def resume(self, request: web.Request) -> web.Response:
        await eventually(lambda: len(self.llm_requests()) == 1)
        return await super().resume(request)


async def test_who_was_held_does_not_wait_until_an_engine_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "WAKE_S", 300.0)
    async with Busy() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",), gate_mode="pause") as client:
        await client.control("POST", "/gate/close", {})
        held = asyncio.create_task(client.chat("held"))
        await client.until(lambda status: status["requests"]["waiting"])
        assert (await client.control("POST", "/gate/open", {"policy_version": 1})).status == 200
        assert (await held).status == 200


async def test_an_engine_that_died_frozen_does_not_keep_the_others_from_going_on(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        assert (await client.control("POST", "/gate/close", {})).status == 200
        await client.control("POST", "/policy", {"model": "mortal", "version": 0, "upstreams": [dead]})
        answer = await client.control("POST", "/gate/open", {"policy_version": 1})
        assert answer.status == 200
        [fault] = answer.json["not_resumed"]
        assert dead in fault
        assert (await client.chat("one")).status == 200


async def test_an_engine_that_cannot_be_paused_is_a_clear_error(tmp_path: Path) -> None:
    async with serving(tmp_path, upstream=("http://127.0.0.1:9",), gate_mode="pause") as client:
        answer = await client.control("POST", "/gate/close", {})
        assert answer.status == 502
        assert "http://127.0.0.1:9" in answer.json["error"]["message"]


async def test_each_of_several_models_has_its_own_engines_frozen_and_woken(tmp_path: Path) -> None:
    async with (
        EngineStub(models=("one",)) as one, EngineStub(models=("two",)) as two,
        serving(tmp_path, upstream=(f"one={one.url}", f"two={two.url}"), gate_mode="pause") as client,
    ):
        for model in ("one", "two"):
            await client.control("POST", "/policy", {"model": model, "version": 1})
        await client.control("POST", "/gate/close", {"model": "one"})
        assert ([r.path for r in one.requests], two.requests) == (["/pause"], [])
        await client.control("POST", "/gate/close", {"model": "two"})
        await client.control("POST", "/gate/open", {"policy_version": 2, "model": "two"})
        assert [r.path for r in two.requests] == ["/pause", "/update_weight_version", "/resume"]
        assert [r.path for r in one.requests] == ["/pause"]


async def test_an_engine_of_a_teacher_that_cannot_be_frozen_is_no_matter_to_the_only_trainer(tmp_path: Path) -> None:
    async with EngineStub(models=("one",)) as one:
        upstreams = (f"one={one.url}", "judge=http://127.0.0.1:9")
        async with serving(tmp_path, upstream=upstreams, gate_mode="pause") as client, EngineStub(models=("t",)) as it:
            await client.control("POST", "/policy", {"model": "one", "version": 1, "upstreams": [one.url, it.url]})
            answer = await client.control("POST", "/gate/close", {"model": "one"})
            assert (answer.status, answer.json["gate"]) == (200, "closed")
            assert [[r.path for r in engine.requests] for engine in (one, it)] == [["/pause"]] * 2
            assert (await client.control("POST", "/gate/open", {"policy_version": 2, "model": "one"})).status == 200
            assert [engine.requests[-1].path for engine in (one, it)] == ["/resume"] * 2
    async with EngineStub(models=("one",)) as one, EngineStub(models=("judge",)) as judge:
        upstreams = (f"one={one.url}", f"judge={judge.url}")
        async with serving(tmp_path / "two", upstream=upstreams, gate_mode="pause") as client:
            await client.control("POST", "/policy", {"model": "one", "version": 1})
            await client.control("POST", "/gate/close", {"model": "one"})
            assert ([r.path for r in one.requests], judge.requests) == (["/pause"], [])


@pytest.mark.parametrize("mode", ["drain", "pause"])
async def test_two_models_of_one_engine_have_gates_of_their_own(tmp_path: Path, mode: str) -> None:
    """As two adapters have: while one waits for its calls and takes weights, the same engine answers the other. It is
    not frozen, nor told a version that only one of them has."""

    async def ask(model: str) -> int:
        return (await client.ask("POST", f"/e/{model}/v1/chat/completions", CHAT | {"model": model})).status

    async def figures(model: str) -> tuple[Any, ...]:
        one = (await client.status())["models"][model]
        return one["gate"], one["policy_version"], one["in_flight"], one["waiting"]

    async def are(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
        return (await figures("one"), await figures("two")) == (one, two)

    async with (
        EngineStub(models=("one", "two")) as stub,
        serving(tmp_path, upstream=(f"one={stub.url}", f"two={stub.url}"), gate_mode=mode) as client,
    ):
        for number, model in enumerate(("one", "two")):
            await client.control("POST", "/policy", {"model": model, "version": number})
            assert await ask(model) == 200  # by now the daemon knows how its engine samples
        stub.paused.clear()
        calls = [asyncio.create_task(ask("one"))]
        await eventually(partial(are, ("open", 0, 1, 0), ("open", 1, 0, 0)))
        answer = await client.control("POST", "/gate/close", {"model": "one", "wait_s": 0})
        assert (answer.status, answer.json["error"]["code"]) == (503, "gate_closing")
        calls += [asyncio.create_task(ask(model)) for model in ("one", "two")]
        await eventually(partial(are, ("closing", 0, 1, 1), ("open", 1, 1, 0)))
        stub.paused.set()
        answer = await client.control("POST", "/gate/close", {"model": "one", "wait_s": 300})
        assert (answer.status, answer.json["in_flight"]) == (200, 0)
        assert await ask("two") == await calls[0] == await calls[2] == 200 and not calls[1].done()
        await eventually(partial(are, ("closed", 0, 0, 1), ("open", 1, 0, 0)))
        await client.control("POST", "/gate/open", {"policy_version": 5, "model": "one"})
        assert await calls[1] == 200
        await eventually(partial(are, ("open", 5, 0, 0), ("open", 1, 0, 0)))
        paths = {request.path for request in stub.requests}
        assert paths.isdisjoint({"/pause", "/update_weight_version", "/reset_prefix_cache"})


async def test_an_engine_frozen_before_it_was_shared_goes_on_as_soon_as_one_of_its_models_does(tmp_path: Path) -> None:
    async with (
        EngineStub(models=("one", "two")) as stub,
        serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client,
    ):
        for model in ("one", "two"):
            await client.control("POST", "/policy", {"model": model, "version": 1})
            await client.control("POST", "/gate/close", {"model": model})
        assert [r.path for r in stub.requests] == ["/pause"]
        assert (await client.control("POST", "/gate/open", {"policy_version": 2, "model": "one"})).status == 200
        assert [r.path for r in stub.requests] == ["/pause", "/resume"]


class Deaf(EngineStub):
    """An engine that answers 500 to its first wishes to go on, and then breaks the connection as a server does."""

    refusals = 2

    async def _label(self, request: web.Request) -> web.Response:
        await self._note(request)
        assert request.transport is not None
        asyncio.get_running_loop().call_soon(request.transport.close)
        return web.Response(status=500)

    async def resume(self, request: web.Request) -> web.Response:
        self.refusals -= 1
        if self.refusals >= 0:
            await self._note(request)
            return web.Response(status=500)
        return await super().resume(request)


async def test_an_engine_is_told_to_go_on_until_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "WAKE_S", 300.0)
    async with Deaf() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        await client.control("POST", "/gate/close", {})
        answer = await client.control("POST", "/gate/open", {"policy_version": 1})
        assert answer.status == 200 and "not_resumed" not in answer.json
        assert [r.path for r in stub.requests] == ["/pause", "/update_weight_version", "/resume", "/resume", "/resume"]
        assert (await client.chat("one")).status == 200


async def test_an_engine_that_stays_frozen_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "WAKE_S", 0.3)
    async with Deaf() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        stub.refusals = 1000
        await client.control("POST", "/gate/close", {})
        answer = await client.control("POST", "/gate/open", {"policy_version": 1})
        assert answer.status == 502 and answer.json["error"]["code"] == "engine_cannot_pause"
