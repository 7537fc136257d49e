"""A user of the daemon who knows nothing of ajet, and the judge of what the user was answered."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger.judging import JudgingCommands
from ajet_proxy.io.control import judgements
from ajet_proxy.io.control.judgements import Judgements
from ajet_proxy.io.http import keyring
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Client, eventually, serving

SERVED = {"traffic": "chat", "traffic_holdout": 0.0, "group_size": 1}
LEASE = "/judgements/lease"


class User:
    """Talks by the plain client of openai. A chat is named by nothing but its history."""

    def __init__(self, client: Client, path: str = "", key: str = "EMPTY") -> None:
        self.url, self.key = f"{client.app.url}{path}/v1", key
        self.said: list[Any] = []
        self.answers: list[str] = []

    async def says(self, text: str, **headers: str) -> None:
        self.said.append({"role": "user", "content": text})
        async with openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0) as asks:
            answer = await asks.chat.completions.create(
                model="stub", messages=self.said, max_tokens=8, extra_headers=headers
            )
        self.answers.append(answer.id)
        self.said.append({"role": "assistant", "content": answer.choices[0].message.content})


async def leased(client: Client, **body: Any) -> list[Any]:
    answer = await client.control("POST", LEASE, {"n": 10, "wait_s": 300} | body)
    assert answer.status in (200, 204), answer.body
    return answer.json["judgements"] if answer.status == 200 else []


async def seals(client: Client, **key: str) -> None:
    """All chats end."""
    for one in (await client.control("GET", "/episodes?state=open", **key)).json["episodes"]:
        assert (await client.control("POST", f"/episodes/{one['episode']}/seal", **key)).status == 200


async def judged(client: Client, episode: str, value: float = 1.0, **body: Any) -> int:
    body = {"judge": "j", "rewards": [{"value": value}]} | body
    return (await client.control("POST", f"/episodes/{episode}/judgement", body)).status


async def test_a_chat_is_learned_from_that_a_judge_has_judged(client: Client) -> None:
    user = User(client)
    await user.says("one")
    await user.says("two")
    given = await client.control("POST", "/feedback", {"response": user.answers[0], "value": 1})
    assert (given.status, given.json["state"]) == (200, "open")
    await seals(client)
    (found,) = await leased(client)
    first, second = found["calls"]
    assert (found["lane"], found["eval"], first["next_kind"], second["next_kind"]) == ("chat", False, "reply", "none")
    assert "one" in first["before"] and "two" in first["next"] and "two" in second["before"]
    assert first["answer"] == user.said[1]["content"] or first["answer"].startswith(user.said[1]["content"])
    assert first["feedback"]["value"] == 1 and "feedback" not in second
    assert await leased(client, wait_s=0) == []
    traffic = (await client.status())["traffic"]
    assert (traffic["sealed"], traffic["awaiting"], traffic["leased"]) == (1, 1, 1)
    rewards = [{"call": first["call"], "value": 1}, {"call": second["call"], "value": -0.5, "note": "n"}]
    for judge, status in (("j", 200), ("j", 200), ("k", 409)):
        assert await judged(client, found["episode"], rewards=rewards, judge=judge) == status
    status = await client.status()
    assert (status["episodes"]["ready"], status["traffic"]["judged"]) == (1, 1)
    record = await client.record(found["episode"])
    assert (record["reward"], record["feedback"][0]["call"]) == (0.5, first["call"])


@pytest.mark.parametrize("path", ["/e/mine", ""])
async def test_a_user_who_comes_back_opens_another_part(client: Client, path: str) -> None:
    user = User(client, path)
    await user.says("one")
    await seals(client)
    (first,) = await leased(client)
    await user.says("two")
    await seals(client)
    found = await leased(client)
    (second,) = found
    if path:
        assert (first["episode"], second["episode"]) == ("mine", "mine~2")
    record = await client.record(second["episode"])
    assert record["first"] == first["episode"]
    await user.says("three", **{"X-AJet-Traffic": "0"})
    states = [await client.record(one) for one in (first["episode"], second["episode"])]
    assert [(one["state"], one["reason"]) for one in states] == [("discarded", "withdrawn")] * 2
    assert await judged(client, first["episode"]) == 409


async def test_an_app_that_numbers_its_chats_has_each_by_itself(client: Client) -> None:
    """Whatever the daemon calls the parts of one, no other chat can be called so."""
    first, second = User(client, "/e/chat"), User(client, "/e/chat.2")
    for user in (first, first, second):
        await user.says("one")
        await seals(client)
    await second.says("two", **{"X-AJet-Traffic": "0"})
    found = {one["episode"]: one for one in (await client.control("GET", "/episodes")).json["episodes"]}
    assert {name: one.get("first") for name, one in found.items()} == {
        "chat": None, "chat~2": "chat", "chat.2": None, "chat.2~2": "chat.2",
    }  # fmt: skip
    assert sorted(name for name, one in found.items() if one.get("withdrawn")) == ["chat.2", "chat.2~2"]
    assert (await client.chat("chat~2")).status == 400
    body = {"episode": "chat~2", "value": 1}
    assert (await client.control("POST", "/feedback", body)).status == 200


def looking(patch: pytest.MonkeyPatch, lasts_s: float = 0.0) -> list[Any]:
    """Has each look at what awaits a judgement take so long, and as good as none be made for its time alone. Returns
    what is asked in each."""
    patch.setattr(judgements, "LOOK_S", 300.0)
    looks, plain = list[Any](), JudgingCommands.waiting

    def waiting(self: JudgingCommands, *asked: Any) -> Any:
        looks.append(asked)
        time.sleep(lasts_s)
        return plain(self, *asked)

    patch.setattr(JudgingCommands, "waiting", waiting)
    return looks


async def test_an_idle_judge_looks_again_only_when_there_may_be_something(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = looking(monkeypatch)
    judge = asyncio.create_task(leased(client, wait_s=300))
    await eventually(lambda: looks)
    for number in range(5):
        await client.play(await client.open({"task": f"{number}"}))
    await User(client).says("one")
    assert len(looks) == 1
    await seals(client)
    assert (len(await judge), len(looks)) == (1, 2)


async def test_idle_judges_hold_up_no_user_however_much_awaits_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together look in vain for a twentieth of the time."""
    looks = looking(monkeypatch, lasts_s=0.05)
    judges = [asyncio.create_task(leased(client, wait_s=300, lane="other")) for _ in range(8)]
    await eventually(lambda: len(looks) == 8)
    began = time.monotonic()
    for number in range(10):
        await User(client, f"/e/chat{number}").says("one")
        await seals(client)
    assert len(looks) <= 8 + 2 + (time.monotonic() - began) / (20 * 0.05)
    for judge in judges:
        judge.cancel()
    await asyncio.gather(*judges, return_exceptions=True)


