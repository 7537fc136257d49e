"""Which model a call goes to: the one that its episode was opened with, or the one that was asked for."""

from __future__ import annotations

import asyncio

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
        since = front.store.state.gates["planner"].since
        front.open_gate(2, "planner")
        assert (await held).status == 200
        versions = [(call.model, [version for version, _ in call.policy_versions]) for call in front.calls]
        assert versions == [("coder", [1]), ("planner", [2])]
        assert front.store.state.gates["planner"].since >= since
