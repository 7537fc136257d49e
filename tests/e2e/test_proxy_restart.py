"""The proxy is killed at random instants while agents call and reward and a trainer leases and acknowledges.

Everybody notes what was acknowledged to them. In the end every acknowledged call and reward is there once, with the ids
that the agent saw; what was acknowledged as trained never comes back; nothing incomplete was ever delivered; the
ledger's identity held at every look; and a replay of the journal gives again, bit for bit, what was delivered.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.frame import decode_batch
from ajet_sdk.sample import Batch
from tests.kit import wire
from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import STATES

KILLS = 20
AGENTS = 5
GROUP = 2
MOST = 1000 // AGENTS  # episodes of one agent: as many as one listing shows
BROKEN = (OSError, EOFError, TimeoutError)  # what a caller gets when the proxy dies under it


@dataclass(slots=True)
class Notes:
    """What was acknowledged: by the agents' answers and by the trainer's."""

    calls: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    rewards: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    delivered: list[Batch] = field(default_factory=list)
    trained: dict[str, str] = field(default_factory=dict)
    looks: int = 0
    over: bool = False


class World:
    """The proxy's address, and what it takes to talk to something that dies all the time."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.dice = random.Random(seed)
        self.notes = Notes()

    async def control(self, path: str, body: Any = None, method: str = "POST") -> wire.Answer:
        """One try at a control route."""
        sent = {} if body is None and method == "POST" else body
        return await wire.send(f"{self.url}/ajet/v1{path}", method=method, body=sent, timeout=20)

    async def until_answered(self, ask: Callable[[], Awaitable[wire.Answer]]) -> wire.Answer:
        """The first answer that is not 5xx, however often the proxy dies meanwhile."""
        while True:
            try:
                answer = await ask()
                if answer.status < 500:
                    return answer
            except BROKEN:
                pass
            await asyncio.sleep(0.05)


async def agent(world: World, number: int) -> None:
    """Episodes one after another: two to four calls, some streamed, some retried after a broken one, then a reward."""
    dice = random.Random(number)
    count = 0
    while not world.notes.over and count < MOST:
        count += 1
        episode = f"a{number}-{count}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {count % 3}"}]
        for turn in range(dice.randint(2, 4)):
            answer = await call(world, episode, messages, stream=dice.random() < 0.5, retry=dice.random() < 0.5)
            messages.append({"role": "assistant", "content": answer or "(nothing)"})
            messages.append({"role": "user", "content": f"turn {turn}"})
        value, name = float(dice.randint(0, 9)), f"reward-of-{episode}"
        body = {"value": value, "id": name}
        given = await world.until_answered(lambda e=episode, b=body: world.control(f"/episodes/{e}/rewards", b))  # type: ignore[misc]
        assert given.status in (200, 201, 404), given.body
        if given.status != 404:  # an episode of which no call ever reached the proxy is unknown to it
            world.notes.rewards.setdefault(episode, []).append((name, value))


async def call(world: World, episode: str, messages: list[dict[str, Any]], *, stream: bool, retry: bool) -> str | None:
    """The text of the answer, or None when the proxy died over it and the agent did not try again."""
    url = f"{world.url}/e/{episode}/v1/chat/completions"
    body = {"model": "stub", "messages": list(messages), "return_token_ids": True, "stream": stream}
    for attempt in range(50 if retry else 1):
        headers = {"x-stainless-retry-count": str(attempt), "x-ajet-task": messages[0]["content"]}
        try:
            answer = await wire.send(url, body=body, headers=headers, timeout=20)
        except BROKEN:
            await asyncio.sleep(0.1)
            continue
        if answer.status != 200:
            await asyncio.sleep(0.1)
            continue
        text, ids = read(answer, stream=stream)
        world.notes.calls[answer.headers["x-ajet-call"]] = (episode, ids)
        return text
    return None


def read(answer: wire.Answer, *, stream: bool) -> tuple[str, list[int]]:
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], choice["token_ids"]
    events = answer.events()
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [token for choice in choices for token in choice.get("token_ids") or ()]


async def trainer(world: World) -> None:
    """Leases; then acknowledges, gives back, or forgets, as a trainer that itself is killed would."""
    version = 0
    while not world.notes.over:
        try:
            answer = await world.control("/batches/lease", {"group_size": GROUP, "wait_s": 0.2, "lease_s": 2.0})
        except BROKEN:
            await asyncio.sleep(0.1)
            continue
        if answer.status != 200:
            await asyncio.sleep(0.05)
            continue
        batch = decode_batch(answer.body)
        world.notes.delivered.append(batch)
        fate = world.dice.random()
        if fate < 0.5:
            version += 1
            path, body = f"/batches/{batch.batch}/ack", {"policy_version": version}
            done = await world.until_answered(lambda p=path, b=body: world.control(p, b))  # type: ignore[misc]
            if done.status == 200:
                for episode in (item.episode for group in batch.groups for item in group.episodes):
                    assert episode not in world.notes.trained, f"{episode} was trained twice"
                    world.notes.trained[episode] = batch.batch
        elif fate < 0.7:
            await world.until_answered(lambda b=batch: world.control(f"/batches/{b.batch}/nack"))  # type: ignore[misc]


