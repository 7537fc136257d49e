"""One name for several runs, or for one: who shares an episode, and who is told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.ledger.events import NameShared
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, Front, later
from tests.proxy.serving import Client, eventually, serving

NAMES: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
    ({}, {"user": "me"}), ({}, {"prompt_cache_key": "me"}), ({}, {"metadata": {"user_id": "me"}}),
    ({"x-session-id": "me"}, {}), ({"X-Session-Affinity": "me"}, {}), ({"x-opencode-session": "me"}, {}),
)  # fmt: skip


def says(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Run:
    """A conversation under a name."""

    def __init__(self, front: Front, name: tuple[Mapping[str, str], Mapping[str, Any]], first: str) -> None:
        self.front, (self.headers, self.body), self.messages = front, name, [says(first)]
        self.episodes: list[str] = []

    async def turn(self, **more: Any) -> Answer:
        body = {"model": "stub", "messages": self.messages, **self.body, **more}
        answer = await send(self.front.url + CHAT, body=body, headers=dict(self.headers))
        if answer.status == 200:
            self.episodes.append(answer.headers["x-ajet-episode"])
            self.messages += [answer.json()["choices"][0]["message"], says("go on")]
        return answer


@pytest.mark.parametrize("name", NAMES)
async def test_runs_that_begin_alike_under_one_name_have_an_episode_each(front: Front, name: Any) -> None:
    """They have it one after another and at a time, and nobody's reward is another's."""
    runs = [Run(front, name, "the same task") for _ in range(4)]
    for number, run in enumerate(runs):
        await run.turn(seed=number)
    for number, run in enumerate(runs):
        await run.turn(seed=number)
    assert [len(set(run.episodes)) for run in runs] == [1] * 4
    assert len({run.episodes[0] for run in runs}) == 4
    assert len(front.of(NameShared)) == 1
    other = Run(front, name, "another task")
    await other.turn()
    assert other.episodes[0].startswith("ep-")
    assert "was the name of several runs" in "".join(front.store.state.alerts().values())


async def test_rollouts_that_are_named_by_their_example_have_an_episode_each(front: Front) -> None:
    """As ``vf-eval`` sends them: three of example 0 at a time, then one after another, some rewarded meanwhile."""
    async def rollout(first: str, seed: int, number: str = "0") -> Run:
        run = Run(front, ({"X-Session-ID": number, "x-stainless-retry-count": "0"}, {}), first)
        await run.turn(seed=seed)
        await run.turn(seed=seed)
        return run

    runs = list(await asyncio.gather(*(rollout("example 0", seed) for seed in range(3)), rollout("example 1", 3, "1")))
    front.reward(runs[0].episodes[0])
    for seed in range(4, 7):
        runs.append(await rollout("example 0", seed))
        front.reward(runs[-1].episodes[0])
    assert [len(set(run.episodes)) for run in runs] == [1] * 7
    assert len({run.episodes[0] for run in runs}) == 7
    assert "was the name of several runs" in "".join(front.store.state.alerts().values())


@pytest.mark.parametrize("name", NAMES)
async def test_a_run_that_begins_like_one_in_an_episode_of_that_id_has_an_episode_of_its_own(
    front: Front, name: Any
) -> None:
    """The episode was opened on purpose, and its program names it by its path or a header."""
    opened = Run(front, ({"X-AJet-Episode": "me"}, {}), "the same task")
    await opened.turn()
    other = Run(front, name, "the same task")
    for run in (other, other, opened):
        await run.turn(seed=1)
    assert set(opened.episodes) == {"me"}
    assert len(set(other.episodes)) == 1 and other.episodes[0].startswith("ep-")


@pytest.mark.parametrize("name", NAMES)
async def test_one_run_of_several_conversations_stays_one_episode(front: Front, name: Any) -> None:
    """One after another, and nested: a planner, an executor, a compaction."""
    planner, executor, compacted = (Run(front, name, text) for text in ("plan", "execute", "go on from: …"))
    for run in (planner, executor, executor, planner, planner, compacted, executor, compacted):
        await run.turn()
    assert {*planner.episodes, *executor.episodes, *compacted.episodes} == {"me"}
    assert not front.of(NameShared)
    assert ("several conversations" in str(front.store.trouble)) == (not name[0])
    front.reward("me")
    assert "several conversations" not in str(front.store.trouble)


async def test_a_request_that_is_sent_again_is_no_second_run(stub: EngineStub, front: Front) -> None:
    first = Run(front, ({}, {"user": "me"}), "hello")
    stub.faults = [Fault("status"), Fault("cut", after=50)]
    for _ in range(2):
        assert (await first.turn()).status >= 500
    assert (await first.turn()).status == 200
    again = Run(front, ({"X-Stainless-Retry-Count": "1"}, {"user": "me"}), "hello")
    keyed = [Run(front, ({"Idempotency-Key": "k"}, {"user": "me"}), "with a key") for _ in range(2)]
    for run in (again, *keyed):
        await run.turn()
    assert {*first.episodes, *again.episodes, *keyed[0].episodes, *keyed[1].episodes} == {"me"}
    assert not front.of(NameShared)


async def test_a_request_whose_client_has_just_gone_away_is_sent_again(
    stub: EngineStub, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second may be there before anybody knows that the first is lost, as over two workers."""
    monkeypatch.setattr("ajet_proxy.io.ledger_port.naming.SOON_S", 60.0)
    stub.faults = [Fault("hang")]
    first, again = (Run(front, ({}, {"user": "me"}), "hello") for _ in range(2))
    lost = asyncio.ensure_future(first.turn())
    await eventually(lambda: stub.requests)
    sent = asyncio.ensure_future(again.turn())
    await asyncio.sleep(0.1)
    lost.cancel()
    await eventually(lambda: front.lost)
    await later(monkeypatch, 60.0)
    await sent
    assert again.episodes == ["me"] and not front.of(NameShared)


