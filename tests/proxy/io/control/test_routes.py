"""The control routes over HTTP: who may, what is refused, and what waits."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp import web

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import leases as leasing
from ajet_proxy.core.ledger.lease_commands import LeaseCommands
from ajet_proxy.io.http import keyring
from ajet_proxy.io.storage.store import Store
from ajet_sdk.frame import decode_batch
from ajet_sdk.routes import ROUTES, Route
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Answer, Client, eventually, identity_holds, serving

SERVED = {"group_size": 1}
SECRET = "a secret of the operator"
BODIES: dict[str, Any] = {
    "open_episode": {"task": "t"}, "reward": {"value": 1.0}, "lease": {}, "ack": {"policy_version": 1},
    "set_mix": {"lane_wait_s": 1},
    "gate_close": {"wait_s": 1}, "gate_open": {"policy_version": 1}, "policy": {"model": "stub", "version": 1},
    "play": {"name": "d", "episodes": 1},
    "join": {"name": "host"},
    "supervise": {"name": "s", "instance": "i"},
}
REVOKED = "a tenant that left"
KINDS = (
    "none", "foreign", "forged", "expired", "revoked", "agent of the episode", "agent of another episode",
    "agent of the tenant", "agent of another tenant", "trainer", "operator", "judge", "admin", "the admin secret",
)


@pytest.fixture
async def locked(tmp_path: Path, stub: EngineStub) -> AsyncIterator[Client]:
    async with serving(tmp_path / "locked", upstream=(stub.url,), admin_secret=SECRET) as running:
        yield running


def key_of(client: Client, kind: str, episode: str) -> str | None:
    """A key of the given kind; `episode` belongs to tenant "a"."""
    good = client.key(Claims("agent", "a", episode))
    return {
        "none": None,
        "foreign": "sk-1234",
        "forged": good[:-1] + ("A" if good[-1] != "A" else "B"),
        "expired": client.key(Claims("admin", expires=time.time() - 1)),
        "revoked": client.key(Claims("admin", REVOKED)),
        "agent of the episode": good,
        "agent of another episode": client.key(Claims("agent", "a", "another")),
        "agent of the tenant": client.key(Claims("agent", "a")),
        "agent of another tenant": client.key(Claims("agent", "b")),
        "trainer": client.key(Claims("trainer")),
        "operator": client.key(Claims("operator")),
        "judge": client.key(Claims("judge", lanes=("default",))),
        "admin": client.key(Claims("admin")),
        "the admin secret": SECRET,
    }[kind]


def expected(route: Route, kind: str, *, open_mode: bool) -> int | None:
    """The refusal that `kind` meets at `route`, or None where it may pass."""
    if kind in ("forged", "expired", "revoked") or (kind in ("none", "foreign") and not open_mode):
        return 401
    if kind == "operator":
        return None if route.scope == "operator" else 403
    if kind == "judge":
        return None if route.scope in ("judge", "any") else 403
    if route.scope == "any" or kind in ("none", "foreign", "admin", "the admin secret"):
        return None
    if kind == "trainer":
        return None if route.scope == "trainer" else 403
    if route.scope != "agent":
        return 403
    if route.name in ("wanted", "open_episode", "join", "clients", "beat", "leave", "play", "get_play", "end_play"):
        return None if kind in ("agent of the tenant", "agent of another tenant") else 403
    own = route.name in ("reward_answer", "feedback")  # whoever asks finds answers of its own episodes alone
    return None if own or kind in ("agent of the episode", "agent of the tenant") else 403


@pytest.mark.parametrize("mode", ["open", "locked"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_every_route_with_every_key(route: Route, mode: str, tmp_path: Path) -> None:
    keyring.revoke(tmp_path, "tenant", REVOKED, time.time())
    async with serving(tmp_path, admin_secret=SECRET if mode == "locked" else None) as client:
        for kind in KINDS:
            await try_key(client, route, kind, expected(route, kind, open_mode=mode == "open"))
        status = await client.control("GET", "/status", key=client.key(Claims("admin")))
        assert identity_holds(status.json)


async def try_key(client: Client, route: Route, kind: str, wanted: int | None) -> None:
    opened = await client.control("POST", "/episodes", {"task": "t"}, key=client.key(Claims("agent", "a")))
    episode = opened.json["episode"]
    path = route.path.replace("{id}", episode if route.path.startswith("/episodes") else "no-such-batch")
    key = key_of(client, kind, episode)
    if route.name == "events" and wanted is None:
        sent = {} if key is None else {"x-api-key": key}
        async with client.session.get(f"{client.app.url}/ajet/v1/events", headers=sent) as stream:
            assert stream.status == 200, kind
        return
    answer = await client.control(route.method, path, BODIES.get(route.name), key=key)
    if wanted is None:
        assert answer.status not in (401, 403, 500), (kind, answer.json)
    else:
        assert answer.status == wanted, (kind, answer.json)
        assert set(answer.json["error"]) == {"message", "type", "code", "param"}
        assert key is None or key not in answer.body.decode()


async def test_what_an_intercepted_program_needs_to_know(tmp_path: Path, client: Client) -> None:
    assert "intercept" not in await client.status()
    missing = await client.control("GET", "/ca.pem")
    assert (missing.status, missing.json["error"]["code"]) == (404, "no_interception")
    async with serving(tmp_path / "locked", intercept=("127.0.0.1:0",), admin_secret=SECRET) as locked:
        assert (await locked.control("GET", "/ca.pem")).status == 401
        agent = locked.key(Claims("agent", "a", "ep"))
        given = await locked.control("GET", "/ca.pem", key=agent)
        assert given.headers["Content-Type"] == "application/x-pem-file"
        assert given.body == (tmp_path / "locked/ca/mitmproxy-ca-cert.pem").read_bytes()
        shown = (await locked.control("GET", "/status", key=agent)).json["intercept"]
        assert shown["hosts"] == ["api.anthropic.com", "api.openai.com"]
        assert shown["url"] == f"http://127.0.0.1:{shown['modes'][0]['port']}"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'{"value": 1e999}', "finite"),
        (b'{"value": 1, "agent": "\\ud800"}', "surrogates"),
        (b'{"value": ' + b"9" * 5000 + b"}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"", "missing field 'value'"),
    ],
)
async def test_malformed_bodies_are_400_and_change_nothing(client: Client, raw: bytes, words: str) -> None:
    await client.control("POST", "/episodes", {"task": "t"})
    before = await client.status()
    episode = (await client.control("GET", "/episodes")).json["episodes"][0]["episode"]
    answer = await client.control("POST", f"/episodes/{episode}/rewards", raw)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]
    assert (await client.status())["episodes"] == before["episodes"]


@pytest.mark.parametrize(("settings", "size"), [({"max_body": 1000}, 2000), ({}, 64 << 10)])
async def test_a_body_over_the_limit_is_413(settings: dict[str, Any], size: int, tmp_path: Path) -> None:
    """The limit of a prompt is not that of a control request."""
    async with serving(tmp_path, **settings) as client:
        body = gzip.compress(json.dumps({"metadata": {"x": "t" * size}}).encode())
        packed = {"Content_Encoding": "gzip"}
        answer = await client.control("POST", "/episodes", body, **packed)
        assert answer.status == 413
        assert answer.json["error"]["code"] == "body_too_large"
        reasons = {str(number): "t" * 1000 for number in range(size // 1000)}
        filtered = json.dumps({"policy_version": 1, "filtered": reasons}).encode()
        acknowledged = await client.control("POST", "/batches/none/ack", filtered)
        assert acknowledged.status == (413 if settings else 404)
        large = await client.control("POST", "/batches/none/ack", gzip.compress(b" " * (1 << 20) + b"{}"), **packed)
        assert large.status == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/ajet/v1/nothing", 404), ("GET", "/ajet/v2/status", 404), ("GET", "/ajet/v2", 404),
        ("GET", "/ajet/v1/episodes/a/b/c", 404), ("POST", "/ajet/v1/batches//x/ack", 404),
        ("PUT", "/ajet/v1/episodes", 405),
        ("DELETE", "/ajet/v1/episodes", 405), ("GET", "/ajet/v1/batches/lease", 405), ("POST", "/ajet/v1/status", 405),
        ("GET", "/ajet/v1/episodes/unknown", 404), ("POST", "/ajet/v1/batches/unknown/nack", 404),
    ],
)
async def test_what_is_not_there(client: Client, method: str, path: str, status: int) -> None:
    answer = await client.ask(method, path)
    assert answer.status == status
    assert answer.json["error"]["message"]
    assert ("Allow" in answer.headers) == (status == 405)


async def test_a_lease_waits_until_a_group_is_ready(client: Client) -> None:
    began = time.monotonic()
    nothing = await client.control("POST", "/batches/lease", {"group_size": 2, "wait_s": 0.1})
    assert (nothing.status, nothing.body) == (204, b"")
    assert time.monotonic() - began >= 0.1
    waiting = asyncio.create_task(client.control("POST", "/batches/lease", {"group_size": 2, "wait_s": 300}))
    await client.play("one", X_AJet_Task="task")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.play("two", X_AJet_Task="task")
    batch = decode_batch((await waiting).body)
    assert sorted(e.episode for group in batch.groups for e in group.episodes) == ["one", "two"]


async def test_a_lease_that_waits_looks_again_only_when_it_may_find_more(client: Client) -> None:
    with mock.patch.object(LeaseCommands, "lease", autospec=True, side_effect=LeaseCommands.lease) as looks:
        asked = {"group_size": 2, "wait_s": 300, "max_staleness": 4}
        waiting = asyncio.create_task(client.control("POST", "/batches/lease", asked))
        for turn in range(10):
            assert (await client.chat("one", f"turn {turn}", X_AJet_Task="task")).status == 200
        assert looks.call_count == 1
        await client.play("one", X_AJet_Task="task")
        await client.play("two", X_AJet_Task="task")
        assert len(decode_batch((await waiting).body).groups) == 1
        assert looks.call_count <= 5


async def test_a_lease_that_does_not_wait_looks_behind_all_that_it_drops(client: Client) -> None:
    with mock.patch.object(leasing, "AT_ONCE", 1):
        for episode in ("one", "two"):
            assert (await client.chat(episode, X_AJet_Task="task")).status == 200
            reward = {"value": 1.0, "agent": "nobody"}
            assert (await client.control("POST", f"/episodes/{episode}/rewards", reward)).status == 200
        await client.play("three", X_AJet_Task="task")
        leased = await client.control("POST", "/batches/lease", {"group_size": 1, "wait_s": 0})
        assert [e.episode for group in decode_batch(leased.body).groups for e in group.episodes] == ["three"]
        assert (await client.status())["discarded"] == {"no_reward": 2}


async def test_a_trainer_that_leaves_while_it_waits_takes_nothing(client: Client) -> None:
    came, left = asyncio.Event(), asyncio.Event()
    leasable = Store.leasable

    async def seen(*of: Any) -> None:
        came.set()
        try:
            await leasable(*of)
        finally:
            left.set()

    with mock.patch.object(Store, "leasable", seen):
        waiting = asyncio.create_task(client.control("POST", "/batches/lease", {"group_size": 1, "wait_s": 300}))
        await came.wait()
        waiting.cancel()
        await left.wait()
    await client.play("one", X_AJet_Task="task")
    assert (await client.status())["episodes"]["ready"] == 1


@pytest.mark.parametrize(("wire", "status"), [("1", 200), ("2, 1", 200), ("2", 400), ("0", 400), ("x", 400), ("", 400)])
async def test_a_trainer_of_another_wire_version_is_told_so(client: Client, wire: str, status: int) -> None:
    await client.play("one", X_AJet_Task="task")
    answer = await client.control("POST", "/batches/lease", {"group_size": 1}, X_AJet_Wire=wire)
    assert answer.status == status
    if status == 400:
        assert answer.json["error"]["code"] == "wire_version"
        assert "wire version 1" in answer.json["error"]["message"]
        assert (await client.status())["episodes"]["ready"] == 1


async def test_the_gate_of_one_model_holds_nobody_else(tmp_path: Path) -> None:
    async with (
        EngineStub(models=("one",)) as one, EngineStub(models=("two",)) as two,
        serving(tmp_path, upstream=(f"one={one.url}", f"two={two.url}")) as client,
    ):
        for model in ("one", "two"):
            await client.control("POST", "/policy", {"model": model, "version": 1})
        several = await client.control("POST", "/gate/close", {})
        assert (several.status, several.json["error"]["code"]) == (409, "several_models")
        two.paused.clear()
        inside = asyncio.create_task(chat(client, "inside", "two"))
        await eventually(two.llm_requests)
        closed = await client.control("POST", "/gate/close", {"model": "one", "wait_s": 0})
        assert closed.json == {"gate": "closed", "in_flight": 0}
        held = asyncio.create_task(chat(client, "held", "one"))
        await client.until(lambda status: status["models"]["one"]["waiting"])
        status = await client.status()
        assert [(one["gate"], one["in_flight"], one["waiting"]) for one in status["models"].values()] == [
            ("closed", 0, 1), ("open", 1, 0)
        ]
        assert status["models"]["two"]["busy_s"] > 0 == status["models"]["one"]["busy_s"]
        two.paused.set()
        assert (await inside).status == 200
        assert (await chat(client, "another", "two")).status == 200
        opened = await client.control("POST", "/gate/open", {"policy_version": 2, "model": "one"})
        assert opened.json["gate"] == "open"
        assert (await held).status == 200
        versions = {name: one["policy_version"] for name, one in (await client.status())["models"].items()}
        assert versions == {"one": 2, "two": 1}


async def chat(client: Client, episode: str, model: str) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    return await client.ask("POST", f"/e/{episode}/v1/chat/completions", body)


async def test_a_lease_waits_until_the_slowest_of_its_team_has_made_its_update(
    client: Client, stub: EngineStub
) -> None:
    """And the status tells who waits for whom."""
    stub.models = ("one", "stub")
    for model in stub.models:
        await client.control("POST", "/policy", {"model": model, "version": 1})
    members = {"plans": "one", "codes": "stub"}
    episode = await client.open({"members": members})
    assert [(await chat(client, episode, model)).status for model in stub.models] == [200, 200]
    await client.control("POST", f"/episodes/{episode}/rewards", {"value": 1.0})
    await client.control("POST", "/gate/open", {"model": "stub", "policy_version": 2})
    asks = {"model": "stub", "group_size": 1, "max_lead": 0}
    assert (await client.control("POST", "/batches/lease", asks)).status == 204
    assert (await client.status())["teams"] == [{"one": {"updates": 0}, "stub": {"updates": 1, "waits_for": "one"}}]
    waiting = asyncio.create_task(client.control("POST", "/batches/lease", asks | {"wait_s": 300}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await client.control("POST", "/gate/open", {"model": "one", "policy_version": 2})
    assert [one.episode for group in decode_batch((await waiting).body).groups for one in group.episodes] == [episode]
    assert (await client.status())["teams"] == [{"one": {"updates": 1}, "stub": {"updates": 1}}]


async def test_the_status_names_the_engines_of_any_model(tmp_path: Path, stub: EngineStub) -> None:
    async with serving(tmp_path, upstream=(stub.url,)) as client:
        await client.control("POST", "/gate/open", {"policy_version": 4})
        status = await client.status()
        assert status["models"] == {}
        nobody = {"in_flight": 0, "waiting": 0, "busy_s": 0.0}
        assert status["any_model"] == {"policy_version": 4, "gate": "open", "upstreams": [stub.url]} | nobody
    async with serving(tmp_path, upstream=(f"stub={stub.url}",)) as client:
        assert "any_model" not in await client.status()


async def test_events_are_streamed_without_token_ids(client: Client) -> None:
    async with client.session.get(client.app.url + "/ajet/v1/events") as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        await stream.content.readuntil(b"\n\n")
        await client.chat("one")
        seen = {}
        while "CallFinished" not in seen:
            name, data = (await stream.content.readuntil(b"\n\n")).decode().strip().split("\n")
            seen[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    assert seen["EpisodeOpened"]["episode"] == "one"
    assert seen["CallFinished"]["call"]["sampled_tokens"] > 0
    assert 'token_ids": [' not in json.dumps(seen)


async def test_metrics_need_no_key_on_loopback(locked: Client) -> None:
    answer = await locked.ask("GET", "/metrics")
    assert answer.status == 200
    text = answer.body.decode()
    assert 'ajet_episodes{state="open"} 0' in text
    assert "ajet_gate_open 1" in text
    assert "ajet_journal_healthy 1" in text


async def test_metrics_of_another_machine_need_a_key(locked: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.BaseRequest, "remote", "192.0.2.1")
    assert (await locked.ask("GET", "/metrics")).status == 401
    assert (await locked.ask("GET", "/metrics", key=SECRET)).status == 200


async def test_alerts_of_the_daemon_stand_beside_those_of_the_ledger(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "alerts", lambda store: {"compaction": "compaction failed"})
    assert (await client.status())["alerts"] == ["compaction failed"]
    assert "ajet_alerts 1" in (await client.ask("GET", "/metrics")).body.decode().splitlines()


async def test_alerts_are_for_operators_and_trainers(locked: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may name another tenant's users."""
    monkeypatch.setattr(Store, "alerts", lambda store: {"names": "'ada' stands for several conversations"})
    for claims in (Claims("agent", "a"), Claims("judge", lanes=("x",)), Claims("trainer"), Claims("admin")):
        seen = (await locked.control("GET", "/status", key=locked.key(claims))).json["alerts"]
        assert len(seen) == (claims.scope in ("trainer", "admin"))


async def test_metrics_behind_a_trusted_front_need_a_key(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_secret=SECRET, trusted_front=True) as client:
        assert (await client.ask("GET", "/metrics")).status == 401
        assert (await client.ask("GET", "/metrics", key=client.key(Claims("trainer")))).status == 403
        assert (await client.ask("GET", "/metrics", key=SECRET)).status == 200


async def test_the_base_url_is_the_one_the_agent_asked_at_or_the_configured_one(tmp_path: Path) -> None:
    async with serving(tmp_path / "a", admin_secret=SECRET) as client:
        opened = await client.control("POST", "/episodes", {}, key=SECRET, Host="proxy.example:80")
        assert opened.json["env"]["AJET_PROXY_URL"] == "http://proxy.example:80"
    async with serving(tmp_path / "b", public_url="https://x.example/") as client:
        opened = await client.control("POST", "/episodes", {})
        assert opened.json["env"]["AJET_PROXY_URL"] == "https://x.example"
    async with serving(tmp_path / "c", trusted_front=True) as client:
        opened = await client.control(
            "POST", "/episodes", {}, X_Forwarded_Proto="https", X_Forwarded_Host="front.example"
        )
        assert opened.json["env"]["AJET_PROXY_URL"] == "https://front.example"
