"""A full disk, a torn journal and a proxy killed again and again: what was answered is there, once."""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.frame import decode_batch
from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import ProxyFailed, ProxyProcess
from tests.proxy.serving import CHAT, eventually, identity_holds

STUB = {"delay_s": 0.02}
AGENTS = 30
KILLS = 4


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=20, trust_env=False, limits=limits) as client:
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


async def test_a_full_disk_stops_intake_and_loses_nothing(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient
) -> None:
    with ProxyProcess(stub.url, tmp_path / "data", options=["--group-size", "1"]) as proxy:
        chat, rewards = f"{proxy.url}/e/one/v1/chat/completions", f"{proxy.url}/ajet/v1/episodes/one/rewards"
        assert (await http.post(chat, json=CHAT)).status_code == 200
        fill_disk(proxy, full=True)
        waiting = asyncio.create_task(http.post(chat, json=CHAT | {"seed": 2}))
        await eventually(lambda: asked(stub, 2))
        refused = await http.post(rewards, json={"value": 1.0, "id": "r"})
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "journal"
        other = await http.post(f"{proxy.url}/e/two/v1/chat/completions", json=CHAT)
        assert other.status_code == 503
        status = await status_of(http, proxy)
        assert status["journal"]["healthy"] is False
        assert "ajet_journal_healthy 0" in (await http.get(f"{proxy.url}/metrics")).text
        assert not waiting.done()
        fill_disk(proxy, full=False)
        assert (await waiting).status_code == 200
        assert (await until(lambda: http.post(rewards, json={"value": 1.0, "id": "r"}), 200)).json()["reward"] == 1.0
        proxy.kill()
        proxy.start()
        record = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()
        assert record["state"] == "ready"
        assert [call["complete"] for call in record["calls"]] == [True, True]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_on_a_full_disk_no_call_is_complete_whose_client_got_no_end(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, workers: str
) -> None:
    """Some clients give up, others are told 503 or cut; also after the disk has room again, and after a restart."""
    async with asyncio.timeout(60):
        with ProxyProcess(stub.url, tmp_path / "data", options=["--drain-s", "3", "--workers", workers]) as proxy:
            chat = f"{proxy.url}/e/one/v1/chat/completions"
            assert (await http.post(chat, json=CHAT)).status_code == 200
            fill_disk(proxy, full=True)
            bodies = [CHAT | {"seed": seed, "stream": stream} for seed in (2, 3) for stream in (False, True)]
            waiting = [asyncio.create_task(http.post(chat, json=body)) for body in bodies]
            await eventually(lambda: none_runs(http, proxy, 5))
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
                assert sorted(reasons, key=str) == [None, None, *["disconnected"] * 2, *["not_written"] * 2]
                assert record["calls"][-1]["call"] == again.headers["X-AJet-Call"]
                proxy.kill()
                proxy.start()


async def none_runs(http: httpx.AsyncClient, proxy: ProxyProcess, calls: int) -> bool:
    """Whether so many calls were made, and the engine has answered all."""
    found = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()["calls"]
    return len(found) == calls and all(call["complete"] for call in found)


async def asked(stub: EngineStub, times: int) -> bool:
    return len(stub.llm_requests()) == times


async def until(ask: Any, status: int, limit_s: float = 10.0) -> httpx.Response:
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


async def test_a_torn_journal_is_cut_at_its_last_whole_record(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient
) -> None:
    with ProxyProcess(stub.url, tmp_path / "data") as proxy:
        assert (await http.post(f"{proxy.url}/e/one/v1/chat/completions", json=CHAT)).status_code == 200
        before = await status_of(http, proxy)
        proxy.kill()
        last = max((tmp_path / "data/journal").iterdir())
        with last.open("ab") as journal:
            journal.write(b"\x30\x00\x00\x00 half a record")
        proxy.start()
        assert "damaged" in proxy.errors() or "cut" in proxy.errors()
        assert (await status_of(http, proxy))["episodes"] == before["episodes"]
        assert (await http.post(f"{proxy.url}/e/one/v1/chat/completions", json=CHAT)).status_code == 200
        proxy.kill()
        proxy.start()
        record = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()
        assert [call["complete"] for call in record["calls"]] == [True, True]


