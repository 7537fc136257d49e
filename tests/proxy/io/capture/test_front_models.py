"""Which model a call goes to: the one that its episode was opened with, or the one that was asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy.core.protocol.routes import RENAMED
from ajet_sdk.routes import Policy
from tests.kit.answering import answering
from tests.kit.engine_stub import EngineStub
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, Front, until

BODY = {"model": "stub", "messages": [{"role": "user", "content": "Hello"}]}


async def test_the_episodes_model_and_agent_hold_for_its_calls() -> None:
    async with EngineStub(models=("given", "small")) as stub, Front(stub.url) as front:
        front.open("ep", model="given", agent="solver", members={"critic": "small"})
        await send(f"{front.url}/e/ep{CHAT}", body={**BODY, "model": "gpt-4o"})
        await send(f"{front.url}/e/ep{CHAT}", body={**BODY, "model": "given"})
        await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers={"X-AJet-Agent": "critic"})
    assert [(call.model, call.agent) for call in front.calls] == [
        ("given", "solver"), ("given", "solver"), ("small", "critic"),
    ]  # fmt: skip
    assert ["model" in call.altered for call in front.calls] == [True, False, True]


async def test_a_model_that_is_served_by_name_stays_what_was_asked_for() -> None:
    async with EngineStub(models=("policy",)) as stub, EngineStub(models=("judge",)) as other, Front(stub.url) as front:
        front.fixed["judge"] = (other.url,)
        front.open("ep", model="policy")
        for model in ("policy", "judge", "gpt-4o"):
            await send(f"{front.url}/e/ep{CHAT}", body={**BODY, "model": model})
        assert [(call.model, "model" in call.altered) for call in front.calls] == [
            ("policy", False), ("judge", False), ("policy", True),
        ]  # fmt: skip
        assert len(other.llm_requests()) == 1


async def test_the_name_of_an_agent_may_be_asked_for_as_a_model() -> None:
    """So a program that says `model="plans"` needs no change. A label says whose call it is, whatever is asked for."""
    async with EngineStub(models=("planner",)) as one, EngineStub(models=("coder",)) as two, Front() as front:
        for model, stub in (("planner", one), ("coder", two)):
            front.announce(model, 1, stub.url)
        front.open("ep", members={"plans": "planner"}, teachers={"codes": "coder"})
        for asked, label in (("plans", {}), ("codes", {}), ("plans", {"X-AJet-Agent": "codes"}), ("coder", {})):
            answer = await send(f"{front.url}/e/ep{CHAT}", body={**BODY, "model": asked}, headers=label)
            assert answer.status == 200
        assert [(call.agent, call.model, "model" in call.altered) for call in front.calls] == [
            ("plans", "planner", True), ("codes", "coder", True), ("codes", "coder", True), ("", "coder", False),
        ]  # fmt: skip
        assert (len(one.llm_requests()), len(two.llm_requests())) == (1, 3)


async def test_a_call_waits_at_the_gate_of_the_model_that_will_serve_it() -> None:
    async with EngineStub(models=("planner",)) as one, EngineStub(models=("coder",)) as two, Front() as front:
        for model, stub in (("planner", one), ("coder", two)):
            front.announce(model, 1, stub.url)
        front.open("ep", members={"plans": "planner", "codes": "coder"})
        front.close_gate("planner")
        held = asyncio.create_task(
            send(f"{front.url}/e/ep{CHAT}", body={**BODY, "model": "gpt-4o"}, headers={"X-AJet-Agent": "plans"})
        )
        await until(lambda: front.gate.of("planner").waiting == 1)
        free = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers={"X-AJet-Agent": "codes"})
        assert (free.status, front.gate.of("coder").busy_s > 0, len(one.llm_requests())) == (200, True, 0)
        since = front.store.state.gates.table["planner"].since
        front.open_gate(2, "planner")
        assert (await held).status == 200
        versions = [(call.model, [version for version, _ in call.policy_versions]) for call in front.calls]
        assert versions == [("coder", [1]), ("planner", [2])]
        assert front.store.state.gates.table["planner"].since >= since


class Counting:
    """An engine that counts, and notes for which model."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def answer(self, http: web.Request) -> web.Response:
        self.asked.append((http.path, (await http.json()).get("model")))
        return web.json_response({})


