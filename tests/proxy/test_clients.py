"""Clients of a running daemon: who is silent is gone, over restarts, and from any worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.io.runtime.clock import Clock
from tests.kit.answering import address
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import eventually, identity_holds, serving

TTL_S = 600.0


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clocks of the daemon so many seconds on."""
    passed, now, loop = [0.0], Clock.now, asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(Clock, "now", lambda clock: now(clock) + sum(passed))
    monkeypatch.setattr(loop, "time", lambda: time() + sum(passed))
    return passed.append


async def test_one_that_is_silent_is_gone_and_only_what_it_has_open_with_it(
    tmp_path: Path, stub: EngineStub, pass_time: Callable[[float], None]
) -> None:
    async with serving(tmp_path, upstream=(stub.url,)) as client:
        joined = (await client.control("POST", "/clients", {"name": "one", "ttl_s": TTL_S, "lane": "math"})).json
        body = {"client": joined["client"], "revision": "r7", "task": "t"}
        await client.play(done := await client.open(body))
        playing = await client.open(body)
        alone = await client.open({})

        async def gone() -> bool:
            return bool((await client.record(playing))["state"] == "discarded")

        for _ in range(3):
            assert (await client.control("POST", f"/clients/{joined['client']}/beat")).json["state"] == "joined"
        began = (await client.control("GET", "/clients")).json["clients"][0]["heard_at"]
        pass_time(TTL_S + 1.0)
        await eventually(gone)
        lost = await client.record(playing)
        assert lost["reason"] == "client_gone" and lost["ended_at"] - began >= TTL_S
        assert (lost["client"], lost["revision"], lost["lane"]) == (joined["client"], "r7", "math")
        assert [(await client.record(one))["state"] for one in (done, alone)] == ["ready", "open"]
        (shown,) = (await client.control("GET", "/clients")).json["clients"]
        assert (shown["state"], shown["reason"], shown["episodes"]["ready"]) == ("gone", "silent", 1)
        for method, path, sent in (("POST", f"/clients/{joined['client']}/beat", {}), ("POST", "/episodes", body)):
            refused = await client.control(method, path, sent)
            assert (refused.status, refused.json["error"]["code"]) == (409, "client_gone")
        assert identity_holds(await client.status())


async def test_a_daemon_that_stood_still_reads_first_what_came_meanwhile(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    """Whoever was heard of is not taken for silent."""
    async with serving(tmp_path) as client:
        name = (await client.control("POST", "/clients", {"name": "one", "ttl_s": TTL_S})).json["client"]
        beat = f"POST /ajet/v1/clients/{name}/beat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}"
        with socket.create_connection(address(client.app.url)) as late:
            late.sendall(beat.encode())
            pass_time(TTL_S + 1.0)
            late.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(late, 1000)
        assert answer.startswith(b"HTTP/1.1 200")
        (shown,) = (await client.control("GET", "/clients")).json["clients"]
        assert shown["state"] == "joined"


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_header_says_who_plays_what_opens_on_first_sight(
    tmp_path: Path, stub: EngineStub, workers: int
) -> None:
    async with serving(tmp_path, upstream=(stub.url,), workers=workers) as client:
        joined = await client.control("POST", "/clients", {"name": "one", "revision": "r1", "ttl_s": 600})
        name = joined.json["client"]
        assert (await client.chat("seen", X_AJet_Client=name)).status == 200
        rewarded = {"X_AJet_Reward": "1.0", "X_AJet_Client": name}
        assert (await client.ask("GET", "/e/rewarded/v1/models", **rewarded)).status == 200
        for episode in ("seen", "rewarded"):
            told = await client.record(episode)
            assert (told["client"], told["revision"]) == (name, "r1")
        assert "x-ajet-client" not in {header.lower() for one in stub.requests for header in one.headers}
        for header, status, code in (("nobody", 404, "unknown_client"), ("", 200, None)):
            answer = await client.chat(f"new{code}", X_AJet_Client=header)
            assert answer.status == status
            assert code is None or answer.json["error"]["code"] == code
        assert (await client.chat("seen", X_AJet_Client="nobody")).status == 200
        await client.control("DELETE", f"/clients/{name}")
        refused = await client.chat("another", X_AJet_Client=name)
        assert (refused.status, refused.json["error"]["code"]) == (409, "client_gone")


async def test_what_is_audited_of_clients(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_secret="a secret of the operator") as client:
        key = client.key(Claims("agent", "acme"))
        name = (await client.control("POST", "/clients", {"name": "one"}, key=key)).json["client"]
        for _ in range(5):
            await client.control("POST", f"/clients/{name}/beat", key=key)
        await client.control("DELETE", f"/clients/{name}", key=key)
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [line.partition('"route":')[2].partition(',"status"')[0] for line in lines] == [
        f'"{route}","client":"{name}"' for route in ("join", "beat", "leave")
    ]
