"""Consent of users whom a name or a history does not tell apart from others, behind a key that asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import episodes, retention
from ajet_proxy.export import Choice, rows
from ajet_proxy.io.http import keyring
from ajet_proxy.io.storage import compactor
from tests.kit.engine_stub import EngineStub, Fault
from tests.proxy.serving import Client, eventually, serving
from tests.proxy.test_traffic import ADMIN, ALWAYS, LANE, SERVED, User, seals
from tests.proxy.test_traffic_bad_days import KEYED, SAYS, Named, batch, calls_of, judge_all


class Site:
    """A daemon, and the key of an app whose users consent by header."""

    def __init__(self, client: Client) -> None:
        self.client, self.folder = client, Path(client.app.config.data_dir)
        self.keys = keyring.keys(self.folder, admin_secret=ADMIN)
        self.key = self.keys.issue(LANE)

    def user(self, path: str = "", name: str = "") -> Named:
        return Named(self.client, path, self.key, name)

    async def seals(self) -> None:
        await seals(self.client, key=ADMIN)

    async def learned(self) -> set[str]:
        """The calls in the next batch, once all that is open is sealed and judged."""
        await self.seals()
        await judge_all(self.client, ADMIN)
        return (await batch(self.client, ADMIN))[1]

    async def archives(self) -> list[str]:
        """Learns from all there is, until it is in the archive; the episodes."""
        await self.seals()
        judged, episodes = await judge_all(self.client, ADMIN), self.client.store.state.episodes
        name, _ = await batch(self.client, ADMIN)
        done = await self.client.control("POST", f"/batches/{name}/ack", {"policy_version": 1}, key=ADMIN)
        assert done.status == 200
        await eventually(lambda: episodes.archived and not (episodes or episodes.leaving))
        return judged

    async def calls(self, user: User) -> set[str]:
        return await calls_of(self.client, user, ADMIN)


@pytest.fixture
async def site(tmp_path: Path, stub: EngineStub) -> AsyncIterator[Site]:
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        yield Site(client)


@pytest.mark.parametrize("path", ["/e/alice", ""])
async def test_who_never_consented_does_not_however_many_others_do_not(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(episodes, "MOST_WITHDRAWN", 2)
    user = site.user(path, "" if path else "alice")
    await user.says("I never said so")
    await site.seals()
    for number in range(4):
        await site.user(f"/e/other{number}").says("nor do I")
    await user.says("my secret")
    assert not await site.learned() & await site.calls(user)


CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BEFORE: dict[str, list[dict[str, Any]]] = {
    "nothing": [], "a greeting": [{"role": "assistant", "content": "Hello, how can I help?"}],
    "an old chat": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}],
    "a call": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "1", "content": "it is so"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("first", ["1", None])
async def test_another_conversation_of_a_name_needs_a_consent_of_its_own(
    site: Site, sealed: bool, first: str | None, before: str
) -> None:
    """An app may have one name for all of its users, and its own beginning of each chat."""
    user, other = site.user(name="app"), site.user(name="app")
    for one in (user, other):
        one.said += BEFORE[before]
    await user.says("one", **SAYS[first])
    if sealed:
        await site.seals()
    await other.says("I am somebody else", **SAYS[None if first else "1"])
    await other.says("and go on")
    await user.says("two")
    consents, refuses = (user, other) if first else (other, user)
    found = await site.learned()
    assert found == await site.calls(consents) and not found & await site.calls(refuses)


@pytest.mark.parametrize("sent", [{}, {"X-Stainless-Retry-Count": "1"}])
@pytest.mark.parametrize("lost", [False, True])
async def test_who_says_the_same_under_a_name_needs_a_consent_of_its_own(
    site: Site, stub: EngineStub, lost: bool, sent: dict[str, str]
) -> None:
    """A client that sends a request again says the same of its consent."""
    alice, bob = site.user(name="app"), site.user(name="app")
    if lost:
        stub.faults.append(Fault("status", status=500))
        with pytest.raises(openai.InternalServerError):
            await alice.says("hi", **SAYS["1"])
    else:
        await alice.says("hi", **SAYS["1"])
    await bob.says("hi", **sent)
    await bob.says("my secret")
    assert await site.learned() == await site.calls(alice)


async def test_others_who_wait_at_the_gate_consent_each_for_themselves(site: Site) -> None:
    """Before the gate nobody had a chat of the name yet."""
    users = [site.user(name="app") for _ in range(3)]
    assert (await site.client.control("POST", "/gate/close", {"wait_s": 0}, key=ADMIN)).status == 200
    asking = []
    for number, (user, said) in enumerate(zip(users, ("1", None, "1"), strict=True), 1):
        asking.append(asyncio.create_task(user.says(f"I am {number}", **SAYS[said])))
        await eventually(lambda number=number: site.client.gate.held.total() == number)
    assert (await site.client.control("POST", "/gate/open", {"policy_version": 1}, key=ADMIN)).status == 200
    await asyncio.gather(*asking)
    alice, bob, carol = [await site.calls(user) for user in users]
    found = await site.learned()
    assert alice <= found <= alice | carol and not found & bob


async def test_a_call_with_a_reward_is_in_no_chat_of_its_name_that_consents_otherwise(site: Site) -> None:
    alice, bob = site.user(name="app"), site.user(name="app")
    await alice.says("I am Alice", **SAYS["1"])
    with pytest.raises(openai.BadRequestError, match="needs an episode"):
        await bob.says("my secret", **{"X-AJet-Reward": "0.5"})
    await alice.says("and I go on", **SAYS["1"], **{"X-AJet-Reward": "0.5"})
    calls = await site.calls(alice)
    await site.seals()
    assert len(calls) == 2 and (await batch(site.client, ADMIN))[1] == calls


@pytest.mark.parametrize("how", ["user", "x-session-id", "session-id"])
@pytest.mark.parametrize("sealed", [False, True])
async def test_who_took_it_back_is_not_learned_from_whatever_becomes_of_the_history(
    site: Site, how: str, sealed: bool
) -> None:
    """Behind a key that consents for its users. An agent sums its history up, and its header comes once."""
    site.key = site.keys.issue(ALWAYS)
    user, named = site.user(name="me" if how == "user" else ""), {} if how == "user" else {how: "mine"}
    await user.says("one", **named)
    await user.says("not this", **SAYS["0"], **named)
    if sealed:
        await site.seals()
    user.said = []
    await user.says("Summary: my secret", **named)
    assert not await site.learned()


async def test_who_goes_on_from_more_words_is_in_no_chat_of_who_said_fewer(site: Site) -> None:
    user, twin = site.user(), site.user()
    await user.says("hi", **SAYS["1"])
    await user.says("my secret", **SAYS["1"])
    await site.seals()
    await twin.says("hi", **SAYS["1"])
    await user.says("three", **SAYS["1"])
    await user.says("forget it all", **SAYS["0"])
    assert await site.learned() == await site.calls(twin)


@pytest.mark.parametrize("revoked", [False, True])
@pytest.mark.parametrize("said", ["1", None])
async def test_what_a_name_stood_for_before_it_was_traffic_says_nothing_of_consent(
    site: Site, revoked: bool, said: str | None
) -> None:
    client, keys = site.client, site.keys
    old = Named(client, "", keys.issue(Claims("agent", "app", issued=client.now - 10)), "alice")
    await old.says("one", **{"X-AJet-Reward": "1"})
    await site.seals()
    if revoked:
        keyring.revoke(site.folder, "tenant", "app", client.now)
        await eventually(lambda: client.store.presence.void)
    user = Named(client, "", keys.issue(Claims("agent", "app", lanes=("chat",), issued=client.now + 5)), "alice")
    await user.says("now with a lane", **SAYS[said])
    before, calls = await site.calls(old), await site.calls(user)
    assert await site.learned() == before | (calls if said else set())


async def test_who_consents_goes_on_in_no_chat_of_a_twin_who_refused(site: Site) -> None:
    user, twin = site.user(), site.user()
    await user.says("hi", **SAYS["1"])
    await site.seals()
    await twin.says("hi", **SAYS["0"])
    await user.says("two", **SAYS["1"])
    assert await site.learned() == await site.calls(user)


async def test_who_refused_goes_on_in_no_chat_of_who_said_the_same_and_consents(site: Site) -> None:
    user, twin = site.user(), site.user()
    await user.says("hi there", **SAYS["0"])
    await site.seals()
    await twin.says("hi there", **SAYS["1"])
    assert user.said == twin.said
    await user.says("I am ill")
    await twin.says("what is the time?", **SAYS["1"])
    found = await site.learned()
    assert found == await site.calls(twin)


async def test_a_retry_takes_the_place_of_no_request_that_consents_otherwise(site: Site, stub: EngineStub) -> None:
    user, other = site.user(), site.user()
    stub.faults.append(Fault("status", status=500))
    with pytest.raises(Exception, match="500"):
        await user.says("hi", **SAYS["1"])
    await other.says("hi", **{"X-Stainless-Retry-Count": "1"})
    assert not await site.learned()


async def test_a_chat_is_taken_back_whether_one_that_said_the_same_is_open_or_not(site: Site) -> None:
    user, twin = site.user(), site.user()
    await user.says("hi", **SAYS["1"])
    await site.seals()
    await twin.says("hi", **SAYS["1"])
    await user.says("take it back", **SAYS["0"])
    assert not await site.learned() & await site.calls(user)


async def test_a_chat_that_its_app_gave_up_stays_taken_back(site: Site) -> None:
    user = site.user()
    await user.says("one", **SAYS["0"])
    (episode,) = (await site.client.control("GET", "/episodes", key=ADMIN)).json["episodes"]
    assert (await site.client.control("POST", f"/episodes/{episode['episode']}/abort", {}, key=ADMIN)).status == 200
    await user.says("two")
    assert not await site.learned()


CHAT = "/chat/completions"
NO_CALLS: dict[str, tuple[str, str, Any]] = {
    "no JSON": ("POST", CHAT, b"{"), "too many choices": ("POST", CHAT, {"messages": [], "n": 2000}),
    "too many messages": ("POST", CHAT, {"messages": 20_000 * [{"role": "user", "content": "a"}]}),
    "no such block": ("POST", "/messages", {"messages": [{"role": "user", "content": [{"type": "odd"}]}]}),
    "models": ("GET", "/models", b""), "embeddings": ("POST", "/embeddings", {"input": "a"}),
}


@pytest.mark.parametrize("how", NO_CALLS)
async def test_a_request_that_becomes_no_call_takes_back_what_it_names(site: Site, how: str) -> None:
    user = site.user("/e/alice")
    await user.says("one", **SAYS["1"])
    method, route, body = NO_CALLS[how]
    sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": {"model": "stub", **body}}
    async with httpx.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {site.key}", **SAYS["0"]}) as http:
        answer = await http.request(method, user.url + route, **sent)
    assert (answer.status_code == 200) is (how in ("models", "embeddings"))
    assert not await site.learned()


@pytest.fixture
async def archiving(tmp_path: Path, stub: EngineStub, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A `site` that keeps no episode in memory that has ended."""
    monkeypatch.setattr(retention, "KEPT_EPISODES", 0)
    monkeypatch.setattr(compactor, "RETAIN_S", 0.0)
    async with serving(tmp_path, upstream=(stub.url,), archive_max_age=3600.0, **KEYED) as client:
        yield Site(client)