@pytest.mark.parametrize("path", sorted(RENAMED))
async def test_tokens_are_counted_by_the_model_that_the_episodes_calls_go_to(path: str) -> None:
    one, two = Counting(), Counting()
    async with answering(path, one.answer) as first, answering(path, two.answer) as second, Front() as front:
        for model, url in (("policy", first), ("small", first), ("judge", second)):
            front.announce(model, 1, url)
        front.open("ep", model="policy", members={"critic": "small"})
        asked: list[tuple[str, dict[str, str], dict[str, str]]] = [
            ("/e/ep", {"model": "gpt-4o"}, {}), ("/e/ep", {}, {}), ("/e/ep", {"model": "critic"}, {}),
            ("/e/ep", {"model": "gpt-4o"}, {"X-AJet-Agent": "critic"}),
            ("/e/ep", {"model": "judge"}, {}), ("/e/other", {"model": "judge"}, {}), ("", {"model": "judge"}, {}),
        ]
        for prefix, body, headers in asked:
            answer = await send(front.url + prefix + path, body={"prompt": "hi", **body}, headers=headers)
            assert answer.status == 200
    assert one.asked == [(path, model) for model in ("policy", "policy", "small", "small")]
    assert two.asked == [(path, "judge")] * 3


async def test_the_models_of_all_engines_are_listed_once() -> None:
    one, two = EngineStub(models=("policy", "both")), EngineStub(models=("judge", "both"))
    async with one, two, Front() as front:
        front.announce("policy", 1, one.url)
        front.announce("judge", 1, two.url)
        front.announce("gone", 1, "http://127.0.0.1:9")
        answer = await send(f"{front.url}/v1/models", method="GET")
        assert answer.json()["object"] == "list"
        assert sorted(card["id"] for card in answer.json()["data"]) == ["both", "judge", "policy"]
        assert all(card["owned_by"] == "vllm" for card in answer.json()["data"])
        front.open("ep", model="policy", members={"critic": "judge"})
        for prefix, asked, named in (
            ("", "policy", "policy"), ("", "judge", "judge"), ("/e/ep", "gpt-4o", "policy"),
            ("/e/ep", "judge", "judge"), ("/e/ep", "critic", "judge"), ("/e/ep", "qwen/qwen%2D3", "policy"),
        ):  # fmt: skip
            one_of_them = await send(f"{front.url}{prefix}/v1/models/{asked}", method="GET")
            assert (one_of_them.status, one_of_them.json()["id"]) == (200, named)
        missing = await send(f"{front.url}/v1/models/gpt-4o", method="GET")
        assert missing.status == 404


async def test_who_plays_a_candidate_and_asks_for_what_serves_is_answered_by_the_candidate() -> None:
    """A program has the name of its model written down. Users are answered by what serves, whatever is proposed."""
    async with EngineStub(models=("policy",)) as one, EngineStub(models=("next",)) as two, Front() as front:
        front.announce("policy", 3, one.url)
        front.do(front.store.commands.trainers.announce, Policy("next", 4, (two.url,), candidate_of="policy"))
        front.open("ep", model="next", eval=True)
        played = [("ep", name) for name in ("policy", "gpt-4o", "next")]
        for episode, asked in (*played, ("user", "policy"), ("user", "next")):
            await send(f"{front.url}/e/{episode}{CHAT}", body={**BODY, "model": asked})
        assert [(call.model, {version for version, _ in call.policy_versions}) for call in front.calls] == [
            *[("next", {4})] * 3, ("policy", {3}), ("next", {4}),
        ]  # fmt: skip
