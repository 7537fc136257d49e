"""Agents that name nothing: their calls find their episodes by what was said before."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import CallStarted, EpisodeOpened, RewardGiven
from ajet_proxy.core.trajectory.timeline import merge
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import Answer, send
from tests.proxy.io.capture.test_continuity import said
from tests.proxy.io.front import CHAT, COMPLETIONS, Front, until

pytestmark = pytest.mark.usefixtures("flying")


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    """`messages` take turns: the user's as text, the assistant's as they were given."""
    turns = [{"role": "user", "content": item} if isinstance(item, str) else item for item in messages]
    return {"model": "stub", "messages": turns, "max_tokens": 64, "seed": 1} | more


def told(answer: Answer) -> dict[str, Any]:
    """The assistant's message in `answer`, as an agent keeps it."""
    return said(answer)[0]


def episode_of(answer: Answer) -> str:
    return answer.headers["x-ajet-episode"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_is_one_episode_and_one_timeline(stream: bool) -> None:
    async with EngineStub(split_seed=3) as stub, Front(stub.url) as front:
        messages: list[Any] = ["hi"]
        answers = []
        for turn in range(4):
            answers.append(await send(front.url + CHAT, body=body(*messages, stream=stream)))
            messages += [told(answers[-1]), f"turn {turn}"]
        assert len({episode_of(answer) for answer in answers}) == 1
    assert len(front.calls) == 4 and len(merge(front.calls)) == 1
    assert {event.identified_by for event in front.of(EpisodeOpened) + front.of(CallStarted)} == {"lineage"}
    page = front.metrics.render()
    assert 'ajet_lineage_total{found="new"} 1' in page and 'ajet_lineage_total{found="continued"} 3' in page


async def test_equal_prompts_at_once_are_episodes_of_their_own() -> None:
    async with EngineStub(delay_s=0.01) as stub, Front(stub.url) as front:
        answers = await asyncio.gather(*(send(front.url + CHAT, body=body("hi", seed=n)) for n in range(8)))
        assert len({episode_of(answer) for answer in answers}) == 8
        for answer in answers:
            again = await send(front.url + CHAT, body=body("hi", told(answer), "more"))
            assert episode_of(again) == episode_of(answer)
    assert len({event.opening.task for event in front.store.state.episodes.values()}) == 1  # they are one group


async def test_twins_that_were_told_the_same_are_never_mixed(front: Front) -> None:
    twins = [await send(front.url + CHAT, body=body("say: five")) for _ in range(2)]
    third = await send(front.url + CHAT, body=body("say: five", told(twins[0]), "more"))
    assert len({episode_of(answer) for answer in (*twins, third)}) == 3
    noted = views.record(front.store.state, episode_of(third), tokens=False)["metadata"]
    assert set(noted["may_continue"]) == {episode_of(answer) for answer in twins}
    assert 'ajet_lineage_total{found="ambiguous"} 1' in front.metrics.render()


async def test_each_client_has_its_own_histories(front: Front) -> None:
    mine, theirs = {"authorization": "Bearer sk-mine"}, {"x-api-key": "sk-theirs"}
    first = await send(front.url + CHAT, body=body("hi"), headers=mine)
    later = body("hi", told(first), "more")
    assert episode_of(await send(front.url + CHAT, body=later, headers=theirs)) != episode_of(first)
    assert episode_of(await send(front.url + CHAT, body=later)) != episode_of(first)
    assert episode_of(await send(front.url + CHAT, body=later, headers=mine)) == episode_of(first)


async def test_a_nameless_call_may_continue_a_named_episode(front: Front) -> None:
    first = await send(f"{front.url}/e/ep{CHAT}", body=body("hi"))
    assert episode_of(await send(front.url + CHAT, body=body("hi", told(first), "more"))) == "ep"
    assert [event.identified_by for event in front.of(CallStarted)] == ["path", "lineage"]


async def test_every_choice_can_be_gone_on_from(front: Front) -> None:
    first = await send(front.url + CHAT, body=body("hi", n=3))
    for choice in first.json()["choices"]:
        again = await send(front.url + CHAT, body=body("hi", choice["message"], "more"))
        assert episode_of(again) == episode_of(first)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_text_or_its_ids_go_on_too(front: Front, as_ids: bool) -> None:
    request = {"model": "stub", "prompt": "Once", "max_tokens": 8, "seed": 1, "return_token_ids": True}
    first = await send(front.url + COMPLETIONS, body=request)
    (choice,) = first.json()["choices"]
    on: Any = "Once" + choice["text"] + " upon"
    if as_ids:
        on = [*choice["prompt_token_ids"], *choice["token_ids"], 32]
    again = await send(front.url + COMPLETIONS, body=request | {"prompt": on})
    assert episode_of(again) == episode_of(first)
    assert episode_of(await send(front.url + COMPLETIONS, body=request)) != episode_of(first)
    other = request | {"prompt": on[1:]}
    assert episode_of(await send(front.url + COMPLETIONS, body=other)) != episode_of(first)


async def test_an_answer_that_could_not_be_captured_can_be_gone_on_from() -> None:
    async with EngineStub(faults=[Fault("no_token_ids")]) as stub, Front(stub.url) as front:
        first = await send(front.url + CHAT, body=body("hi"))
        assert front.lost == ["no_token_ids"]
        assert episode_of(await send(front.url + CHAT, body=body("hi", told(first), "more"))) == episode_of(first)


async def test_a_reward_rides_to_the_episode_that_is_continued(stub: EngineStub, front: Front) -> None:
    reward = {"X-AJet-Reward": "0.5"}
    refused = await send(front.url + CHAT, body=body("hi"), headers=reward)
    assert refused.status == 400 and "continues" in refused.json()["error"]["message"]
    assert front.of(EpisodeOpened) == [] and stub.requests == []
    first = await send(front.url + CHAT, body=body("hi"))
    assert (await send(front.url + CHAT, body=body("hi", told(first), "more"), headers=reward)).status == 200
    ended = await send(
        front.url + CHAT, body=body("hi", told(first), "bye"), headers=reward | {"X-AJet-Final": "1"}
    )
    assert ended.status == 409
    assert [(event.episode, event.value) for event in front.of(RewardGiven)] == [(episode_of(first), 0.5)] * 2


async def test_an_episode_that_ends_while_its_call_is_held_leaves_the_call_to_a_new_one(front: Front) -> None:
    first = await send(front.url + CHAT, body=body("hi"))
    front.close_gate()
    asking = asyncio.create_task(send(front.url + CHAT, body=body("hi", told(first), "more")))
    await until(lambda: front.gate.waiting == 1)
    front.do(front.store.commands.seal, episode_of(first))
    front.open_gate(1)
    again = await asking
    assert again.status == 200 and episode_of(again) != episode_of(first)


async def test_retries_of_a_nameless_first_prompt_make_one_call() -> None:
    again = {"X-Stainless-Retry-Count": "1"}
    async with EngineStub(faults=[Fault("status")]) as stub, Front(stub.url) as front:
        assert (await send(front.url + CHAT, body=body("hi"))).status == 500
        await send(front.url + CHAT, body=body("hi"), headers=again)
        assert len(front.store.state.episodes) == 1 and len(front.calls) == 1
        for _ in range(2):
            await send(front.url + CHAT, body=body("other"), headers={"Idempotency-Key": "one"})
        assert len(front.store.state.episodes) == 2 and front.lost == ["refused", "retried", "retried"]
        answer = await send(front.url + CHAT, body=body("other"), headers={"Idempotency-Key": "one", "x-api-key": "x"})
        assert len(front.store.state.episodes) == 3 and answer.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_go_on_by_their_items_or_by_name(front: Front, stream: bool) -> None:
    url, common = f"{front.url}/v1/responses", {"model": "stub", "max_output_tokens": 64, "stream": stream}
    items: list[Any] = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        answer = await send(url, body=common | {"input": items})
        last = json.loads(answer.body.rpartition(b"data: ")[2])
        response = last["response"] if stream else last
        items = [*items, *response["output"], {"role": "user", "content": f"turn {turn}"}]
    await send(url, body=common | {"previous_response_id": response["id"], "input": "and now?"})
    await send(url, body=common | {"input": "hi"})
    episodes = [event.episode for event in front.of(CallStarted)]
    assert len(set(episodes[:4])) == 1 and episodes[4] != episodes[0]
