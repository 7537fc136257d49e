"""The gate in its pausing mode, over HTTP: engines are frozen, told their version and woken; nobody waits longer."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from aiohttp import web

from tests.kit.engine_stub import EngineStub
from tests.kit.ports import free_port
from tests.proxy.serving import Client, eventually, serving


async def waiting(client: Client) -> bool:
    """Whether the gate holds somebody."""
    return bool((await client.status())["requests"]["waiting"])


async def test_the_gate_can_pause_the_engine_instead(tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        assert (await client.control("POST", "/gate/close", {})).status == 200
        assert [r.path for r in stub.requests] == ["/pause"]
        assert (await client.control("POST", "/gate/open", {"policy_version": 1})).status == 200
        assert [r.path for r in stub.requests] == ["/pause", "/update_weight_version", "/resume"]
        assert (await client.chat("one")).status == 200


async def test_after_an_update_no_call_uses_what_other_weights_left_in_the_prefix_cache(tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client:
        await client.chat("one")
        await client.control("POST", "/gate/close", {})
        held = asyncio.create_task(client.chat("two"))
        await eventually(partial(waiting, client))
        await client.control("POST", "/gate/open", {"policy_version": 1})
        await held
        since = (await client.status())["gate"]["since"]
        assert [r.body.get("cache_salt") for r in stub.llm_requests()] == [None, f"#1.{round(since * 1000)}"]
        records = [(await client.control("GET", f"/episodes/{name}")).json for name in ("one", "two")]
        before, after = (record["calls"][0]["altered"] for record in records)
        assert after == [*before, "cache_salt"]


async def test_a_gate_that_drains_leaves_the_prefix_cache_to_the_trainer(tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        await client.control("POST", "/gate/open", {"policy_version": 1})
        await client.chat("one")
        assert "cache_salt" not in stub.llm_requests()[0].body


class Curious(EngineStub):
    """An engine that looks, when it is woken, which version the proxy says it has."""

    client: Client
    version: int

    async def _resume(self, request: web.Request) -> web.Response:
        self.version = (await self.client.control("GET", "/status")).json["models"]["stub"]["policy_version"]
        return await super()._resume(request)


async def test_the_new_version_stands_before_a_frozen_engine_goes_on(tmp_path: Path) -> None:
    async with Curious() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",), gate_mode="pause") as client:
        stub.client = client
        await client.control("POST", "/gate/close", {})
        await client.control("POST", "/gate/open", {"policy_version": 5})
        assert stub.version == 5


class Busy(EngineStub):
    """An engine that is woken only when somebody has asked it something."""

    async def _resume(self, request: web.Request) -> web.Response:
        await eventually(self._asked)
        return await super()._resume(request)

    async def _asked(self) -> bool:
        return len(self.llm_requests()) == 1


async def test_who_was_held_does_not_wait_until_an_engine_says_that_it_goes_on(tmp_path: Path) -> None:
    async with Busy() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",), gate_mode="pause") as client:
        await client.control("POST", "/gate/close", {})
        held = asyncio.create_task(client.chat("held"))
        await eventually(partial(waiting, client))
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


async def test_an_engine_of_two_models_stays_frozen_until_both_are_done(tmp_path: Path) -> None:
    async with (
        EngineStub(models=("one", "two")) as stub,
        serving(tmp_path, upstream=(stub.url,), gate_mode="pause") as client,
    ):
        for model in ("one", "two"):
            await client.control("POST", "/policy", {"model": model, "version": 1})
            await client.control("POST", "/gate/close", {"model": model})
        assert (await client.control("POST", "/gate/open", {"policy_version": 2, "model": "two"})).status == 200
        assert [r.path for r in stub.requests] == ["/pause", "/pause"]
        await client.control("POST", "/gate/open", {"policy_version": 2, "model": "one"})
        assert stub.requests[-1].path == "/resume"
