"""Which model a call goes to: the one that its episode was opened with, or the one that was asked for."""

from __future__ import annotations

from tests.kit.engine_stub import EngineStub
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, Front

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