@pytest.mark.parametrize("sent", [False, True])
async def test_a_retry_after_a_kill_takes_out_only_what_nobody_may_have_heard(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, sent: bool
) -> None:
    """Of two equal requests one was answered, and the other one found no daemon; or there was one, and the daemon died
    before its client had the end."""
    with ProxyProcess(stub.url, tmp_path / "data") as proxy:
        url = f"{proxy.url}/e/one/v1/chat/completions"
        assert (await http.post(url, json=CHAT)).status_code == 200
        if sent:
            await asyncio.sleep(1.0)  # it is noted four times a second
        proxy.kill()
        with pytest.raises(httpx.TransportError):
            await http.post(url, json=CHAT)
        proxy.start()
        again = await http.post(url, json=CHAT, headers={"x-stainless-retry-count": "1"})
        record = (await http.get(f"{proxy.url}/ajet/v1/episodes/one")).json()
        first, second = record["calls"]
        assert (first["complete"], second["complete"]) == (sent, True)
        assert second["call"] == again.headers["X-AJet-Call"]
        assert sent or first["reason"] == "retried"


@pytest.mark.slow
async def test_killed_again_and_again_it_keeps_what_it_answered(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient
) -> None:
    """Agents, and a trainer, that try again until they are answered, and a proxy that is killed at random moments."""
    dice = random.Random(7)
    with ProxyProcess(stub.url, tmp_path / "data", options=["--group-size", "2"]) as proxy:
        heard: dict[str, list[str]] = {}
        agents = [asyncio.create_task(agent(http, proxy, number, heard, dice)) for number in range(AGENTS)]
        trained: dict[str, str] = {}
        trainer = asyncio.create_task(train(http, proxy, trained))
        for _ in range(KILLS):
            await asyncio.sleep(dice.uniform(0.3, 0.8))
            await asyncio.to_thread(proxy.kill)
            await asyncio.to_thread(proxy.start)
        await asyncio.gather(*agents)
        await trainer
        status = await status_of(http, proxy)
        terms = status["episodes"]
        assert terms["opened"] == AGENTS
        assert terms["trained"] == len(trained)
        assert terms["trained"] + terms["discarded"] + terms["ready"] == AGENTS
        for name, calls in heard.items():
            record = (await http.get(f"{proxy.url}/ajet/v1/episodes/{name}")).json()
            complete = [call["call"] for call in record["calls"] if call["complete"]]
            assert set(calls) <= set(complete), name
            assert record["reward"] == 0.5
            lost = any(not call["complete"] and call["reason"] != "retried" for call in record["calls"])
            assert record["state"] == "discarded" if lost else record["state"] in ("ready", "trained")


async def insist(ask: Any) -> httpx.Response:
    """Ask until somebody answers."""
    while True:
        try:
            answer: httpx.Response = await ask()
        except httpx.TransportError:
            await asyncio.sleep(0.05)
            continue
        if answer.status_code < 500:
            return answer
        await asyncio.sleep(0.05)


async def agent(
    http: httpx.AsyncClient, proxy: ProxyProcess, number: int, heard: dict[str, list[str]], dice: random.Random
) -> None:
    """Three calls and a reward; `heard` gets the calls whose answers arrived whole."""
    name = f"agent-{number}"
    heard[name] = []
    for turn in range(3):
        await asyncio.sleep(dice.uniform(0, 0.6))
        body = CHAT | {"messages": [{"role": "user", "content": f"turn {turn} of {name}"}]}
        attempts = itertools.count()

        async def call(body: Any = body, attempts: Any = attempts) -> httpx.Response:
            headers = {"X-AJet-Task": f"pair-{number // 2}", "x-stainless-retry-count": str(next(attempts))}
            return await http.post(f"{proxy.url}/e/{name}/v1/chat/completions", json=body, headers=headers)

        answer = await insist(call)
        assert answer.status_code == 200, answer.text
        heard[name].append(answer.headers["X-AJet-Call"])
    url = f"{proxy.url}/ajet/v1/episodes/{name}/rewards"
    answer = await insist(lambda: http.post(url, json={"value": 0.5, "id": f"reward-of-{name}"}))
    assert answer.status_code == 200, answer.text


async def train(http: httpx.AsyncClient, proxy: ProxyProcess, trained: dict[str, str]) -> None:
    """Lease, check and acknowledge until nothing comes for a while; `trained` has each episode's batch."""
    empty = 0
    while empty < 3:
        answer = await insist(lambda: http.post(f"{proxy.url}/ajet/v1/batches/lease", json={"wait_s": 1, "lease_s": 2}))
        if answer.status_code == 204:
            empty += 1
            continue
        empty = 0
        batch = decode_batch(answer.content)
        episodes = [episode for group in batch.groups for episode in group.episodes]
        assert all(sum(map(len, (s.calls for s in e.samples))) == 3 for e in episodes)
        ack = f"{proxy.url}/ajet/v1/batches/{batch.batch}/ack"
        if (await insist(lambda url=ack: http.post(url, json={"policy_version": 1}))).status_code == 200:
            assert not trained.keys() & {episode.episode for episode in episodes}
            trained.update(dict.fromkeys((episode.episode for episode in episodes), batch.batch))