@pytest.mark.parametrize("way", ["/e/alice", "body", "lineage"])
@pytest.mark.parametrize("said", [None, "1", "0"])
async def test_an_archived_chat_goes_on_and_is_taken_back(archiving: Site, way: str, said: str | None) -> None:
    """Each request has to read the archive: one that refuses and is in no chat yet, one that becomes no call, and one
    that goes on."""
    site, client = archiving, archiving.client
    user = site.user(way if "/" in way else "", "alice" if way == "body" else "")
    await user.says("one", **SAYS["1"])
    (first,) = await site.archives()
    episodes = client.store.state.episodes
    await site.user().says("I never said so", **SAYS["0"])
    if said == "0" and way != "lineage":
        headers = {"authorization": f"Bearer {site.key}", **SAYS[said]}
        body = {"model": "stub", "user": "alice", **NO_CALLS["too many choices"][2]}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
            answer = await http.post(user.url + CHAT, json=body)
        assert answer.status_code == 400 and first in episodes.withdrawn
    await user.says("two", **SAYS[said])
    assert (first in episodes.withdrawn) is (said == "0")
    (found,) = [one for one in episodes.values() if one.opening.first == first]
    assert found.withdrawn is (said == "0")
    assert bool(await site.learned()) is (said != "0")


@pytest.mark.parametrize("others", [0, 3])
async def test_those_who_never_consented_push_out_nobody_who_took_it_back(
    archiving: Site, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr(episodes, "MOST_WITHDRAWN", 2)
    user = archiving.user("/e/alice")
    await user.says("one", **SAYS["1"])
    await archiving.archives()
    await user.says("forget me", **SAYS["0"])
    for number in range(others):
        await archiving.user(f"/e/other{number}").says("I never said so")
    await archiving.seals()
    known = archiving.client.store.state.episodes
    await eventually(lambda: not (known or known.leaving))
    await user.says("my secret", **SAYS["1"])
    assert not await archiving.learned()


async def test_an_archived_chat_whose_key_was_revoked_goes_on_withdrawn(archiving: Site) -> None:
    client, keys = archiving.client, archiving.keys
    tenant = Claims("agent", "app", lanes=("chat",), always=True, issued=client.now - 10)
    user = Named(client, "/e/alice", keys.issue(tenant), "")
    await user.says("one")
    await archiving.archives()
    keyring.revoke(archiving.folder, "tenant", "app", client.now)
    await eventually(lambda: client.store.presence.void)
    user.key = keys.issue(Claims("agent", "app", lanes=("chat",), issued=client.now + 5))
    await user.says("two")
    assert not await archiving.learned()


async def test_a_shared_name_that_rewards_without_a_call_is_refused(site: Site) -> None:
    for text in ("one", "two"):
        await site.user(name="app").says(text, **SAYS["1" if text == "one" else None])
    headers = {"authorization": f"Bearer {site.key}", "X-AJet-Reward": "1"}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
        body = {"model": "stub", "input": "a", "user": "app"}
        answer = await http.post(f"{site.client.app.url}/v1/embeddings", json=body)
    assert answer.status_code == 400 and "needs an episode" in answer.text


async def test_what_came_without_a_key_after_such_chats_were_revoked_is_exported(
    tmp_path: Path, stub: EngineStub
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **SERVED) as client:
        for text in ("before", "after"):
            await User(client).says(text)
            await seals(client)
            await judge_all(client)
            if text == "before":
                keyring.revoke(tmp_path, "tenant", "", client.now)
    assert len([*rows(tmp_path, "samples", Choice(), lambda number: None)]) == 1


async def test_nothing_is_exported_whose_key_was_revoked_while_no_daemon_ran(tmp_path: Path, stub: EngineStub) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        keys = keyring.keys(tmp_path, admin_secret=ADMIN)
        for tenant in ("app", "other"):
            await User(client, key=keys.issue(Claims("agent", tenant, lanes=("chat",), always=True))).says("one")
        await seals(client, key=ADMIN)
        await judge_all(client, ADMIN)
        revoked_at = client.now

    def exported() -> list[str]:
        return [row["sample"] for row in rows(tmp_path, "samples", Choice(), lambda number: None)]

    assert len(exported()) == 2
    keyring.revoke(tmp_path, "tenant", "app", revoked_at)
    assert len(exported()) == 1
