"""Scoring over HTTP: asked as the agent asked, and never an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from ajet_proxy.core.trajectory.call import Captured, Lost, Unscored
from ajet_proxy.io.engines import rescoring as module
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Upstream
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.engine_tokens import logprob_of

CHOICE = Unscored(0, "stub", (1, 2, 3), (7, 8, 9), "stop")
DEAD = "http://127.0.0.1:9"


async def scored(
    url: str, *, model: str = "stub", salt: Any = None, read_timeout: float = 0.5
) -> tuple[Captured | Lost, Metrics]:
    metrics = Metrics()
    engines = Engines({"": (url,)}, lambda _: (), dict)
    upstream = Upstream(engines, clock=Clock(), metrics=metrics, connect_timeout=5.0, read_timeout=read_timeout)
    headers = CIMultiDict({"Content-Type": "application/json", "X-Site": "north"})
    request = EngineRequest("POST", "/v1/responses?x=1", headers, b"{}", model, "ep-1")
    async with upstream.connected():
        return await module.score(CHOICE, upstream, request, salt, metrics), metrics


async def test_the_engine_that_sampled_is_asked_with_the_exact_ids() -> None:
    async with EngineStub() as stub:
        outcome, metrics = await scored(stub.url, salt="s")
    (asked,) = stub.requests
    assert (asked.path, asked.headers["x-site"]) == ("/v1/completions", "north")
    assert (asked.body["prompt"], asked.body["model"], asked.body["cache_salt"]) == ([1, 2, 3, 7, 8], "stub", "s")
    ids = (1, 2, 3, 7, 8, 9)
    expected = tuple(logprob_of(ids[:place], ids[place]) for place in (3, 4, 5))
    assert outcome == Captured(0, "stub", (1, 2, 3), (7, 8, 9), expected, "stop", scored=True)
    assert "ajet_scored_calls_total 1" in metrics.render()


async def test_a_request_that_named_no_model_is_scored_by_the_one_that_answered() -> None:
    async with EngineStub() as stub:
        outcome, _ = await scored(stub.url, model="")
    assert isinstance(outcome, Captured) and stub.requests[0].body["model"] == "stub"


@pytest.mark.parametrize("kind", ["status", "cut", "silent_close", "hang", "no_logprobs", "not_vllm"])
async def test_an_engine_that_does_not_score_costs_a_call_and_no_error(kind: str) -> None:
    async with EngineStub() as stub:
        stub.faults.append(Fault(kind, after=30))
        outcome, _ = await scored(stub.url)
    assert outcome == Lost(0, "not_scored")
    assert (await scored(DEAD))[0] == Lost(0, "not_scored")


async def test_an_engine_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.2)
    async with EngineStub() as stub:
        stub.faults.append(Fault("hang"))
        outcome, _ = await scored(stub.url, read_timeout=0)
    assert outcome == Lost(0, "not_scored")


async def test_why_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with EngineStub() as stub:
        stub.faults.append(Fault("status", status=400))
        await scored(stub.url)
        await scored(DEAD)
    assert json.dumps("the engine is unwell")[1:-1] in caplog.text
    assert "cannot be reached" in caplog.text