async def look(world: World) -> dict[str, int]:
    """The counters, after a check of the identity."""
    answer = await world.until_answered(lambda: world.control("/status", method="GET"))
    episodes: dict[str, int] = answer.json()["episodes"]
    assert episodes["opened"] == sum(episodes[state] for state in STATES), episodes
    world.notes.looks += 1
    return episodes


async def killer(world: World, proxy: ProxyProcess) -> None:
    for _ in range(KILLS):
        await asyncio.sleep(world.dice.uniform(0.02, 0.6))
        await asyncio.to_thread(proxy.kill)
        await asyncio.to_thread(proxy.start)
        await look(world)
    await asyncio.sleep(1.0)
    world.notes.over = True


@pytest.mark.slow
async def test_everything_acknowledged_survives(tmp_path: Path) -> None:
    async with EngineStub(delay_s=0.002, split_seed=5, group=2) as engine:
        proxy = await asyncio.to_thread(ProxyProcess(engine.url, tmp_path / "data").start)
        try:
            world = World(proxy.url, seed=11)
            async with asyncio.TaskGroup() as tasks:
                workers = [agent(world, number) for number in range(AGENTS)]
                for work in (*workers, trainer(world), killer(world, proxy)):
                    tasks.create_task(work)
            assert world.notes.looks == KILLS
            records = await all_records(world)
        finally:
            await asyncio.to_thread(proxy.stop)
    assert "Traceback" not in proxy.errors()
    assert len(world.notes.calls) > 50
    assert len(world.notes.trained) > 5
    check_calls(world.notes, records)
    check_rewards(world.notes, records)
    check_deliveries(world.notes, records)
    check_replay(world.notes, tmp_path / "data")


async def all_records(world: World) -> dict[str, dict[str, Any]]:
    listed = await world.until_answered(lambda: world.control("/episodes?limit=1000", method="GET"))
    records = {}
    for item in listed.json()["episodes"]:
        path = f"/episodes/{item['episode']}?tokens=1"
        records[item["episode"]] = (await world.until_answered(lambda p=path: world.control(p, method="GET"))).json()  # type: ignore[misc]
    assert (await look(world))["opened"] == len(records)
    return records


def check_calls(notes: Notes, records: dict[str, dict[str, Any]]) -> None:
    for call_id, (episode, ids) in notes.calls.items():
        found = [item for item in records[episode]["calls"] if item["call"] == call_id]
        assert len(found) == 1, call_id
        assert found[0]["complete"] is True, found[0]
        assert found[0]["token_ids"] == ids
        assert len(found[0]["logprobs"]) == len(ids)


def check_rewards(notes: Notes, records: dict[str, dict[str, Any]]) -> None:
    for episode, given in notes.rewards.items():
        assert [(item["id"], item["value"]) for item in records[episode]["rewards"]] == given
        assert records[episode]["state"] != "open"


def check_deliveries(notes: Notes, records: dict[str, dict[str, Any]]) -> None:
    for batch in notes.delivered:
        for item in (episode for group in batch.groups for episode in group.episodes):
            complete = {c["call"]: c for c in records[item.episode]["calls"] if c["complete"]}
            taught: list[str] = []
            for sample in item.samples:
                for call_id, start, end in sample.spans:
                    assert list(sample.token_ids[start:end]) == complete[call_id]["token_ids"]
                    assert set(sample.loss_mask[start:end]) <= {1}
                    taught.append(call_id)
                assert sum(sample.loss_mask) == sum(end - start for _, start, end in sample.spans)
            assert sorted(taught) == sorted(complete), "every complete call is trained once"
    for episode in notes.trained:
        assert records[episode]["state"] == "trained"


def check_replay(notes: Notes, data_dir: Path) -> None:
    """What was delivered is what the journal gives again; logprobs travelled as float32."""
    done = subprocess.run([PROXY, "replay", data_dir], capture_output=True, check=True)
    again = [json.loads(line) for line in done.stdout.splitlines()]
    replayed = {(item["sample"], tuple(item["token_ids"]), tuple(array("f", item["logprobs"]))) for item in again}
    for batch in notes.delivered:
        for sample in (s for group in batch.groups for episode in group.episodes for s in episode.samples):
            assert (sample.sample, sample.token_ids, tuple(array("f", sample.logprobs))) in replayed
