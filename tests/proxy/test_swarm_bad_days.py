"""Bad input and bad days of the swarm, at a whole daemon: clocks, revisions, shares, lanes, and clients cut off."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import ajet_sdk
from ajet_proxy.io.runtime import clock
from ajet_sdk import aio
from ajet_sdk.blocking import wait
from ajet_sdk.frame import decode_batch
from ajet_sdk.play.membership import Membership
from ajet_sdk.play.options import RunOptions
from ajet_sdk.play.results import RunResults
from ajet_sdk.play.rollouts import Rollouts
from ajet_sdk.play.threads import ThreadHands
from ajet_sdk.routes import Join
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Client, eventually, identity_holds, serving

SERVED = {"group_size": 2}
HOUR_S = 3600.0


async def ready(running: Client, task: str, **more: Any) -> str:
    client, episode = running, str((await running.control("POST", "/episodes", {"task": task, **more})).json["episode"])
    assert (await client.chat(episode)).status == 200
    assert (await client.control("POST", f"/episodes/{episode}/rewards", {"value": 1.0})).status == 200
    return episode


async def leased(client: Client, **asked: Any) -> list[tuple[str, ...]]:
    """The episodes of each group of a lease; none if nothing came."""
    answer = await client.control("POST", "/batches/lease", asked)
    if answer.status == 204:
        return []
    return [tuple(one.episode for one in group.episodes) for group in decode_batch(answer.body).groups]


# ---- clocks


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S])
async def test_a_clock_an_hour_off_after_a_restart_shortens_and_lengthens_no_wait(
    tmp_path: Path, stub: EngineStub, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    """Not a client's time, nor a task's, nor a lane's: each has all of it from the start on, and no more."""
    settings: dict[str, Any] = {"upstream": (stub.url,), "group_size": 2}
    async with serving(tmp_path, **settings) as client:
        name = (await client.control("POST", "/clients", {"name": "one", "ttl_s": 4.0})).json["client"]
        playing = (await client.control("POST", "/episodes", {"task": "b/1", "client": name})).json["episode"]
        alone = await ready(client, "a/1")
        await client.control("PUT", "/mix", {"shares": {"a": 0.5, "b": 0.5}, "lane_wait_s": 4.0})
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: time.time() + off_s, monotonic=time.monotonic))
    async with serving(tmp_path, **settings) as client:
        assert (await client.control("POST", f"/clients/{name}/beat")).json["state"] == "joined"
        asked = {"groups": 1, "min_group_size": 1, "group_wait_s": 2.0}
        assert await leased(client, **asked) == []
        assert (await client.control("GET", f"/episodes/{playing}")).json["state"] == "open"
        assert await leased(client, **asked, wait_s=60) == [(alone,)]
        later = [await ready(client, "a/2") for _ in range(2)]
        assert await leased(client, groups=1, wait_s=60) == [tuple(later)], "the other lane never lent its turn"

        async def gone() -> bool:
            return (await client.control("GET", f"/episodes/{playing}")).json.get("reason") == "client_gone"

        await eventually(gone)
        (known,) = (await client.control("GET", "/clients")).json["clients"]
        assert known["reason"] == "silent" and known["gone_at"] - known["heard_at"] >= 4.0
        assert identity_holds(await client.status())


# ---- revisions


async def test_a_revision_that_changes_in_the_middle_of_a_group_makes_two(client: Client) -> None:
    me = (await client.control("POST", "/clients", {"name": "one", "ttl_s": 600, "revision": "r1"})).json["client"]
    old = await ready(client, "t", client=me)
    new = [await ready(client, "t", client=me, revision="r2") for _ in range(2)]
    assert await leased(client) == [tuple(new)]
    assert await leased(client) == []
    assert await leased(client, min_group_size=1, group_wait_s=0.2, wait_s=30) == [(old,)]
    records = [(await client.control("GET", f"/episodes/{one}")).json for one in (old, *new)]
    assert [record["revision"] for record in records] == ["r1", "r2", "r2"]


# ---- shares


# ---- lanes


async def test_a_lane_that_never_plays_holds_up_nobody_and_owes_at_most_a_batch(client: Client) -> None:
    await client.control("PUT", "/mix", {"shares": {"a": 0.5, "b": 0.5}, "ahead": 4, "lane_wait_s": 0.5})
    playing = True

    async def plays(lane: str) -> None:
        while playing:
            await ready(client, f"{lane}/1")

    agents = [asyncio.create_task(plays("a")) for _ in range(2)]
    for _ in range(4):
        assert len(await leased(client, groups=2, wait_s=60)) == 2
    lanes = (await client.control("GET", "/mix")).json["lanes"]
    assert (lanes["a"]["leased"], lanes["b"]["leased"], lanes["b"]["owed"]) == (8, 0, 2)
    agents.append(asyncio.create_task(plays("b")))

    async def both() -> bool:
        return (await client.control("GET", "/mix")).json["lanes"]["b"]["ready"] >= 4

    await eventually(both)
    assert len(await leased(client, groups=2, wait_s=60)) == 2
    assert (await client.control("GET", "/mix")).json["lanes"]["b"]["leased"] == 2
    playing = False
    await client.control("PUT", "/mix", {"ahead": 0})
    await asyncio.gather(*agents)
    assert identity_holds(await client.status())


# ---- clients


class Cut(Membership):
    """A client whose beats do not arrive for a while."""

    async def _beat_on(self) -> None:
        """Nothing is sent."""


async def test_what_a_client_played_that_was_cut_off_is_played_again(client: Client) -> None:
    """Its place is had once."""
    tried: list[str] = []

    def agent(task: Any, episode: Any) -> float:
        tried.append(episode.id)
        while len(tried) == 1 and episode.record()["state"] == "open":
            time.sleep(0.05)
        if len(tried) > 1:
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            httpx.post(f"{episode.base_url}/chat/completions", json=CHAT, headers=headers, trust_env=False)
        return 1.0

    async def play(own: aio.Client) -> RunResults:
        async with Cut(own, Join("player", ttl_s=0.5)) as member:
            options = RunOptions(repeat=1, play="d")
            return await Rollouts(own, agent, ["t"], options, hands=ThreadHands, member=member).run()

    with ajet_sdk.Client(client.app.url) as blocking:
        results = await asyncio.to_thread(wait, play(blocking.core))
    assert [(item.infra, item.again, item.kept) for item in results] == [(True, True, False), (False, False, True)]
    records = [(await client.control("GET", f"/episodes/{one}")).json for one in tried]
    assert records[0]["reason"] == "client_gone" and records[0]["client"] != records[1]["client"]
    assert [record["place"] for record in records] == [0, 0]
    refused = await client.control("POST", f"/clients/{records[0]['client']}/beat")
    assert (refused.status, refused.json["error"]["code"]) == (409, "client_gone")
