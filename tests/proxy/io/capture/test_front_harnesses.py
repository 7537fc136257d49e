"""Coding agents as they are: what Codex, Claude Code and opencode send by themselves (recorded, shortened)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ajet_proxy.core.ledger.events import CallStarted, EpisodeOpened
from ajet_proxy.core.trajectory.timeline import merge
from ajet_sdk.routes import Abort
from tests.kit.engine_stub import EngineStub
from tests.kit.wire import Answer, send
from tests.proxy.io.capture.test_continuity import said as kept
from tests.proxy.io.front import CHAT, Front, until

pytestmark = pytest.mark.usefixtures("flying")

SESSION = "0199a213-81c0-7800-8aa1-bbab2a035a53"
CODEX = {
    "user-agent": "codex_exec/0.169.0 (Ubuntu 24.4.0; x86_64) unknown", "originator": "codex_exec",
    "session-id": SESSION, "thread-id": SESSION, "x-client-request-id": "another-one-each-time",
    "x-codex-turn-metadata": json.dumps({"turn_id": "1", "sandbox": "none"}), "accept": "text/event-stream",
}  # fmt: skip
CLAUDE_CODE = {
    "user-agent": "claude-cli/2.1.37 (external, sdk-cli)", "x-app": "cli", "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-stainless-retry-count": "0",
    "X-Claude-Code-Session-Id": SESSION, "x-stainless-lang": "js", "authorization": "Bearer sk-ant-none",
}  # fmt: skip
OPENCODE = {
    "user-agent": "opencode/1.18.0 ai-sdk/openai-compatible/1.0.1", "x-session-id": f"ses_{SESSION}",
    "authorization": "Bearer none",
}  # fmt: skip
USER_ID = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": SESSION})


def claude_code(turn: int, *messages: Any) -> dict[str, Any]:
    """A request of Claude Code. The billing line is another one each time."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.37.{turn}ab; cc_entrypoint=sdk-cli; cch={turn:05x};"
    system = [
        {"type": "text", "text": billing},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ]
    tool = {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object", "properties": {}}}
    return {
        "model": "stub", "messages": list(messages), "system": system, "tools": [tool], "max_tokens": 64,
        "metadata": {"user_id": USER_ID}, "stream": True,
    }  # fmt: skip


def turns_of(answer: Answer) -> list[dict[str, Any]]:
    """The content blocks of a streamed answer of the Messages API, as a client keeps them."""
    assert answer.status == 200
    blocks: list[dict[str, Any]] = []
    for event in answer.events():
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"], written=""))
        elif event["type"] == "content_block_delta":
            blocks[-1]["written"] += event["delta"].get("text", event["delta"].get("partial_json", ""))
    for block in blocks:
        written = block.pop("written")
        if block["type"] == "text":
            block["text"] += written
        else:
            block["input"] = json.loads(written or "{}")
    return blocks


async def claude_turns(front: Front, headers: dict[str, str]) -> None:
    """A task of three turns: a tool is called, answered, and something is asked once more."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "list the files"}]}]
    for turn in range(3):
        url = f"{front.url}/v1/messages?beta=true"
        blocks = turns_of(await send(url, body=claude_code(turn, *messages), headers=headers))
        used = [block["id"] for block in blocks if block["type"] == "tool_use"]
        content: list[Any] = [{"type": "tool_result", "tool_use_id": one, "content": "a b"} for one in used]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": content or "and now?"}]


async def test_claude_code_is_one_episode_and_one_timeline_whatever_its_billing_line(
    stub: EngineStub, front: Front
) -> None:
    await claude_turns(front, CLAUDE_CODE)
    assert all("billing" not in json.dumps(request.body) for request in stub.llm_requests())
    assert [(event.episode, event.identified_by) for event in front.of(EpisodeOpened)] == [(SESSION, "harness")]
    assert len(front.calls) == 3 and len(merge(front.calls)) == 1


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-ant-none"}])
async def test_claude_code_behind_something_that_drops_its_headers_is_known_by_its_body(
    front: Front, headers: dict[str, str]
) -> None:
    await claude_turns(front, headers)
    assert [(event.episode, event.identified_by) for event in front.of(EpisodeOpened)] == [(SESSION, "body")]
    assert len(merge(front.calls)) == 1


async def test_side_calls_of_one_session_are_timelines_of_their_own() -> None:
    """opencode asks for a title and for the real thing at once, under one id; and later for a summary."""
    title = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
    real = {"role": "system", "content": "You are opencode, an interactive CLI agent."}
    asked = {"role": "user", "content": "list the files"}
    usage = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64, "model": "stub"}
    async with EngineStub(delay_s=0.005) as stub, Front(stub.url) as front:
        url = front.url + CHAT
        answers = await asyncio.gather(*(
            send(url, body=usage | {"messages": [system, asked]}, headers=OPENCODE) for system in (title, real)
        ))
        history = [real, asked, *kept(answers[1])]
        more = [*history, {"role": "user", "content": "and now?"}]
        summary = [title, *history[1:], {"role": "user", "content": "Summarize what we did."}]
        for messages in (more, summary):
            assert (await send(url, body=usage | {"messages": messages}, headers=OPENCODE)).status == 200
    (opened,) = front.of(EpisodeOpened)
    assert (opened.episode, opened.identified_by) == (f"ses_{SESSION}", "harness")
    timelines = merge(front.calls)
    assert sorted(len(timeline.turns) for timeline in timelines) == [1, 1, 2]
    assert [front.calls[-1].call] in [[turn.call for turn in timeline.turns] for timeline in timelines]
    assert {event.identified_by for event in front.of(CallStarted)} == {"harness"}


async def test_an_agent_that_sends_nothing_is_known_by_its_history(front: Front) -> None:
    """qwen-code: neither a header nor a field; its side calls are episodes of their own."""
    headers = {"user-agent": "QwenCode/0.15.0 (linux; x64)", "authorization": "Bearer none"}
    system, asked = {"role": "system", "content": "You are Qwen Code."}, {"role": "user", "content": "list the files"}
    messages: list[Any] = [system, asked]
    for _ in range(3):
        request = {"model": "stub", "messages": messages, "max_tokens": 64}
        answer = await send(front.url + CHAT, body=request, headers=headers)
        messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    side = [{"role": "system", "content": "Who should speak next?"}, *messages[1:]]
    await send(front.url + CHAT, body={"model": "stub", "messages": side, "max_tokens": 64}, headers=headers)
    main, other = front.of(EpisodeOpened)
    assert main.identified_by == other.identified_by == "lineage"
    assert [call.episode for call in front.calls] == [main.episode] * 3 + [other.episode]
    assert len(merge(front.calls[:3])) == 1


HELLO = {"model": "stub", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(("headers", "body"), [(CODEX, {}), ({}, {"user": SESSION})], ids=["harness", "body"])
async def test_a_session_outlives_its_episode(front: Front, headers: dict[str, str], body: dict[str, Any]) -> None:
    opened = []
    for _ in range(3):
        for said in ("one", "another"):
            asked = {"messages": [{"role": "user", "content": said}]}
            answer = await send(front.url + CHAT, body=HELLO | asked | body, headers=headers)
            assert answer.status == 200
            opened.append(answer.headers["x-ajet-episode"])
        front.do(front.store.commands.abort, opened[-1], Abort())
    assert opened == [SESSION] * 2 + [f"{SESSION}.2"] * 2 + [f"{SESSION}.3"] * 2
    assert not front.lost


async def test_a_session_whose_episode_ends_while_a_request_waits_goes_on_in_the_next(front: Front) -> None:
    assert (await send(front.url + CHAT, body=HELLO, headers=CODEX)).status == 200
    front.close_gate()
    waiting = asyncio.create_task(send(front.url + CHAT, body=HELLO, headers=CODEX))
    await until(lambda: front.gate.waiting == 1)
    front.do(front.store.commands.abort, SESSION, Abort())
    front.open_gate(1)
    assert (await waiting).headers["x-ajet-episode"] == f"{SESSION}.2"


async def test_a_sessions_reward_is_its_latest_episodes_and_seals_it(front: Front) -> None:
    for number, episode in enumerate((SESSION, f"{SESSION}.2")):
        assert (await send(front.url + CHAT, body=HELLO, headers=CODEX)).headers["x-ajet-episode"] == episode
        rewarded = CODEX | {"x-ajet-reward": str(number), "x-ajet-final": "1"}
        assert (await send(front.url + "/v1/models", method="GET", headers=rewarded)).status == 200
        assert front.store.state.episodes[episode].reward() == number
        assert front.store.state.episodes[episode].state != "open"
    late = await send(front.url + "/v1/models", method="GET", headers=CODEX | {"x-ajet-reward": "9"})
    assert late.status == 200
    assert [one.reward() for one in front.store.state.episodes.values()] == [0, 10], "one that is late opens none"
