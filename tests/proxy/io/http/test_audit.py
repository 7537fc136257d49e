"""The audit log: a line for whoever acts, rewards or reads tokens, and never what they sent."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.identity.keys import Claims, key_id
from ajet_proxy.io.http.audit import AuditLog
from ajet_sdk.routes import PREFIX
from tests.proxy.serving import CHAT, Client

SECRET = "a secret of the operator"
SERVED = {"group_size": 1, "admin_secret": SECRET}


def lines(data_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_dir / "audit.jsonl").read_text().splitlines()]


async def test_who_acts_and_who_reads_is_written_down(client: Client, tmp_path: Path) -> None:
    team, trainer = client.key(Claims("agent", "team")), client.key(Claims("trainer"))
    opened = (await client.control("POST", "/episodes", {"task": "secret task"}, key=team)).json
    episode, key = opened["episode"], opened["api_key"]
    await client.chat(episode, key=key)
    for tokens in ("", "?tokens=1"):
        assert (await client.control("GET", f"/episodes/{episode}{tokens}", key=key)).status == 200
    await client.control("GET", "/status", key=team)
    await client.control("POST", f"/episodes/{episode}/rewards", {"value": 0.125, "note": "secret note"}, key=key)
    await client.control("POST", "/batches/lease", {}, key=trainer)
    found = [[line[name] for name in ("key", "scope", "tenant", "route", "status")] for line in lines(tmp_path)]
    agent = [key_id(key), "agent", "team"]
    assert found == [
        [key_id(team), "agent", "team", "open_episode", 200], [*agent, "get_episode", 200],
        [*agent, "get_episode", 200], [*agent, "reward", 200], [key_id(trainer), "trainer", "", "lease", 200],
    ]  # fmt: skip
    assert [line["episode"] for line in lines(tmp_path)[:4]] == [episode] * 4
    assert lines(tmp_path)[4]["batch"]
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(word in text for word in (team, trainer, key, SECRET, "secret note", "secret task", "0.125"))
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


async def test_refusals_have_a_line_and_paths_are_not_repeated(client: Client, tmp_path: Path) -> None:
    other = client.key(Claims("agent", "b"))
    await client.control("POST", "/gate/close", {}, key=other)
    await client.control("POST", f"/episodes/{other}/seal", {}, key=SECRET)
    await client.control("POST", "/episodes/ep/seal", {}, key="ajet-forged.key")
    await client.control("POST", "/episodes/ep/seal", {})
    found = [(line["key"], line["scope"], line["episode"], line["status"]) for line in lines(tmp_path)]
    assert found == [
        (key_id(other), "agent", None, 403), (key_id(SECRET), "admin", None, 404),
        (key_id("ajet-forged.key"), None, "ep", 401), (None, None, "ep", 401),
    ]  # fmt: skip
    assert other not in (tmp_path / "audit.jsonl").read_text()


async def test_who_reads_many_has_a_line_now_and_then(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, other = client.key(Claims("admin")), client.key(Claims("admin", expires=9e9))
    reads = ("/episodes", "/overview")
    for key in (admin, other, "ajet-forged.one", "ajet-forged.two"):
        for path in (*reads, *reads, "/episodes?state=open"):
            await client.control("GET", path, key=key)
    found = [(line["key"], line["route"], line["status"]) for line in lines(tmp_path)]
    names = ("list_episodes", "overview")
    assert found == [
        *((key_id(key), name, 200) for key in (admin, other) for name in names),
        *((key_id("ajet-forged.one"), name, 401) for name in names),
    ]
    monkeypatch.setattr("ajet_proxy.io.http.audit.LISTED_S", 0.0)
    monkeypatch.setattr("ajet_proxy.io.http.audit.MAX_READERS", 0)
    await client.control("GET", "/overview", key=admin)
    assert len(lines(tmp_path)) == len(found) + 1


async def test_runs_have_lines_and_a_supervisor_one_now_and_then(client: Client, tmp_path: Path) -> None:
    operator, trainer = (client.key(Claims(scope)) for scope in ("operator", "trainer"))
    for _ in range(3):
        await client.control("POST", "/supervisor", {"name": "s", "instance": "i"}, key=trainer)
    await client.control("PATCH", "/runs/math", {"desired": "running"}, key=operator)
    await client.control("GET", "/runs/math", key=operator)
    found = [(line["route"], line["scope"], line.get("run"), line["status"]) for line in lines(tmp_path)]
    assert found == [("supervise", "trainer", None, 200), ("change_run", "operator", "math", 404)]


async def test_who_follows_the_events_has_a_line_at_once(client: Client, tmp_path: Path) -> None:
    url, sent = f"{client.app.url}{PREFIX}/events", {"Authorization": f"Bearer {SECRET}"}
    async with client.session.get(url, headers=sent) as stream:
        await stream.content.readuntil(b"\n\n")
        assert [(line["route"], line["status"]) for line in lines(tmp_path)] == [("events", 200)]
    await client.control("GET", "/events", key=client.key(Claims("agent", "a")))
    assert [(line["route"], line["status"]) for line in lines(tmp_path)] == [("events", 200), ("events", 403)]


async def test_a_reward_that_is_refused_names_its_target(client: Client, tmp_path: Path) -> None:
    mine, other = [(await client.control("POST", "/episodes", {}, key=SECRET)).json for _ in range(2)]
    target, key = mine["episode"], other["api_key"]
    stranger = client.key(Claims("agent", "b"))
    for path, by, headers in (
        (f"/e/{target}/v1/models", key, {}), (f"/e/{target}/v1/models", stranger, {}),
        (f"/e/{target}/v1/models", "ajet-forged.key", {}), ("/v1/models", stranger, {"X_AJet_Episode": target}),
        ("/v1/models", mine["api_key"], {"X_AJet_Reward": "much"}),
        (f"/e/{mine['api_key']}/v1/models", None, {"X_AJet_Reward": "much"}),
    ):
        assert (await client.ask("GET", path, key=by, **({"X_AJet_Reward": "1"} | headers))).status in (400, 401, 403)
    found = [(line["route"], line["episode"], line["status"]) for line in lines(tmp_path)[2:]]
    assert found == [("reward_header", target, status) for status in (403, 403, 401, 403, 400, 400)]


@pytest.mark.parametrize("path", [f"{PREFIX}/episodes", "/v1/chat/completions"])
async def test_of_two_keys_the_line_names_the_one_that_counted(path: str, client: Client, tmp_path: Path) -> None:
    mine, other = client.key(Claims("agent", "a")), client.key(Claims("agent", "b"))
    for second in (other, "junk"):
        sent = [("Authorization", f"Bearer {mine}"), ("Authorization", f"Bearer {second}"), ("X-AJet-Reward", "1"),
                ("X-AJet-Episode", f"ep-{second[:4]}")]  # fmt: skip
        body = CHAT if path.startswith("/v1/") else {}
        async with client.session.post(client.app.url + path, json=body, headers=sent) as answer:
            assert answer.status == 200
    opened = (await client.control("GET", "/episodes", key=SECRET)).json["episodes"]
    assert {episode["tenant"] for episode in opened} == {"a"}
    assert [(line["key"], line["tenant"]) for line in lines(tmp_path)[:2]] == [(key_id(mine), "a")] * 2


async def test_a_reward_that_rides_on_a_request_is_one_too(client: Client, tmp_path: Path) -> None:
    opened = (await client.control("POST", "/episodes", {}, key=SECRET)).json
    episode, key = opened["episode"], opened["api_key"]
    reward = {"X-AJet-Reward": "1"}
    chatted = await client.ask("POST", f"/e/{key}/v1/chat/completions", CHAT, **reward)
    listed = await client.ask("GET", "/v1/models", key=key, **reward)
    assert (chatted.status, listed.status) == (200, 200)
    found = [(line["key"], line["route"], line["episode"], line["status"]) for line in lines(tmp_path)]
    assert found[1:] == [(key_id(key), "reward_header", episode, 200)] * 2


def test_old_lines_go_when_there_are_too_many(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, max_bytes=400)
    for number in range(100):
        log.write({"number": number})
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in (1, 2, 3))]
    assert sum(file.stat().st_size for file in files) <= 400
    kept = [json.loads(line)["number"] for file in (*files[:0:-1], files[0]) for line in file.read_text().splitlines()]
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 15


def test_a_log_that_cannot_be_written_says_so_once_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    blocked = tmp_path / "audit.jsonl"
    log = AuditLog(tmp_path, max_bytes=1 << 20)
    blocked.mkdir()
    log.write({"number": 1})
    log.write({"number": 2})
    assert caplog.text.count("cannot be written") == 1
    blocked.rmdir()
    log.write({"number": 3})
    assert lines(tmp_path) == [{"number": 3}]
    blocked.unlink()
    blocked.mkdir()
    log.write({"number": 4})
    assert caplog.text.count("cannot be written") == 2


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path, max_bytes=1 << 20)
    log.write({"number": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "audit.jsonl").stat().st_size + 5, hard))
    try:
        log.write({"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write({"number": 3})
    assert lines(tmp_path) == [{"number": 1}, {"number": 3}]
    assert caplog.text.count("cannot be written") == 1
