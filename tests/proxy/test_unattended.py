"""A daemon that runs for long: what is over leaves its memory and its journal, and a full disk is no surprise."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_proxy import daemon as app
from ajet_proxy.io.storage import compactor
from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import ProxyProcess
from tests.proxy.serving import CHAT, Client, eventually, identity_holds, serving


async def passes(http: httpx.AsyncClient, proxy: ProxyProcess, episodes: int) -> None:
    """Episodes that come to nothing, each with some 20 KB in the journal."""
    several = asyncio.Semaphore(16)

    async def one() -> None:
        async with several:
            opened = await http.post(f"{proxy.url}/ajet/v1/episodes", json={"metadata": {"note": "x" * 20_000}})
            name = opened.json()["episode"]
            assert (await http.post(f"{proxy.url}/ajet/v1/episodes/{name}/abort", json={})).status_code == 200

    await asyncio.gather(*(one() for _ in range(episodes)))


async def gone(client: Client, episode: str) -> bool:
    return (await client.control("GET", f"/episodes/{episode}")).status == 404


async def test_what_is_too_old_is_removed_however_few_episodes_there_are(
    tmp_path: Path, stub: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory, journal and archive; what has not ended stays, and so do the sums."""
    monkeypatch.setattr(app, "TICK_S", 0.05)
    monkeypatch.setattr(compactor, "RETAIN_S", 0.5)
    for names in (("a", "b"), ("c", "d")):  # with a restart in between
        async with serving(tmp_path, upstream=(stub.url,), archive_max_age=0.5) as client:
            for name in (*names, "open"):
                await client.chat(name)
            for name in names:
                assert (await client.control("POST", f"/episodes/{name}/abort", {})).status == 200
            for name in names:
                await eventually(partial(gone, client, name))
            assert (await client.control("GET", "/episodes/open")).status == 200
            status = await client.status()
            assert identity_holds(status) and status["episodes"]["open"] == 1
    assert status["episodes"]["discarded"] == status["archived"] == 4
    assert not [path for path in (tmp_path / "journal").glob("*.log") if b"EpisodeDiscarded" in path.read_bytes()]


async def test_a_limit_on_the_disk_keeps_new_work_out_until_there_is_room(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient
) -> None:
    with ProxyProcess(stub.url, tmp_path / "data", options=["--max-disk", "400000"]) as proxy:
        control, chat = f"{proxy.url}/ajet/v1", f"{proxy.url}/e/one/v1/chat/completions"
        assert (await http.post(chat, json=CHAT)).status_code == 200

        async def closed(code: int, url: str, body: Any) -> bool:
            return (await http.post(url, json=body)).status_code == code

        await passes(http, proxy, 18)
        await eventually(lambda: closed(503, f"{control}/episodes", {}), 10)
        refused = await http.post(f"{control}/episodes", json={})
        assert refused.headers["Retry-After"] and refused.json()["error"]["code"] == "disk_limit"
        assert (await http.post(chat, json=CHAT | {"seed": 2})).status_code == 200  # what is under way goes on
        assert (await http.post(f"{control}/episodes/one/rewards", json={"value": 1.0})).status_code == 200
        status = (await http.get(f"{control}/status")).json()
        assert status["journal"] == {"healthy": True, "refused": {"disk": ["EpisodeOpened"]}}
        metrics = (await http.get(f"{proxy.url}/metrics")).text
        assert "ajet_intake_open 0" in metrics and 'ajet_refused_total{reason="disk"}' in metrics