async def test_a_silent_engine_gives_no_text_and_nothing_is_leased(client: Client, stub: EngineStub) -> None:
    await User(client).says("one")
    await seals(client)
    stub.tokenizes = False
    assert await leased(client, wait_s=0) == []
    assert (await client.status())["traffic"]["leased"] == 0
    stub.tokenizes = True
    assert len(await leased(client)) == 1


async def test_for_a_silent_engine_no_more_than_one_text_is_put_together(
    client: Client, stub: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much waits: each look would cost as much again."""
    told, plain = list[str](), judgements.answers
    monkeypatch.setattr(judgements, "answers", lambda one, policy: told.append(one.id) or plain(one, policy))
    for number in range(3):
        await User(client, f"/e/chat{number}").says("one")
    await seals(client)
    stub.tokenizes = False
    assert await leased(client, wait_s=0) == [] and len(told) == 1


async def test_groups_that_were_opened_to_be_judged(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.judging.GATHERS_S", 0.0)
    names = [
        await client.open({"task": "t", "judged": True}) for _ in range(2)
    ]
    for name in names:
        await client.chat(name)
        await client.control("POST", f"/episodes/{name}/seal")
    found = await leased(client, unit="groups")
    assert ({one["episode"] for one in found}, {one["group"] for one in found}) == ({*names}, {found[0]["episode"]})


@pytest.mark.parametrize("body", [
    {"rewards": [{"value": 2}]}, {"rewards": [{"value": 1}, {"value": 1}]}, {"rewards": [1]},
    {"rewards": [{"value": 1, "call": "c", "agent": "a"}]}, {"rewards": [{"value": 1}] * 1001},
])  # fmt: skip
async def test_what_is_no_judgement_is_refused(client: Client, body: Any) -> None:
    assert await judged(client, "any", **body) == 400


async def test_feedback_of_nothing_or_on_nothing_is_refused(client: Client) -> None:
    for body, status in (
        ({"value": 1}, 400), ({"episode": "a"}, 400), ({"episode": "a", "value": 1}, 404),
        ({"response": "r", "value": 1}, 404), ({"call": "c", "value": 1}, 404), ({"episode": "a", "value": 2}, 400),
    ):  # fmt: skip
        assert (await client.control("POST", "/feedback", body)).status == status


# ---- consent

ADMIN = "a-secret-of-the-operator"
NO_LANE, LANE, ALWAYS = Claims("agent", "app"), Claims("agent", "app", lanes=("chat",)), Claims(
    "agent", "app", lanes=("chat",), always=True
)


@pytest.mark.parametrize("header", [None, "1", "0"])
@pytest.mark.parametrize(("claims", "learns"), [(NO_LANE, ()), (LANE, ("1",)), (ALWAYS, (None, "1"))])
async def test_who_consents(
    tmp_path: Path, stub: EngineStub, claims: Claims, learns: tuple[str | None, ...], header: str | None
) -> None:
    """Of nine ways to ask, three may be learned from."""
    settings = {**SERVED, "traffic": "", "admin_secret": ADMIN, "upstream": (stub.url,)}
    settings |= {"idle_timeout": 0.2, "traffic_idle": 0.2}
    async with serving(tmp_path, **settings) as client:
        key = keyring.keys(tmp_path, admin_secret=ADMIN).issue(claims)
        user = User(client, key=key)
        await user.says("one", **({} if header is None else {"X-AJet-Traffic": header}))
        judge = keyring.keys(tmp_path, admin_secret=ADMIN).issue(Claims("judge", lanes=("chat",)))
        await client.until(lambda status: not status["episodes"]["open"], key=ADMIN)
        found = (await client.control("POST", LEASE, {}, key=judge)).json
        assert (header in learns) == bool(found)
        if found is None:
            assert (await client.status(key=ADMIN))["episodes"]["discarded"]
            return
        keyring.revoke(tmp_path, "tenant", "app", client.now)
        (episode,) = found["judgements"]
        await client.until(lambda status: not status["episodes"]["sealed"], key=ADMIN)
        body = {"judge": "j", "rewards": [{"value": 1}]}
        answer = await client.control("POST", f"/episodes/{episode['episode']}/judgement", body, key=judge)
        assert (answer.status, answer.json["error"]["code"]) == (409, "episode_discarded")


@pytest.mark.parametrize("header", [None, "1", "0"])
@pytest.mark.parametrize("path", ["/e/mine", ""])
async def test_no_user_of_an_app_sees_that_a_chat_is_over(
    tmp_path: Path, stub: EngineStub, path: str, header: str | None
) -> None:
    """Nor one who consents to nothing."""
    settings = {**SERVED, "traffic": "", "admin_secret": ADMIN, "upstream": (stub.url,), "idle_timeout": 0.2}
    async with serving(tmp_path, **settings) as client:
        user = User(client, path, keyring.keys(tmp_path, admin_secret=ADMIN).issue(LANE))
        for says in ("one", "two"):
            await user.says(says, **({} if header is None else {"X-AJet-Traffic": header}))
            await seals(client, key=ADMIN)


@pytest.mark.parametrize("path", ["/e/mine", ""])
@pytest.mark.parametrize(("later", "awaits"), [(LANE, True), (NO_LANE, False)])
async def test_later_parts_of_a_chat_are_as_the_first_while_the_key_allows_it(
    tmp_path: Path, stub: EngineStub, path: str, later: Claims, awaits: bool
) -> None:
    """Only its first call says so. No user of a path sees an error, and its calls stay together."""
    settings = {**SERVED, "traffic": "", "admin_secret": ADMIN, "upstream": (stub.url,)}
    async with serving(tmp_path, **settings) as client:
        keys = keyring.keys(tmp_path, admin_secret=ADMIN)
        user = User(client, path, keys.issue(LANE))
        await user.says("one", **{"X-AJet-Traffic": "1"})
        await seals(client, key=ADMIN)
        user.key = keys.issue(later)
        await user.says("two")
        await user.says("three")
        (part,) = (await client.control("GET", "/episodes?state=open", key=ADMIN)).json["episodes"]
        record = await client.record(part["episode"], key=ADMIN)
        assert (len(record["calls"]), bool(record.get("first"))) == (2, awaits or bool(path))
        await seals(client, key=ADMIN)
        traffic = (await client.control("GET", "/status", key=ADMIN)).json["traffic"]
        assert traffic["awaiting"] == 1 + awaits


async def test_a_chat_that_is_sealed_while_its_user_waits_goes_on_as_a_part_of_it(client: Client) -> None:
    """A withdrawn chat stays so: nobody learns from what comes after the wait."""
    user = User(client)
    await user.says("one", **{"X-AJet-Traffic": "0"})
    await client.control("POST", "/gate/close", {"wait_s": 0})
    asks = asyncio.create_task(user.says("two"))
    await eventually(lambda: client.gate.waiting)
    await seals(client)
    await client.control("POST", "/gate/open", {"policy_version": 1})
    await asks
    (part,) = (await client.control("GET", "/episodes?state=open")).json["episodes"]
    record = await client.record(part["episode"])
    assert record.get("first") and record.get("withdrawn")


async def test_an_engine_that_lacks_one_text_keeps_nobody_elses_from_a_judge(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the newest, which is looked at first."""
    plain, odd = Judgements._text, "odd"

    async def text(self: Judgements, session: Any, model: str, ids: bytes) -> str | None:
        found = await plain(self, session, model, ids)
        return None if found is not None and odd in found else found

    for name in ("old", odd):
        await User(client, f"/e/{name}").says(name)
        await seals(client)
    monkeypatch.setattr(Judgements, "_text", text)
    assert [one["episode"] for one in await leased(client)] == ["old"]


async def test_what_is_withdrawn_while_its_text_is_asked_for_reaches_no_judge(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, plain = User(client, "/e/mine"), Judgements._text

    async def text(self: Judgements, session: Any, model: str, ids: bytes) -> str | None:
        monkeypatch.setattr(Judgements, "_text", plain)
        await user.says("two", **{"X-AJet-Traffic": "0"})
        return await plain(self, session, model, ids)

    await user.says("one")
    await seals(client)
    monkeypatch.setattr(Judgements, "_text", text)
    assert await leased(client, wait_s=0) == []


async def test_a_judge_reaches_its_lanes_and_nothing_else(tmp_path: Path, stub: EngineStub) -> None:
    settings = {**SERVED, "traffic": "", "admin_secret": ADMIN, "upstream": (stub.url,)}
    async with serving(tmp_path, **settings) as client:
        keys = keyring.keys(tmp_path, admin_secret=ADMIN)
        await User(client, key=keys.issue(ALWAYS)).says("one")
        await seals(client, key=ADMIN)
        other, judge = (keys.issue(Claims("judge", lanes=(lane,))) for lane in ("other", "chat"))
        assert (await client.control("POST", LEASE, {"lane": "chat"}, key=other)).status == 403
        found = await client.control("POST", LEASE, {"lane": "chat", "wait_s": 300}, key=judge)
        episode = found.json["judgements"][0]["episode"]
        assert (await client.control("POST", LEASE, {}, key=other)).status == 204
        body = {"judge": "j", "rewards": [{"value": 1}]}
        for key, status in ((other, 403), (keys.issue(ALWAYS), 403), (judge, 200)):
            answer = await client.control("POST", f"/episodes/{episode}/judgement", body, key=key)
            assert answer.status == status
        for method, path in (("GET", f"/episodes/{episode}"), ("POST", "/feedback"), ("POST", "/batches/lease")):
            assert (await client.control(method, path, {}, key=judge)).status == 403
