"""`repair` at the front: the engine is asked for text where a prompt goes on from no call, and only there."""

from __future__ import annotations

import pytest

from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_proxy.io.engines import same_text
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.capture.test_continuity import talk
from tests.proxy.io.front import Front

TURNS = 5


def asked(stub: EngineStub) -> int:
    return sum(request.path == "/detokenize" for request in stub.requests)


async def test_an_engine_that_drifts_gives_one_sample_all_the_same() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url, continuity=False) as front:
        front.store.state.merge_policy = "repair"
        await talk(front, TURNS)
        assert len(merge_calls(front.calls, "strict")) == TURNS
        (sample,) = merge_calls(front.calls, "repair")
        assert sample.repaired_tokens > 0
        assert [call.same_text and call.same_text[0] for call in front.calls] == [
            None, *(call.call for call in front.calls[:-1])
        ]  # fmt: skip


@pytest.mark.parametrize(("policy", "drift"), [("strict", True), ("repair", False)])
async def test_nothing_is_asked_where_it_would_change_nothing(policy: str, drift: bool) -> None:
    async with EngineStub(drift=drift) as stub, Front(stub.url, continuity=False) as front:
        front.store.state.merge_policy = policy  # type: ignore[assignment]
        await talk(front, TURNS)
        assert asked(stub) == 0
        assert {call.same_text for call in front.calls} == {None}


@pytest.mark.parametrize("limit", [10.0, 0.0])
async def test_an_engine_that_gives_no_text_costs_nothing_but_the_joint(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_text, "LIMIT_S", limit)
    async with EngineStub(drift=True, tokenizes=not limit) as stub, Front(stub.url, continuity=False) as front:
        front.store.state.merge_policy = "repair"
        await talk(front, 2)
        assert len(front.calls) == 2 and not front.lost
        assert {call.same_text for call in front.calls} == {None}
