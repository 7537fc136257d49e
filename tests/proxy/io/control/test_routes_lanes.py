"""Lanes and ended groups over HTTP: leases that wait for time alone, and episodes that are held back."""

from __future__ import annotations

import asyncio
import json
import sys
from unittest import mock

import pytest

from ajet_proxy.io.control import openings, pace
from ajet_sdk import aio
from ajet_sdk.client import Client as SdkClient
from ajet_sdk.frame import decode_batch
from tests.proxy.serving import Client, eventually

SERVED = {"group_size": 2}


async def rewarded(client: Client, task: str) -> str:
    await client.play(episode := await client.open({"task": task}))
    return episode


async def test_a_lease_that_waits_sees_a_task_end(client: Client) -> None:
    alone = await rewarded(client, "t")
    asked = {"min_group_size": 1, "group_wait_s": 0.3, "wait_s": 300}
    leased = await client.control("POST", "/batches/lease", asked)
    assert [one.episode for group in decode_batch(leased.body).groups for one in group.episodes] == [alone]


async def test_a_lease_that_waits_is_told_of_a_flush(client: Client) -> None:
    alone = await rewarded(client, "t")
    waiting = asyncio.create_task(client.control("POST", "/batches/lease", {"min_group_size": 1, "wait_s": 300}))
    await asyncio.sleep(0.1)
    assert (await client.control("POST", "/groups/flush")).json == {"tasks": 1}
    batch = decode_batch((await waiting).body)
    assert [one.episode for group in batch.groups for one in group.episodes] == [alone]


async def test_a_lease_that_waits_sees_a_lane_lend_its_turn(client: Client) -> None:
    mix = {"shares": {"a": 0.5, "b": 0.5}, "lane_wait_s": 0.3}
    assert (await client.control("PUT", "/mix", mix)).status == 200
    for _ in range(4):
        await rewarded(client, "a/1")
    leased = await client.control("POST", "/batches/lease", {"groups": 2, "wait_s": 300})
    assert [group.task for group in decode_batch(leased.body).groups] == ["a/1", "a/1"]


async def test_an_episode_is_held_until_its_lane_has_room(client: Client) -> None:
    await client.control("PUT", "/mix", {"ahead": 1})
    for _ in range(2):
        await rewarded(client, "a/1")
    waiting = asyncio.create_task(client.open({"task": "a/1"}))
    await client.open({"task": "b/1"})
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert (await client.control("POST", "/batches/lease", {})).status == 200
    assert await waiting


async def test_whoever_is_held_is_let_in_where_a_trainer_waits_for_more_than_may_be_ahead(client: Client) -> None:
    await client.control("PUT", "/mix", {"ahead": 1})
    for _ in range(2):
        await rewarded(client, "a/1")
    waiting = [asyncio.create_task(rewarded(client, "a/2")) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert (await client.status())["episodes"]["open"] == 0
    leased = await client.control("POST", "/batches/lease", {"groups": 2, "wait_s": 300})
    assert [group.task for group in decode_batch(leased.body).groups] == ["a/1", "a/2"]
    await asyncio.gather(*waiting)


async def test_an_episode_is_held_for_a_while_and_refused_then(client: Client) -> None:
    await client.control("PUT", "/mix", {"ahead": 1})
    for _ in range(2):
        await client.open({"task": "a/1"})
    with mock.patch.object(openings, "HOLD_S", 0.1):
        refused = await client.control("POST", "/episodes", {"task": "a/1"})
    assert (refused.status, refused.json["error"]["code"], refused.headers["Retry-After"]) == (503, "lane_full", "1")
    assert (await client.control("POST", "/episodes", {"task": "a/1", "eval": True})).status == 200


async def test_an_opening_whose_answer_was_lost_is_answered_though_its_lane_is_full(client: Client) -> None:
    await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1})
    body = {"task": "a/1", "id": "mine"}
    for _ in range(2):
        assert (await client.control("POST", "/episodes", body)).status == 200
    assert (await client.status())["episodes"]["open"] == 1


