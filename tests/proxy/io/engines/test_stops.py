"""Which tokens stop, by an engine's own word; the limit that cut an answer need not be known."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

from ajet_proxy.core.trajectory.call import Captured
from ajet_proxy.io.engines import stops as module
from ajet_proxy.io.engines.stops import Stops
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Upstream
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from tests.kit.engine_stub import EngineStub
from tests.kit.engine_tokens import IM_END

DEAD = "http://127.0.0.1:9"


async def cut(url: str, *last: int, asked: dict[str, Any] | None = None, model: str = "stub") -> list[bool]:
    """Whether answers that end with each of `last` were cut, asked one after the other."""
    engines = Engines({"": (url,)}, lambda _: (), dict)
    upstream = Upstream(engines, clock=Clock(), metrics=Metrics(), connect_timeout=5.0, read_timeout=0.0)
    request = EngineRequest("POST", "/v1/chat/completions?x=1", CIMultiDict({"X-Site": "north"}), b"{}", model, "ep-1")
    stops = Stops(upstream)
    async with upstream.connected():
        answers = [Captured(0, "stub", (1, 2), (5, token), (-0.5, -0.5), "tool_calls") for token in last]
        return [await stops.is_cut(answer, request, asked or {}) for answer in answers]


@pytest.mark.parametrize("model", ["stub", ""])
async def test_what_ends_with_no_stop_token_was_cut_by_whatever_limit(model: str) -> None:
    async with EngineStub() as stub:
        assert await cut(stub.url, 9, IM_END, 9, IM_END, model=model) == [True, False, True, False]
        assert [body["logit_bias"] for _, body in stub.sampling.asked] == [{"9": 100.0}, {str(IM_END): 100.0}]
        assert all(body["model"] == "stub" for _, body in stub.sampling.asked)


async def test_an_engine_that_says_nothing_leaves_it_to_the_limit_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    async with EngineStub() as stub:
        for status, delay_s in ((400, 0.0), (200, 60.0)):
            stub.sampling.status, stub.sampling.delay_s = status, delay_s
            assert await cut(stub.url, 9, asked={"max_tokens": 2}) == [True]
            assert await cut(stub.url, 9, asked={"max_tokens": 3}) == await cut(stub.url, 9) == [False]
    assert await cut(DEAD, 9, asked={"max_tokens": 2}) == [True]
