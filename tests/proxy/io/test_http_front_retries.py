"""A request that is sent again: what rides on it counts once."""

from __future__ import annotations

from ajet_proxy.core.events import RewardGiven
from tests.kit.engine_stub import EngineStub
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, Front

BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}


async def test_a_retry_that_only_counts_itself_rewards_once() -> None:
    async with EngineStub() as stub, Front(stub.url) as front:
        url, models = f"{front.url}/e/ep{CHAT}", f"{front.url}/e/ep/v1/models"
        again = {"X-Stainless-Retry-Count": "1"}
        await send(url, body=BODY, headers={"X-AJet-Reward": "0.5"} | again)
        await send(url, body=BODY, headers={"X-AJet-Reward": "0.5"} | again | {"X-Stainless-Retry-Count": "2"})
        await send(url, body=BODY, headers={"X-AJet-Reward": "0.25"} | again)
        assert [event.value for event in front.of(RewardGiven)] == [0.5, 0.25]
        for _ in range(2):  # said twice, and not sent again: two rewards
            await send(models, method="GET", headers={"X-AJet-Reward": "0.1"})
        await send(models, method="GET", headers={"X-AJet-Reward": "0.1"} | again)
        assert [event.value for event in front.of(RewardGiven)] == [0.5, 0.25, 0.1, 0.1]


async def test_a_count_of_retries_may_be_anything() -> None:
    async with EngineStub() as stub, Front(stub.url) as front:
        for count in ("9" * 5000, "²", "-1", "no"):
            answer = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers={"X-Stainless-Retry-Count": count})
            assert answer.status == 200
    assert front.lost == [] and len(front.calls) == 4


async def test_a_request_that_is_sent_again_rewards_once() -> None:
    async with EngineStub() as stub, Front(stub.url) as front:
        for _ in range(2):
            headers = {"X-AJet-Reward": "0.5", "Idempotency-Key": "one"}
            await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=headers)
        assert len(front.of(RewardGiven)) == 1
