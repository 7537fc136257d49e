"""Users' traffic on bad days: who never consented, who takes it back, judges that are away, and several workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.io.http import keyring
from ajet_sdk.frame import decode_batch
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Client, eventually, serving
from tests.proxy.test_traffic import ADMIN, ALWAYS, LANE, LEASE, NO_LANE, SERVED, User, judged, leased, seals
from tests.proxy.test_workers import crew

KEYED = {**SERVED, "traffic": "", "admin_secret": ADMIN}
SAYS: dict[str | None, dict[str, str]] = {
    None: {}, "1": {"X-AJet-Traffic": "1"}, "0": {"X-AJet-Traffic": "0"}
}


async def batch(client: Client, key: str | None = None) -> tuple[str | None, set[str]]:
    """All that can be leased: the batch, and the calls of which it has tokens to train."""
    ready = (await client.control("GET", "/status", key=key)).json["episodes"]["ready"]
    if ready:
        answer = await client.control("POST", "/batches/lease", {"groups": ready, "group_size": 1}, key=key)
        found = decode_batch(answer.body)
        samples = [one for group in found.groups for episode in group.episodes for one in episode.samples]
        return found.batch, {call for sample in samples for call in sample.calls}
    return None, set()


async def judge_all(client: Client, key: str | None = None) -> list[str]:
    """Has a judge judge whatever it gets; the episodes."""
    answer = await client.control("POST", LEASE, {"n": 100}, key=key)
    names = [one["episode"] for one in (answer.json or {"judgements": []})["judgements"]]
    for name in names:
        body = {"judge": "j", "rewards": [{"value": 1}]}
        assert (await client.control("POST", f"/episodes/{name}/judgement", body, key=key)).status == 200
    return names


async def learned_from(client: Client) -> set[str]:
    """The calls in the next batch, once all that is open is sealed and judged."""
    await seals(client)
    await judge_all(client)
    _, found = await batch(client)
    return found


async def calls_of(client: Client, user: User, key: str | None = None) -> set[str]:
    """The calls that answered a user."""
    listed = (await client.control("GET", "/episodes?limit=1000", key=key)).json["episodes"]
    records = [await client.record(one["episode"], key=key) for one in listed]
    calls = [call for record in records for call in record["calls"]]
    return {call["call"] for call in calls if call.get("response") in user.answers}


@pytest.mark.parametrize("path", ["/e/{}", ""])
async def test_no_token_of_what_nobody_consents_to_is_in_any_batch(
    tmp_path: Path, stub: EngineStub, path: str
) -> None:
    """By key, first and later header, and revocation. A lease after the answer of a withdrawal has nothing of it."""
    cases: list[tuple[Claims, str | None, str | None, bool]] = [
        (NO_LANE, "1", None, False), (LANE, None, None, False), (LANE, "1", None, True), (LANE, "0", None, False),
        (ALWAYS, None, None, True), (ALWAYS, "0", None, False), (LANE, "1", "0", False), (ALWAYS, None, "0", False),
        (LANE, "1", "1", True), (ALWAYS, None, "revoked", False),
    ]  # fmt: skip
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        keys = keyring.keys(tmp_path, admin_secret=ADMIN)
        judge, may, never = keys.issue(Claims("judge", lanes=("chat",))), set[str](), set[str]()
        users = []
        for number, (claims, first, _, _) in enumerate(cases):
            tenant = Claims(claims.scope, f"app{number}", lanes=claims.lanes, always=claims.always)
            users.append(user := User(client, path.format(f"mine{number}") if path else "", keys.issue(tenant)))
            await user.says(f"I am {number}", **SAYS[first])
        await seals(client, key=ADMIN)
        await judge_all(client, judge)
        for number, (_, _, later, learned) in enumerate(cases):
            if later == "revoked":
                keyring.revoke(tmp_path, "tenant", f"app{number}", client.now)
                await client.until(lambda status: status["traffic"]["withdrawn"] >= 6, key=ADMIN)
            elif later is not None:
                await users[number].says("and more", **SAYS[later])
            (may if learned else never).update(await calls_of(client, users[number], ADMIN))
        await seals(client, key=ADMIN)
        await judge_all(client, judge)
        _, found = await batch(client, ADMIN)
        assert found == may
        assert not found & never and len(never) >= 8


@pytest.mark.parametrize(("traffic", "header", "learned"), [
    ("chat", None, True), ("chat", "1", True), ("chat", "0", False), ("", None, False), ("", "1", False),
])  # fmt: skip
async def test_without_keys_the_setting_decides(
    tmp_path: Path, stub: EngineStub, traffic: str, header: str | None, learned: bool
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **{**SERVED, "traffic": traffic}) as client:
        user = User(client)
        await user.says("one", **SAYS[header])
        found = await learned_from(client)
        assert found == (await calls_of(client, user) if learned else set())


@pytest.mark.parametrize(("first", "later"), [("0", None), (None, "0")])
@pytest.mark.parametrize("sealed", [False, True])
async def test_of_chats_that_nobody_can_tell_apart_all_are_taken_back(
    tmp_path: Path, stub: EngineStub, first: str | None, later: str | None, sealed: bool
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **SERVED) as client:
        user, twin = User(client), User(client)
        await user.says("one", **SAYS[first])
        await twin.says("one")
        assert user.said == twin.said
        if sealed:
            await seals(client)
            await judge_all(client)
        await user.says("two", **SAYS[later])
        found = await learned_from(client)
        assert not found & await calls_of(client, user)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_who_never_consents_takes_nothing_from_those_who_begin_alike_and_do(
    tmp_path: Path, stub: EngineStub, order: tuple[int, int]
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **SERVED) as client:
        users = [User(client), User(client)]
        for text in ("one", "two", "three"):
            for number in order:
                await users[number].says(text, **SAYS[str(number)])
        found = await learned_from(client)
        assert found == await calls_of(client, users[1])


@pytest.mark.parametrize("path", ["/e/mine", ""])
async def test_a_call_takes_a_chat_back_even_if_it_is_never_let_in(
    tmp_path: Path, stub: EngineStub, path: str
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **SERVED) as client:
        user = User(client, path)
        await user.says("one")
        await seals(client)
        await judge_all(client)
        await client.control("POST", "/gate/close", {"wait_s": 0})
        asks = asyncio.create_task(user.says("two", **SAYS["0"]))
        await eventually(lambda: client.gate.waiting)
        assert await batch(client) == (None, set())
        asks.cancel()
        await asyncio.gather(asks, return_exceptions=True)


@pytest.mark.parametrize(("header", "learned"), [(None, False), ("1", True), ("0", False)])
async def test_a_chat_that_opens_with_a_reward_lives_as_any_other(
    tmp_path: Path, stub: EngineStub, header: str | None, learned: bool
) -> None:
    """The app gives rewards by itself, with each call, and consents by the first alone."""
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        user = User(client, "/e/mine", keyring.keys(tmp_path, admin_secret=ADMIN).issue(LANE))
        for text, said in (("one", SAYS[header]), ("two", {})):
            await user.says(text, **said, **{"X-AJet-Reward": "1"})
            await seals(client, key=ADMIN)
        _, found = await batch(client, ADMIN)
        assert found == (await calls_of(client, user, ADMIN) if learned else set())
        records = [await client.record(name, key=ADMIN) for name in ("mine", "mine~2")]
        assert [(one["traffic"], one["lane"]) for one in records] == [(True, "chat")] * 2
        assert records[1]["first"] == "mine"


async def test_a_chat_is_taken_back_after_learning_was_turned_off(tmp_path: Path, stub: EngineStub) -> None:
    """The setting is gone, so what the call opens is no traffic."""
    async with serving(tmp_path, upstream=(stub.url,), **SERVED) as client:
        user = User(client)
        await user.says("one")
        await seals(client)
        await judge_all(client)
    async with serving(tmp_path, upstream=(stub.url,), **{**SERVED, "traffic": ""}) as client:
        user.url = f"{client.app.url}/v1"
        await user.says("two", **SAYS["0"])
        assert await batch(client) == (None, set())


async def test_nobody_leases_what_was_revoked_while_the_daemon_was_away(tmp_path: Path, stub: EngineStub) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        await User(client, key=keyring.keys(tmp_path, admin_secret=ADMIN).issue(ALWAYS)).says("one")
        await seals(client, key=ADMIN)
        await judge_all(client, ADMIN)
        revoked_at = client.now
    keyring.revoke(tmp_path, "tenant", "app", revoked_at)
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        assert await batch(client, ADMIN) == (None, set())


async def test_what_a_trainer_has_is_not_leased_again_once_its_key_is_revoked(
    tmp_path: Path, stub: EngineStub
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        user = User(client, key=keyring.keys(tmp_path, admin_secret=ADMIN).issue(ALWAYS))
        await user.says("one")
        await seals(client, key=ADMIN)
        await judge_all(client, ADMIN)
        name, found = await batch(client, ADMIN)
        assert found
        keyring.revoke(tmp_path, "tenant", "app", client.now)

        async def withdrawn() -> bool:
            (one,) = (await client.control("GET", "/episodes", key=ADMIN)).json["episodes"]
            return bool(one.get("withdrawn"))

        await eventually(withdrawn)
        assert (await client.control("POST", f"/batches/{name}/nack", key=ADMIN)).status == 200
        assert await batch(client, ADMIN) == (None, set())


async def test_a_request_that_came_in_before_its_key_was_revoked_opens_nothing_to_learn_from(
    tmp_path: Path, stub: EngineStub
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        user = User(client, key=keyring.keys(tmp_path, admin_secret=ADMIN).issue(ALWAYS))
        await client.control("POST", "/gate/close", {"wait_s": 0}, key=ADMIN)
        asks = asyncio.create_task(user.says("one"))
        await eventually(lambda: client.gate.waiting)
        keyring.revoke(tmp_path, "tenant", "app", client.now)

        await eventually(lambda: "app" in client.store.presence.void)
        assert (await client.ask("GET", "/v1/models", key=user.key)).status == 401
        await client.control("POST", "/gate/open", {"policy_version": 1}, key=ADMIN)
        await asks
        await seals(client, key=ADMIN)
        (one,) = (await client.control("GET", "/episodes", key=ADMIN)).json["episodes"]
        assert (one["state"], one["reason"]) == ("discarded", "withdrawn")


@pytest.mark.parametrize("way", ["path", "body"])
async def test_any_key_of_a_tenant_takes_a_chat_back(tmp_path: Path, stub: EngineStub, way: str) -> None:
    """One without a lane, too, when the chat was sealed before. Only what nothing names is known by its key as well."""
    async with serving(tmp_path, upstream=(stub.url,), **KEYED) as client:
        keys = keyring.keys(tmp_path, admin_secret=ADMIN)
        user = Named(client, "/e/mine" if way == "path" else "", keys.issue(ALWAYS), "me" if way == "body" else "")
        await user.says("one")
        await seals(client, key=ADMIN)
        user.key = keys.issue(NO_LANE)
        await user.says("two", **SAYS["0"])
        await seals(client, key=ADMIN)
        listed = (await client.control("GET", "/episodes", key=ADMIN)).json["episodes"]
        assert [(one["state"], one["reason"]) for one in listed] == [("discarded", "withdrawn")] * 2


class Named(User):
    """A user whose app names the user in the body, if it has a name."""

    def __init__(self, client: Client, path: str, key: str, name: str) -> None:
        super().__init__(client, path, key)
        self._name = name

    async def says(self, text: str, **headers: str) -> None:
        self.said.append({"role": "user", "content": text})
        named: dict[str, Any] = {"user": self._name} if self._name else {}
        async with openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0) as asks:
            answer = await asks.chat.completions.create(
                model="stub", messages=self.said, max_tokens=8, extra_headers=headers, **named
            )
        self.answers.append(answer.id)
        self.said.append({"role": "assistant", "content": answer.choices[0].message.content})


async def test_chats_that_interleave_under_one_user_are_judged_each_with_what_came_next(client: Client) -> None:
    """Whichever episodes they are in."""
    first, second = (Named(client, "", "EMPTY", "me") for _ in range(2))
    for turn in ("one", "two"):
        await first.says(f"first {turn}")
        await second.says(f"second {turn}")
    await seals(client)
    shown = [call for one in await leased(client) for call in one["calls"]]
    assert len(shown) == 4
    for call in shown:
        mine, other = ("first", "second") if "first" in call["before"] else ("second", "first")
        assert mine in call["before"] and other not in call["before"] + call["next"]
        assert (call["next_kind"] == "reply") == (f"{mine} two" not in call["before"])
        assert call["next_kind"] == "none" or f"{mine} two" in call["next"]


@pytest.mark.parametrize(("early", "late"), [("0", None), (None, "0")])
async def test_a_chat_is_taken_back_whose_name_turned_out_to_be_that_of_several(
    client: Client, early: str | None, late: str | None
) -> None:
    """Its later parts are known by its history, as those of a chat without a name."""
    user, *others = (Named(client, "", "EMPTY", "me") for _ in range(3))
    await user.says("one", **SAYS[early])
    for other in others:
        await other.says("another one")
    assert client.store.state.episodes.shared_names
    await seals(client)
    await judge_all(client)
    await user.says("two", **SAYS[late])
    found = await learned_from(client)
    assert not found & await calls_of(client, user)


async def test_a_judge_that_went_away_while_it_waited_gets_nothing(client: Client) -> None:
    """So nobody waits for its lease to run out."""
    waits = asyncio.create_task(client.control("POST", LEASE, {"wait_s": 60, "lease_s": 600}))
    await asyncio.sleep(0.5)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    await asyncio.sleep(0.2)
    await User(client).says("one")
    await seals(client)
    assert len(await leased(client)) == 1


async def test_a_shut_gate_keeps_nothing_from_a_judge(client: Client) -> None:
    await User(client).says("one")
    await seals(client)
    await client.control("POST", "/gate/close", {"wait_s": 0})
    (found,) = await leased(client)
    assert found["calls"][0]["answer"]
    assert await judged(client, found["episode"]) == 200


async def test_while_no_judge_is_there_users_see_nothing_of_it(tmp_path: Path, stub: EngineStub) -> None:
    """The backlog is never above its cap. When a judge is back it gets the newest first."""
    settings = {**SERVED, "traffic_idle": 0.1, "traffic_backlog": 3, "upstream": (stub.url,)}
    async with serving(tmp_path, **settings) as client:
        most = 0

        async def chats(number: int) -> None:
            for turn in range(3):
                await User(client, f"/e/chat{number}-{turn}").says("one")

        async def looks() -> None:
            nonlocal most
            while True:
                traffic = (await client.status())["traffic"]
                outcomes = ("awaiting", "judged", "rewarded", "not_judged", "withdrawn", "lost")
                assert traffic["sealed"] == sum(traffic[name] for name in outcomes)
                most = max(most, traffic["awaiting"])
                await asyncio.sleep(0.01)

        looking = asyncio.create_task(looks())
        await asyncio.gather(*(chats(number) for number in range(4)))
        await client.until(lambda status: not status["episodes"]["open"])
        for name in ("older", "newer"):
            await User(client, f"/e/{name}").says("one")
            await client.until(lambda status: not status["episodes"]["open"])
        assert not looking.done()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert most == 3
        names = [one["episode"] for one in await leased(client)]
        assert (len(names), names[:2]) == (3, ["newer", "older"])
        assert (await client.status())["traffic"]["not_judged"] == 11


async def test_traffic_is_the_same_over_worker_processes(tmp_path: Path, stub: EngineStub) -> None:
    """Each request takes a fresh connection, so a chat meets both workers."""
    async with crew(tmp_path, stub, **SERVED) as client:
        users = [User(client, "/e/named" if number == 0 else "") for number in range(6)]
        for turn in ("one", "two"):
            await asyncio.gather(*(user.says(f"{number} {turn}") for number, user in enumerate(users)))
        assert (await client.status())["episodes"]["open"] == 6
        body = {"response": users[1].answers[0], "value": 1}
        assert (await client.control("POST", "/feedback", body)).status == 200
        await seals(client)
        found = await leased(client)
        assert len(found) == 6 and found[0]["calls"][0]["feedback"]["value"] == 1
        assert {tuple(call["next_kind"] for call in one["calls"]) for one in found} == {("reply", "none")}
        for one in found:
            assert await judged(client, one["episode"]) == 200
        await asyncio.gather(*(user.says("three", **SAYS["0" if user is users[2] else None]) for user in users))
        await seals(client)
        parts = await judge_all(client)
        assert len(parts) == 5 and "named~2" in parts
        _, calls = await batch(client)
        assert calls == set().union(*[await calls_of(client, user) for user in users if user is not users[2]])
        assert len(calls) == 15