async def test_a_restart_forgets_no_episode_that_a_call_may_go_on_from(tmp_path: Path) -> None:
    said: list[Any] = [says("task a")]

    async def turn(client: Client) -> str:
        answer = await client.ask("POST", CHAT, {"model": "stub", "messages": said, "user": "me"})
        said.extend([answer.json["choices"][0]["message"], says("go on")])
        return str(answer.headers["x-ajet-episode"])

    async with EngineStub() as stub:
        async with serving(tmp_path, upstream=(stub.url,)) as client:
            assert await turn(client) == "me"
        async with serving(tmp_path, upstream=(stub.url,)) as client:
            assert await turn(client) == "me"
            await client.control("POST", "/episodes/me/rewards", {"value": 1.0})
        async with serving(tmp_path, upstream=(stub.url,)) as client:
            assert (await turn(client)).startswith("ep-")


async def test_names_in_bodies_may_be_left_out() -> None:
    async with EngineStub() as stub, Front(stub.url, body_names="off") as front:
        runs = [Run(front, ({}, {"user": "me"}), text) for text in ("a", "b")]
        for run in (*runs, *runs):
            await run.turn()
        assert all(run.episodes[0] == run.episodes[1] for run in runs)
        assert runs[0].episodes[0] != runs[1].episodes[0]
        assert {call.identified_by for call in front.calls} == {"lineage"}
        body = {"model": "stub", "input": "x", "user": "me"}
        refused = await send(front.url + "/v1/embeddings", body=body, headers={"X-AJet-Reward": "1"})
        assert refused.status == 400 and "me" not in front.store.state.episodes


async def test_child_sessions_are_agents_of_their_parents_episode(front: Front) -> None:
    """Whoever calls first, and a child's own child; also a request that does not name the parent again."""
    child = {"x-session-id": "child", "x-session-affinity": "child", "x-parent-session-id": "top"}
    grandchild = {"x-session-id": "grandchild", "x-parent-session-id": "child"}
    title, top = {"x-session-id": "child"}, {"x-session-id": "top"}
    for number, headers in enumerate((child, grandchild, title, top, grandchild)):
        await Run(front, (headers, {}), f"conversation {number}").turn()
    assert {call.episode for call in front.calls} == {"top"}
    assert [call.agent for call in front.calls] == ["child", "grandchild", "child", "", "grandchild"]


async def test_a_child_session_of_any_name_is_an_agent_that_can_be_told(front: Front) -> None:
    child = {"x-session-id": b"caf\xe9".decode("utf-8", "surrogateescape"), "x-parent-session-id": "top"}
    await Run(front, (child, {}), "conversation").turn()
    (call,) = front.calls
    assert call.episode == "top" and call.agent.startswith("name-")


async def test_sub_agents_of_claude_code_are_agents_of_their_episode(front: Front) -> None:
    session = {"x-claude-code-session-id": "s"}
    sub = {**session, "x-claude-code-agent-id": "sub", "x-claude-code-parent-agent-id": "main"}
    named = {**sub, "X-AJet-Agent": "searcher"}
    for number, headers in enumerate((session, sub, named)):
        await Run(front, (headers, {}), f"conversation {number}").turn()
    assert [(call.episode, call.agent) for call in front.calls] == [("s", ""), ("s", "sub"), ("s", "searcher")]


async def test_a_probe_names_no_task_and_differing_episodes_of_one_derived_task_are_told(front: Front) -> None:
    async def play(episode: str, *said: tuple[str, int]) -> str | None:
        for text, most in said:
            body = {"model": "stub", "messages": [says(text)], "max_tokens": most}
            assert (await send(f"{front.url}/e/{episode}{CHAT}", body=body)).status == 200
        return front.store.state.episodes[episode].opening.task

    tasks = [await play(f"e{n}", ("quota", 1), (text, 50)) for n, text in enumerate("aab")]
    assert tasks[0] == tasks[1] != tasks[2] and all(task and len(task) == 31 for task in tasks)
    assert not front.store.trouble
    alike = [await play(f"f{n}", ("are you there?", 50), (text, 50)) for n, text in enumerate("ab")]
    assert alike[0] == alike[1]
    assert "differ: give each episode its task" in front.store.trouble["derived tasks"]


async def test_the_task_of_an_episode_is_known_before_its_first_answer() -> None:
    """So its place in a group is by opening, and callers with other keys have the same task."""
    async with EngineStub() as stub, Front(stub.url, admin_secret="a secret of the operator") as front:
        keys = [front.open(name) for name in ("one", "two")]
        stub.faults = [Fault("status"), Fault("status")]
        for key in keys:
            await send(front.url + CHAT, body={"model": "stub", "messages": [says("hello")]},
                       headers={"authorization": f"Bearer {key}"})  # fmt: skip
        one, two = (front.store.state.episodes[name].opening.task for name in ("one", "two"))
        assert one is not None and one == two
