"""A call is found by the id of its answer, as its client saw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import retention
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Answer, Client, serving

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {},
    "completions": {"prompt": "hello", "messages": None},
    "responses": {"input": "hello", "max_output_tokens": 4, "messages": None, "max_tokens": None},
    "messages": {},
}
SECRET = "a secret of the operator"


def seen(answer: Answer) -> str:
    """The id in an answer, wherever its dialect has it."""
    assert answer.status == 200, answer.body
    first = answer.json
    if first is None:
        lines = (line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: {"))
        first = json.loads(next(lines))
    return str((first.get("message") or first.get("response") or first)["id"])


async def ask(client: Client, route: str = "chat/completions", *, episode: str = "", **more: Any) -> Answer:
    """A call that names no episode, unless one is given."""
    headers = {name: more.pop(name) for name in ("key", "X_AJet_Episode") if name in more}
    body = {name: value for name, value in (CHAT | BODIES[route] | more).items() if value is not None}
    return await client.ask("POST", f"/e/{episode}/v1/{route}" if episode else f"/v1/{route}", body, **headers)


async def reward(client: Client, response: str, path: str = "/rewards", **more: Any) -> Answer:
    key = {"key": more.pop("key")} if "key" in more else {}
    return await client.control("POST", path, {"value": 0.5, "response": response} | more, **key)


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_reward_names_a_call_by_its_answer_in_every_dialect_also_after_a_restart(
    tmp_path: Path, workers: int
) -> None:
    given: dict[str, tuple[str, str]] = {}
    async with EngineStub() as stub:
        async with serving(tmp_path, upstream=(stub.url,), workers=workers) as client:
            for route in BODIES:
                for stream in (False, True):
                    answer = await ask(client, route, episode=f"e-{len(given)}", stream=stream)
                    given[seen(answer)] = answer.headers["X-AJet-Episode"], answer.headers["X-AJet-Call"]
            assert len(given) == 2 * len(BODIES)
        async with serving(tmp_path, upstream=(stub.url,), workers=workers) as client:
            for response, (episode, call) in given.items():
                answer = await reward(client, response)
                assert (answer.status, answer.json["episode"], answer.json["state"]) == (200, episode, "ready")
                told = await client.record(episode)
                assert [(one["response"], one["call"]) for one in told["calls"]] == [(response, call)]
                assert [(one["call"], one["value"]) for one in told["rewards"]] == [(call, 0.5)]


async def test_an_answer_that_nobody_knows_is_named_and_one_of_another_episode_is_not_found_in_this_one(
    client: Client
) -> None:
    mine, other = [seen(await ask(client, episode=name)) for name in ("mine", "other")]
    unknown = await reward(client, "chatcmpl-nobody")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "unknown_response")
    assert "chatcmpl-nobody" in unknown.json["error"]["message"]
    assert (await reward(client, other, "/episodes/mine/rewards")).json["error"]["code"] == "unknown_response"
    assert (await reward(client, mine, "/episodes/mine/rewards")).json["state"] == "ready"
    nothing = await client.control("POST", "/rewards", {"value": 1.0})
    assert (nothing.status, nothing.json["error"]["param"]) == (400, "response")
    assert (await client.record("other"))["state"] == "open"


async def test_of_several_choices_one_is_named(client: Client) -> None:
    answer = await ask(client, episode="e", n=2)
    several = await reward(client, seen(answer))
    assert (several.status, several.json["error"]["code"]) == (409, "several_calls")
    first, second = answer.headers["X-AJet-Call"].split(",")
    assert first in several.json["error"]["message"] or second in several.json["error"]["message"]
    assert (await reward(client, seen(answer), call=second.strip())).json["state"] == "ready"


async def test_an_answer_is_found_within_the_borders_of_its_tenant(tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), admin_secret=SECRET) as client:
        ours, theirs = (client.key(Claims("agent", tenant)) for tenant in ("ours", "theirs"))
        response = seen(await ask(client, key=ours))
        another = seen(await ask(client, key=ours, messages=[{"role": "user", "content": "another"}]))
        opened = (await client.control("POST", "/episodes", {}, key=ours)).json
        assert (await reward(client, response, key=theirs)).json["error"]["code"] == "unknown_response"
        assert (await reward(client, response, key=opened["api_key"])).json["error"]["code"] == "unknown_response"
        assert (await reward(client, response, key=ours)).status == 200
        assert (await reward(client, another, key=SECRET)).status == 200


async def test_the_answers_of_an_episode_are_forgotten_with_it(tmp_path: Path) -> None:
    with mock.patch.object(retention, "KEPT_EPISODES", 1):
        async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
            responses = []
            for name in ("old", "new"):
                responses.append(seen(await ask(client, episode=name)))
                await client.control("POST", f"/episodes/{name}/abort", {})
            await client.until(lambda status: status["archived"])
            assert (await reward(client, responses[0])).json["error"]["code"] == "unknown_response"
            gone = await reward(client, responses[0], "/episodes/old/rewards")
            assert gone.json["error"]["code"] == "episode_discarded"
            assert (await client.record("old"))["calls"][0]["response"] == responses[0]
            assert list(client.store.state.episodes.by_response) == [responses[1]]


async def test_an_engine_s_word_that_can_be_no_name_is_none(client: Client) -> None:
    with mock.patch("ajet_proxy.core.protocol.exchange.MAX_ID", 3):
        await ask(client, episode="e")
    (call,) = (await client.record("e"))["calls"]
    assert call["complete"] and "response" not in call
