"""A trainer that is too far ahead of its team, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ajet_sdk.frame import decode_batch
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Client, serving

TEAM = {"plans": "one", "codes": "two"}


async def played(client: Client) -> str:
    """An episode of both models that is ready."""
    answer = await client.control("POST", "/episodes", {"task": "t", "members": TEAM})
    assert answer.status == 200, answer.body
    episode = str(answer.json["episode"])
    for model in TEAM.values():
        body = {"model": model, "messages": [{"role": "user", "content": "go"}]}
        assert (await client.ask("POST", f"/e/{episode}/v1/chat/completions", body)).status == 200
    assert (await client.control("POST", f"/episodes/{episode}/rewards", {"value": 1.0})).status == 200
    return episode


async def test_a_lease_waits_until_the_slowest_of_its_team_has_made_its_update(tmp_path: Path) -> None:
    async with (
        EngineStub(models=("one",)) as one, EngineStub(models=("two",)) as two,
        serving(tmp_path, upstream=(f"one={one.url}", f"two={two.url}")) as client,
    ):
        for model in TEAM.values():
            await client.control("POST", "/policy", {"model": model, "version": 1})
        episode = await played(client)
        await client.control("POST", "/gate/open", {"model": "one", "policy_version": 2})
        ask = {"model": "one", "group_size": 1, "max_lead": 0}
        assert (await client.control("POST", "/batches/lease", ask)).status == 204
        assert (await client.status())["teams"] == [{"one": {"updates": 1, "waits_for": "two"}, "two": {"updates": 0}}]
        waiting = asyncio.create_task(client.control("POST", "/batches/lease", {**ask, "wait_s": 30}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.control("POST", "/gate/open", {"model": "two", "policy_version": 2})
        batch = decode_batch((await waiting).body)
        assert [one.episode for group in batch.groups for one in group.episodes] == [episode]
        assert (await client.status())["teams"] == [{"one": {"updates": 1}, "two": {"updates": 1}}]
