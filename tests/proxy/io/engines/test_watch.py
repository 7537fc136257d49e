"""Signs that are noticed of an engine that was started again or stays frozen, and what is not a fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ajet_proxy.doctor import examine
from ajet_proxy.io.engines import watch
from ajet_proxy.io.engines.engine import EngineState
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.engines.vllm import own_models
from ajet_proxy.io.engines.watch import EngineWatch, changed, read
from ajet_proxy.settings import Config
from tests.kit.engine_stub import EngineStub
from tests.kit.ports import free_port
from tests.proxy.io.front import until
from tests.proxy.serving import Client, eventually, serving


async def noted(stub: EngineStub, folder: Path) -> None:
    """Returns once it is on file what an engine says of itself."""
    await eventually(lambda: stub.url in read(folder))


class Site:
    """An engine, and what is noticed of it."""

    def __init__(self, stub: EngineStub, folder: Path) -> None:
        self.stub, self.folder = stub, folder
        self.alerts: dict[str, str] = {}
        self.gates: set[str] = set()
        self.start()

    def start(self) -> None:
        engines = Engines({"policy": (self.stub.url,)}, lambda model: (), lambda: ("policy",))
        self.alerts.clear()
        self.watch = EngineWatch(engines, self.alerts, shut=lambda: self.gates, data_dir=self.folder)

    async def opened(self) -> None:
        self.watch.spoken("policy")
        await self.watch.look()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with EngineStub(models=("policy",), label="default", port=free_port()) as stub:
        yield Site(stub, tmp_path)


async def test_an_engine_that_serves_another_model_is_named_until_it_serves_the_right_one(site: Site) -> None:
    await site.opened()
    site.stub.models = ("other",)
    await site.watch.look()
    [said] = site.alerts.values()
    assert f"the engine at {site.stub.url} serves other from other with" in said and "served policy from policy" in said
    site.start()  # a daemon that is started again remembers
    await site.watch.look()
    assert list(site.alerts.values()) == [said]
    assert site.watch.serves_other(f"{site.stub.url}/v1/chat/completions")
    site.stub.models = ("policy",)
    await site.watch.look()
    assert not site.alerts and not site.watch.serves_other(f"{site.stub.url}/v1/chat/completions")


async def test_a_trainer_says_what_is_right_from_then_on(site: Site) -> None:
    await site.opened()
    site.stub.models = ("other",)
    await site.watch.look()
    site.watch.spoken("policy")
    assert not site.watch.serves_other(f"{site.stub.url}/v1/chat/completions")
    await site.watch.look()
    await site.watch.look()
    assert not site.alerts and read(site.folder)[site.stub.url]["models"][0][0] == "other"


async def test_where_no_trainer_speaks_an_engine_may_serve_what_it_likes(site: Site) -> None:
    for models in (("one",), ("two",)):
        site.stub.models = models
        await site.watch.look()
    assert not site.alerts and not read(site.folder)


async def test_an_engine_that_was_started_again_serves_what_it_began_with(site: Site) -> None:
    site.stub.label = "7"
    await site.opened()
    site.stub.label = "8"  # a push is under way
    await site.watch.look()
    assert not site.alerts
    site.stub.label = "default"
    await site.watch.look()
    [said] = site.alerts.values()
    assert "was started again, and serves the weights that it began with, not version 7" in said
    site.stub.label = "8"
    await site.opened()
    assert not site.alerts


async def test_an_engine_that_was_away_is_looked_at_before_its_next_call_counts(site: Site) -> None:
    await site.opened()
    route = f"{site.stub.url}/v1/chat/completions"
    await site.stub.__aexit__()
    await site.watch.look()
    assert not site.alerts, "it says nothing"
    site.stub.models = ("other",)
    await site.stub.__aenter__()
    await asyncio.gather(*(site.watch.settle(route) for _ in range(2)))
    assert site.watch.serves_other(route)
    site.stub.models = ("policy",)
    await site.watch.settle(route)
    assert site.watch.serves_other(route), "it has not failed since"
    site.watch.doubt()
    await site.watch.settle(f"{site.stub.url}0/v1/chat/completions")
    assert site.watch.serves_other(route), "that is another engine"
    await site.watch.settle(route)
    assert not site.watch.serves_other(route)


async def test_a_look_at_an_engine_that_hangs_holds_up_no_other_and_is_made_again_if_it_is_broken_off(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.opened()
    hung, right, looks, probe = "http://hung", site.stub.url, list[str](), site.watch._probe
    site.watch._noted[hung] = site.watch._noted[right]

    async def look(urls: list[str]) -> list[EngineState]:
        looks.extend(urls)
        return await (asyncio.Future() if looks == [hung] else probe([right]))

    monkeypatch.setattr(site.watch, "_probe", look)
    site.watch.doubt()
    first, second = [asyncio.create_task(site.watch.settle(f"{hung}/v1/chat/completions")) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(300):
        await site.watch.settle(f"{right}/v1/chat/completions")
        assert looks == [hung, right] and not second.done()
        first.cancel()
        await second
        await site.watch.settle(f"{hung}/v1/chat/completions")
    assert looks == [hung, right, hung]


async def test_what_answers_after_the_trainer_spoke_of_an_engine_that_died_is_not_taken_as_right(site: Site) -> None:
    await site.opened()
    await site.stub.__aexit__()
    await site.opened()
    site.stub.models = ("other",)
    await site.stub.__aenter__()
    await site.watch.look()
    [said] = site.alerts.values()
    assert "serves other" in said and "served policy" in said


async def test_an_engine_is_frozen_only_if_it_is_so_twice_behind_open_gates(site: Site) -> None:
    site.stub.paused.clear()
    site.gates = {"policy"}
    for _ in range(3):
        await site.watch.look()
    site.gates = set()
    await site.watch.look()
    assert not site.alerts
    await site.watch.look()
    [said] = site.alerts.values()
    assert f"the engine at {site.stub.url} is frozen, and no gate is shut" in said
    site.stub.paused.set()
    await site.watch.look()
    assert not site.alerts


async def test_it_looks_soon_after_the_trainer_has_spoken(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SOON_S", 0.01)
    running = asyncio.create_task(site.watch.run())
    site.watch.spoken("")

    await noted(site.stub, site.folder)
    running.cancel()


async def became(client: Client, episode: str) -> str:
    """The state of an episode of one call and a reward, or why it cannot be trained."""
    await client.play(episode)
    record = await client.record(episode)
    return str(record.get("detail", record["state"]))


async def test_the_daemon_and_doctor_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SOON_S", 0.01)
    monkeypatch.setattr(watch, "LOOK_S", 0.05)
    async with EngineStub() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",)) as client:
        await client.control("POST", "/policy", {"model": "stub", "version": 0})
        await noted(stub, tmp_path)
        assert not (await client.status())["alerts"]
        assert await became(client, "before") == "ready"
        stub.models = ("stub", "other")
        await client.control("POST", "/policy", {"model": "stub", "version": 0})  # as a trainer that waits repeats
        await client.control("POST", "/gate/open", {"model": "stub", "policy_version": 0})
        await client.until(lambda status: any("serves other from other" in alert for alert in status["alerts"]))
        assert await became(client, "after") == "other_weights"
        found = await examine(Config(upstream=(stub.url,), data_dir=str(tmp_path)))
        assert [one.message for one in found if one.level == "fault" and "serves other from other" in one.message]
        stub.models = ("stub",)
        stub.paused.clear()
        asked = len(stub.llm_requests())

        async def goes_on() -> None:  # doctor generates something behind its look
            await until(lambda: len(stub.llm_requests()) > asked)
            stub.paused.set()

        found, _ = await asyncio.gather(examine(Config(upstream=(stub.url,), data_dir=str(tmp_path))), goes_on())
        assert [one.level for one in found if one.message.startswith("is frozen")] == ["warning"]


async def test_no_call_counts_of_an_engine_that_failed_before_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SOON_S", 0.01)
    monkeypatch.setattr(watch, "LOOK_S", 3600.0)
    async with EngineStub(port=free_port()) as stub, serving(tmp_path, upstream=(f"stub={stub.url}",)) as client:
        await client.control("POST", "/policy", {"model": "stub", "version": 0})

        await noted(stub, tmp_path)
        for models, became_of in ((("stub",), "ready"), (("stub", "other"), "other_weights"), (("stub",), "ready")):
            await stub.__aexit__()
            assert (await client.chat("none")).status == 502
            stub.models = models
            await stub.__aenter__()
            assert await became(client, f"after-{len(stub.requests)}") == became_of
        assert not (await client.status())["alerts"]


def test_what_is_no_model_of_the_engines_own_is_not_compared() -> None:
    base, adapter = {"id": "base", "root": "m", "max_model_len": 9}, {"id": "a", "root": "1", "parent": "base"}
    assert own_models({"data": [adapter, base, {"id": "x"}, "odd"]}) == [["base", "m", 9]]
    assert [own_models(odd) for odd in (None, [], {"data": None}, {"data": 5})] == [[]] * 4
    assert len(own_models({"data": [base, base | {"max_model_len": None}]})) == 2
    told = {"models": [["base", "m", 9]]}
    assert changed({}, told) is changed(told, {"models": []}) is None


def test_a_file_that_cannot_be_read_holds_nothing(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"u": 3}'):
        (tmp_path / watch.FILE).write_text(text)
        assert read(tmp_path) == {}


async def test_at_the_start_it_is_said_what_each_engine_serves(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await site.watch.greet()
    await site.stub.__aexit__()
    await site.watch.greet()
    url = site.stub.url
    remedy = "start it, or set AJET_UPSTREAM_KEY to its --api-key"
    assert caplog.messages[0] == f"engine {url} serves 'policy'"
    assert caplog.messages[-1] == f"engine {url} does not say what it serves: {remedy}"
