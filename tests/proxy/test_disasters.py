"""A full disk and a journal that is taken away: what was answered is there, once."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_proxy.io.capture.recorder import HELD_S
from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import ProxyFailed, ProxyProcess
from tests.proxy.serving import CHAT, eventually, identity_holds

STUB = {"delay_s": 0.02}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:
        yield client


async def status_of(http: httpx.AsyncClient, proxy: ProxyProcess) -> Any:
    status = (await http.get(f"{proxy.url}/ajet/v1/status")).json()
    assert identity_holds(status)
    return status


def fill_disk(proxy: ProxyProcess, *, full: bool) -> None:
    """Let no file of the proxy grow beyond what its journal has now, or let them all grow again."""
    size = max(path.stat().st_size for path in (proxy.data_dir / "journal").iterdir())
    _, hard = resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE, (size + 10 if full else hard, hard))


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_on_a_full_disk_no_call_is_complete_whose_client_got_no_end(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, workers: str
) -> None:
    """Some clients give up, others are told 503 or cut; also after the disk has room again, and after a restart."""
    async with asyncio.timeout(900):
        with ProxyProcess(stub.url, tmp_path / "data", options=["--drain-s", "3", "--workers", workers]) as proxy:
            chat = f"{proxy.url}/e/one/v1/chat/completions"
            assert (await http.post(chat, json=CHAT)).status_code == 200
            stub.paused.clear()
            bodies = [CHAT | {"seed": seed, "stream": stream} for seed in (2, 3) for stream in (False, True)]
            waiting = [asyncio.create_task(http.post(chat, json=body)) for body in bodies]
            await eventually(lambda: len(stub.llm_requests()) == 5)
            fill_disk(proxy, full=True)
            stub.paused.set()
            await eventually(lambda: none_runs(http, proxy, 5))
            await asyncio.sleep(2 * HELD_S)
            for gone in waiting[:2]:
                gone.cancel()
            refused, cut = await asyncio.gather(*waiting[2:], return_exceptions=True)
            assert isinstance(refused, httpx.Response) and refused.status_code == 503
            assert refused.headers["Retry-After"] and refused.json()["error"]["code"] == "journal"
            assert isinstance(cut, httpx.RemoteProtocolError)
            fill_disk(proxy, full=False)
            again = await until(lambda: http.post(chat, json=CHAT | {"seed": 4}), 200)
            for _ in range(2):
                record = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()
                reasons = [call.get("reason") for call in record["calls"]]
                assert sorted(reasons, key=str) == [None, None, *["not_written"] * 4]
                assert record["calls"][-1]["call"] == again.headers["X-AJet-Call"]
                proxy.kill()
                proxy.start()


async def none_runs(http: httpx.AsyncClient, proxy: ProxyProcess, calls: int) -> bool:
    """Tell whether so many calls were made, and the engine has answered all."""
    found = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()["calls"]
    return len(found) == calls and all(call["complete"] for call in found)


async def until(ask: Any, status: int, limit_s: float = 300.0) -> httpx.Response:
    """Ask until the answer has this status."""
    deadline = time.monotonic() + limit_s
    while True:
        answer: httpx.Response = await ask()
        if answer.status_code == status:
            return answer
        assert time.monotonic() < deadline, answer.text
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("back", [True, False])
async def test_a_journal_that_is_taken_away_is_noticed_and_never_begun_anew(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, back: bool
) -> None:
    with ProxyProcess(stub.url, tmp_path / "data", options=["--drain-s", "3"]) as proxy:
        chat, folder = f"{proxy.url}/e/one/v1/chat/completions", proxy.data_dir / "journal"
        assert (await http.post(chat, json=CHAT)).status_code == 200
        folder.rename(tmp_path / "away")
        refused = await until(lambda: http.post(chat, json=CHAT | {"seed": 2}), 503)
        assert refused.json()["error"]["code"] == "journal" and refused.headers["Retry-After"]
        status = await status_of(http, proxy)
        assert status["journal"]["healthy"] is False
        (alert,) = status["alerts"]
        assert f"put {folder} back" in alert and "put" in proxy.errors()
        metrics = (await http.get(f"{proxy.url}/metrics")).text
        assert "ajet_journal_healthy 0" in metrics and "ajet_alerts 1" in metrics
        if back:
            (tmp_path / "away").rename(folder)
            await until(lambda: http.post(chat, json=CHAT | {"seed": 3}), 200)
        else:
            assert proxy.stop() == 1
            with pytest.raises(ProxyFailed, match="holds no journal, and compacting next to it"):
                proxy.start()
            (tmp_path / "away").rename(folder)
            proxy.start()
        assert (await status_of(http, proxy))["alerts"] == []
        proxy.kill()
        proxy.start()
        calls = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()["calls"]
        assert [call["complete"] for call in calls if call["complete"]] == [True] * (2 if back else 1)