async def test_an_episode_of_a_play_is_refused_at_once_if_it_wants_so(client: Client) -> None:
    """Its runner could otherwise not play the lane that has room."""
    await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1})
    await client.control("POST", "/plays", {"name": "d", "episodes": 2})
    for place, status in ((0, 200), (1, 503)):
        body = {"task": "a/1", "play": "d", "place": place, "hold_s": 0}
        answer = await client.control("POST", "/episodes", body)
        assert answer.status == status
    assert answer.json["error"]["code"] == "lane_full"


async def test_a_play_that_asks_again_for_its_episode_stands_where_it_stood(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a run that shares its lane would always be let in before it."""
    monkeypatch.setattr(pace, "AGAIN_S", 600.0)
    await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1})
    await client.control("POST", "/plays", {"name": "d", "episodes": 1})
    first = await client.open({"task": "a/1"})
    mine = {"task": "a/2", "id": "mine", "play": "d", "place": 0}
    assert (await client.control("POST", "/episodes", mine | {"hold_s": 0.1})).status == 503
    other = asyncio.create_task(client.open({"task": "a/3"}))
    await asyncio.sleep(0.1)
    again = asyncio.create_task(client.control("POST", "/episodes", mine))
    await asyncio.sleep(0.1)
    await client.control("POST", f"/episodes/{first}/abort")
    assert (await again).status == 200 and not other.done()
    await client.control("POST", "/episodes/mine/abort")
    assert await other


async def test_what_is_wrong_is_said_before_anything_is_held(client: Client) -> None:
    await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1})
    await client.open({"task": "a/1"})
    for body, code in (
        ({"play": "none", "place": 0}, "unknown_play"), ({"client": "none"}, "unknown_client"),
        ({"place": 3}, "place_taken"),
    ):  # fmt: skip
        refused = await client.control("POST", "/episodes", {"task": "a/2"} | body)
        assert refused.json["error"]["code"] == code


async def test_an_opening_may_ask_not_to_be_held(client: Client) -> None:
    await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1})
    await client.open({"task": "a/1"})
    refused = await client.control("POST", "/episodes", {"task": "a/2", "hold_s": 0})
    assert refused.json["error"]["code"] == "lane_full"
    assert (await client.control("POST", "/episodes", {"task": "a/2", "hold_s": -1.0})).status == 400


async def test_room_that_was_not_taken_is_the_next_ones(client: Client) -> None:
    """The first in line finds its place taken once it is let in."""
    await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1})
    await client.control("POST", "/plays", {"name": "d", "episodes": 1})
    first = await client.open({"task": "a/1"})
    body = {"task": "a/1", "play": "d", "place": 0}
    with mock.patch.object(pace.Pace, "enter", autospec=True, side_effect=pace.Pace.enter) as held:
        taken = [asyncio.create_task(client.control("POST", "/episodes", body)) for _ in range(2)]
        await eventually(lambda: held.call_count == 2)
        last = asyncio.create_task(client.open({"task": "a/1"}))
        await eventually(lambda: held.call_count == 3)
    await client.control("POST", f"/episodes/{first}/abort")
    await asyncio.wait(taken, return_when=asyncio.FIRST_COMPLETED)
    (winner,) = (one.result() for one in taken if one.done())
    await client.control("DELETE", "/plays/d")
    await client.control("POST", f"/episodes/{winner.json['episode']}/abort")
    assert await last
    assert sorted(one.status for one in await asyncio.gather(*taken)) == [200, 404]


async def test_a_lane_without_a_share_in_which_agents_wait_is_an_alert(client: Client) -> None:
    await client.control("PUT", "/mix", {"shares": {"a": 1.0}, "ahead": 1})
    waiting = asyncio.create_task(client.open({"task": "b/1"}))
    await client.until(lambda status: status["alerts"])
    (alert,) = (await client.status())["alerts"]
    assert alert == "agents wait to play lane 'b', which has no share in the mix (ajet mix)"
    assert "ajet_alerts 1" in (await client.ask("GET", "/metrics")).body.decode().splitlines()
    await client.control("PUT", "/mix", {"ahead": 0})
    await waiting
    assert (await client.status())["alerts"] == []


async def test_the_sdk_waits_for_room_longer_than_for_a_proxy(client: Client) -> None:
    """Its deadline is for a proxy that does not answer."""
    await client.control("PUT", "/mix", {"ahead": 1})
    first = [await client.open({"task": "a/1"}) for _ in range(2)]
    now = 0.0

    async def sleep(_client: SdkClient, _seconds: float) -> None:
        nonlocal now
        now += 600.0

    def clock(_client: SdkClient) -> float:
        return now

    with (
        mock.patch.object(openings, "HOLD_S", 0.05), mock.patch.object(SdkClient, "sleep", sleep),
        mock.patch.object(SdkClient, "clock", clock),
    ):  # fmt: skip
        opening = aio.episode("a/1", proxy_url=client.app.url, deadline=1000.0)
        waiting = asyncio.ensure_future(opening.opened(aio.Episode))
        await eventually(lambda: now > 3000.0)
        assert not waiting.done()
        await client.control("POST", f"/episodes/{first[0]}/abort")
        await (await waiting).aclose()


async def ajet(client: Client, *argv: str) -> tuple[int, str]:
    """The exit code of the command, and what it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from ajet_sdk.cli import main; main()", *argv, "--proxy", client.app.url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return int(process.returncode or 0), out.decode()


async def test_the_command_shows_and_changes_the_mix(client: Client) -> None:
    code, said = await ajet(client, "mix")
    assert (code, said.splitlines()) == (0, [
        "no lane has a share: groups are leased in the order in which they were complete",
        "any number of groups may be open or ready; a lane with nothing for 30 s lends its turns",
    ])  # fmt: skip
    code, said = await ajet(client, "mix", "math=0.4", "code=0.6", "--ahead", "3", "--wait", "5")
    assert (code, [line.split() for line in said.splitlines()[:3]]) == (0, [
        ["lane", "share", "leased", "lent", "open", "ready"], ["code", "0.6", "0", "0", "0", "0"],
        ["math", "0.4", "0", "0", "0", "0"],
    ])  # fmt: skip
    assert said.splitlines()[3:] == [
        "3 groups of 2 may be open or ready; a lane with nothing for 5 s lends its turns"
    ]  # fmt: skip
    code, said = await ajet(client, "mix", "--any", "--json")
    assert (code, json.loads(said)["shares"], json.loads(said)["ahead"]) == (0, {}, 3)
    assert await ajet(client, "flush", "--lane", "math") == (0, "0 tasks ended\n")
    await rewarded(client, "other/1")
    await client.control("PUT", "/mix", {"shares": {"math": 1.0}})
    assert "not leased, since without a share: other" in (await ajet(client, "mix"))[1]


async def test_a_model_that_nobody_trains_holds_up_no_team(client: Client) -> None:
    for model in ("m", "n"):
        await client.control("POST", "/policy", {"model": model, "version": 1})
        assert (await client.control("PUT", "/mix", {"ahead": 1, "group_size": 1, "model": model})).status == 200
    code, said = await ajet(client, "mix", "--model", "m", "--ahead", "2", "--json")
    assert (code, json.loads(said)["ahead"]) == (0, 2)
    assert (await client.control("GET", "/mix?model=n")).json["ahead"] == 1
    team, alone = {"task": "a/1", "members": {"x": "m", "y": "n"}}, {"task": "a/1", "model": "n"}
    statuses = [(await client.control("POST", "/episodes", body | {"hold_s": 0.0})).status for body in (team, team)]
    assert statuses == [200, 200]
    for body in (team, alone):
        refused = await client.control("POST", "/episodes", body | {"hold_s": 0.0})
        assert (refused.status, refused.json["error"]["code"]) == (503, "lane_full")
    assert (await client.control("GET", "/wanted")).json["other"] == 2
