"""Rewards that ride on requests as headers: recorded before the request, once, or the request stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import EpisodeOpened, EpisodeSealed, RewardGiven
from ajet_proxy.io.capture import front as http_front
from ajet_proxy.io.capture import pipeline
from tests.kit.engine_stub import EngineStub
from tests.kit.wire import send
from tests.proxy.io.front import BODY, CHAT, SECRET, Front, bearer, error, get, until

pytestmark = pytest.mark.usefixtures("flying")


async def test_a_reward_rides_on_any_request(front: Front) -> None:
    url = f"{front.url}/e/ep"
    call = (await send(url + CHAT, body=BODY)).headers["x-ajet-call"]
    headers = {"X-AJet-Reward": "0.25", "X-AJet-Reward-Call": call, "X-AJet-Agent": "a"}
    assert (await send(url + CHAT, body=BODY, headers=headers)).status == 200
    assert (await get(url + "/v1/models", **{"X-AJet-Reward": "1", "X-AJet-Final": "1"})).status == 200
    first, last = front.of(RewardGiven)
    assert (first.value, first.call, first.agent, first.final) == (0.25, call, None, False)
    assert (last.value, last.call, last.agent, last.final) == (1.0, None, None, True)
    order = [type(event).__name__ for event in front.store.durable]
    assert order.index("RewardGiven") < [i for i, name in enumerate(order) if name == "CallStarted"][1]
    assert len(front.of(EpisodeSealed)) == 1 and len(front.calls) == 2


@pytest.mark.parametrize("route", ["/v1/models", "/v1/embeddings"])
async def test_a_request_goes_on_once_its_reward_is_on_disk(stub: EngineStub, front: Front, route: str) -> None:
    await send(f"{front.url}/e/ep{CHAT}", body=BODY)
    known = len(stub.requests)
    front.store.slow.clear()
    headers = {"X-AJet-Reward": "1"}
    method = "GET" if route == "/v1/models" else "POST"
    asked = asyncio.ensure_future(send(f"{front.url}/e/ep{route}", method=method, body=BODY, headers=headers))
    await until(lambda: front.of(RewardGiven))
    await asyncio.sleep(0.1)
    assert not asked.done() and len(stub.requests) == known
    front.store.slow.set()
    assert (await asked).status in (200, 404)


@pytest.mark.parametrize("body", [b"{", {**BODY, "messages": [{"role": "user", "content": [{"type": "document"}]}]}])
@pytest.mark.parametrize("route", ["/v1/messages", CHAT])
async def test_a_reward_is_kept_whatever_comes_of_its_request(front: Front, route: str, body: Any) -> None:
    answer = await send(f"{front.url}/e/ep{route}", body=body, headers={"X-AJet-Reward": "1"})
    assert answer.status in (200, 400)
    assert [(event.episode, event.value) for event in front.of(RewardGiven)] == [("ep", 1.0)]


async def test_a_reward_is_kept_of_a_request_that_is_over_a_limit(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {"X-AJet-Reward": "1"}
    monkeypatch.setattr(http_front, "MAX_MESSAGES", 3)
    monkeypatch.setattr(pipeline, "MAX_CHOICES", 2)
    first = await send(front.url + CHAT, body=BODY)
    said = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
    later = {**BODY, "messages": [*BODY["messages"], said, *BODY["messages"]], "n": 3}
    for path, body, status in (
        ("/e/named", {**BODY, "messages": BODY["messages"] * 4}, 413), ("/e/named", {**BODY, "n": 3}, 400),
        ("/e/full", {**BODY, "metadata": {str(name): 0 for name in range(100)}}, 413), ("", later, 400),
    ):
        assert (await send(front.url + path + CHAT, body=body, headers=reward)).status == status
    unnamed = first.headers["x-ajet-episode"]
    assert [event.episode for event in front.of(RewardGiven)] == ["named", "named", "full", unnamed]


async def test_the_reward_of_a_call_under_a_sessions_name_is_that_of_the_calls_episode(front: Front) -> None:
    session = {"session-id": "s"}
    first = await send(front.url + CHAT, body=BODY, headers=session)
    await get(front.url + "/v1/models", **session, **{"X-AJet-Reward": "1", "X-AJet-Final": "1"})
    second = await send(front.url + CHAT, body=BODY, headers={**session, "X-AJet-Reward": "0.5"})
    assert (first.status, second.status) == (200, 200)
    names = [answer.headers["x-ajet-episode"] for answer in (first, second)]
    assert names == ["s", "s.2"]
    assert [(event.episode, event.value) for event in front.of(RewardGiven)] == [("s", 1.0), ("s.2", 0.5)]


async def test_a_name_in_the_body_says_whose_reward_it_is_on_any_route(front: Front) -> None:
    await send(front.url + CHAT, body={**BODY, "user": "bob"})
    body = {"model": "stub", "input": "hi", "user": "bob"}
    await send(front.url + "/v1/embeddings", body=body, headers={"X-AJet-Reward": "1"})
    lost = await send(front.url + "/v1/embeddings", body=b"no JSON", headers={"X-AJet-Reward": "1"})
    assert "names one" in error(lost, 400)["message"]
    assert [(event.episode, event.value) for event in front.of(RewardGiven)] == [("bob", 1.0)]


@pytest.mark.parametrize("first", [CHAT, "/v1/models"])
@pytest.mark.parametrize("name", ["path", "header", "harness"])
async def test_a_reward_opens_its_episode_on_a_call_and_on_a_request_that_makes_none(
    front: Front, name: str, first: str
) -> None:
    url = f"{front.url}/e/ep" if name == "path" else front.url
    headers = {"path": {}, "header": {"X-AJet-Episode": "ep"}, "harness": {"session-id": "ep"}}[name]
    for value, route in (("0.25", first), ("0.5", "/v1/models")):
        labels = {"X-AJet-Reward": value, "X-AJet-Task": "t", "X-AJet-Eval": "1"} | headers
        method = "POST" if route == CHAT else "GET"
        assert (await send(url + route, method=method, body=BODY, headers=labels)).status == 200
    await send(url + CHAT, body=BODY, headers=headers)
    (opened,) = front.of(EpisodeOpened)
    assert (opened.episode, opened.task, opened.eval, opened.identified_by) == ("ep", "t", True, name)
    assert [event.value for event in front.of(RewardGiven)] == [0.25, 0.5]
    assert len(front.calls) == (2 if first == CHAT else 1)


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
@pytest.mark.parametrize("value", ["nan", "inf", "good", ""])
async def test_an_unusable_reward_stops_the_request(stub: EngineStub, front: Front, path: str, value: str) -> None:
    front.open("ep")
    method = "POST" if path == CHAT else "GET"
    answer = await send(f"{front.url}/e/ep{path}", method=method, body=BODY, headers={"X-AJet-Reward": value})
    assert error(answer, 400)["param"] == "X-AJet-Reward"
    assert stub.requests == [] and front.of(RewardGiven) == []


async def test_a_reward_needs_its_episode() -> None:
    reward = {"X-AJet-Reward": "1"}
    async with EngineStub() as stub, Front(stub.url, admin_secret=SECRET) as front:
        front.open("ep", tenant="t1")
        other = bearer(front.keys.issue(Claims("agent", "t2")))
        admin = bearer(SECRET)
        assert error(await get(f"{front.url}/v1/models", **reward, **admin), 400)["param"] == "X-AJet-Reward"
        assert error(await send(front.url + CHAT, body=BODY, headers=reward | admin), 400)
        gone = bearer(front.keys.issue(Claims("agent", "t1", "gone")))
        assert error(await get(f"{front.url}/v1/models", **reward, **gone), 404)
        for sent in (reward, {}):
            assert error(await get(f"{front.url}/e/ep/v1/models", **sent, **other), 403)
            assert error(await get(f"{front.url}/tokenize", **sent, **other, **{"X-AJet-Episode": "ep"}), 403)
        assert error(await get(f"{front.url}/e/ep/v1/models", **reward, **admin, **{"X-AJet-Reward-Call": "no"}), 404)
        assert stub.requests == [] and front.of(RewardGiven) == []


async def test_a_reward_for_a_call_of_an_episode_that_nobody_knows_opens_none(front: Front) -> None:
    reward = {"X-AJet-Reward": "1", "X-AJet-Reward-Call": "call-1"}
    assert error(await get(f"{front.url}/e/new/v1/models", **reward), 404)["code"] == "unknown_call"
    assert front.of(EpisodeOpened) == []


async def test_a_final_reward_on_a_call_leaves_nothing_to_call(stub: EngineStub, front: Front) -> None:
    front.open("ep")
    headers = {"X-AJet-Reward": "1", "X-AJet-Final": "1"}
    assert error(await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=headers), 409)
    assert len(front.of(RewardGiven)) == 1 and len(front.of(EpisodeSealed)) == 1
    assert stub.requests == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
async def test_the_key_of_an_ended_episode_passes_nothing_on_but_what_rewards(
    stub: EngineStub, front: Front, path: str
) -> None:
    front.open("ep")
    key, gone, team = (bearer(front.keys.issue(Claims("agent", "", name))) for name in ("ep", "gone", None))
    assert (await send(front.url + path, body=BODY, headers=key)).status == 200
    final = {"X-AJet-Reward": "1", "X-AJet-Final": "1"}
    assert (await send(front.url + path, body=BODY, headers=key | final)).status == 200
    told = error(await send(front.url + CHAT, body=BODY, headers=key), 409)
    assert error(await send(front.url + path, body=BODY, headers=key), 409) == told
    assert told["code"] == "episode_discarded"
    assert error(await send(front.url + path, body=BODY, headers=gone), 404)["param"] == "episode"
    assert (await send(front.url + path, body=BODY, headers=team)).status == 200
    assert (await get(f"{front.url}/v1/models", **key)).status == 200
    assert len(stub.requests) == 4


async def test_after_sealing_a_reward_corrects_on_any_request(front: Front) -> None:
    front.open("ep")
    key = bearer(front.keys.issue(Claims("agent", "", "ep")))
    assert (await send(front.url + CHAT, body=BODY, headers=key)).status == 200
    for value, method, path in (
        ("1", "GET", "/v1/models"), ("0.5", "POST", "/v1/embeddings"), ("0.25", "GET", "/v1/models"),
    ):
        reward = {"X-AJet-Reward": value, "X-AJet-Final": "1"}
        assert (await send(front.url + path, method=method, body=BODY, headers=key | reward)).status == 200
    assert views.record(front.store.state, "ep")["reward"] == 0.25


async def test_the_labels_of_a_request_that_only_rewards_are_its_episodes(front: Front) -> None:
    assert (await send(f"{front.url}/e/ep{CHAT}", body=BODY)).status == 200
    told = {"X-AJet-Reward": "1", "X-AJet-Final": "1", "X-AJet-Task": "told"}
    late = await get(f"{front.url}/e/ep/v1/models", **told | {"X-AJet-Eval": "1"})
    assert error(late, 409)["code"] == "no_evaluation" and front.of(RewardGiven) == []
    assert (await get(f"{front.url}/e/ep/v1/models", **told)).status == 200
    record = views.record(front.store.state, "ep")
    assert (record["state"], record["task"]) == ("ready", "told")
    assert (await get(f"{front.url}/e/ep/v1/models", **told | {"X-AJet-Task": "late"})).status == 200
    assert views.record(front.store.state, "ep")["task"] == "told"


async def test_whom_a_reward_names_is_not_the_agent_of_what_follows(front: Front) -> None:
    part = {"X-AJet-Reward": "0.5", "X-AJet-Agent": "critic", "X-AJet-Task": "t"}
    assert (await get(f"{front.url}/e/ep/v1/models", **part)).status == 200
    assert (await send(f"{front.url}/e/ep{CHAT}", body=BODY)).status == 200
    record = views.record(front.store.state, "ep")
    assert (record["task"], record["agent"], record["calls"][0]["agent"]) == ("t", None, "")
