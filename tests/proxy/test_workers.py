"""Several worker processes behind one port: one ledger, one gate, one set of figures, and a death that loses little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ajet_proxy.daemon import App
from ajet_proxy.io.ledger_port.worker_connection import WorkerConnection
from ajet_proxy.io.workers import processes as workers_module
from ajet_proxy.settings import Config
from ajet_sdk.frame import decode_batch
from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import ProxyProcess, failed_start
from tests.kit.stub_process import stub_process
from tests.proxy.io.front import until
from tests.proxy.serving import CHAT, Client, eventually, identity_holds, serving
from tests.proxy.test_serve import children

CROWD = 24
SECRET = "a secret of the operator"


@contextlib.asynccontextmanager
async def crew(data_dir: Path, stub: EngineStub, **settings: Any) -> AsyncIterator[Client]:
    """A daemon with two workers, and a client that takes a fresh connection for each request: so it meets both."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        serving(data_dir, upstream=(stub.url,), workers=2, **settings) as client,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        yield Client(client.app, session)


def pids(client: Client) -> dict[int, int]:
    assert client.app.workers is not None
    return client.app.workers.pids()


async def figure(client: Client, start: str) -> float:
    """The sum of the lines of ``/metrics`` that begin with `start`."""
    page = (await client.ask("GET", "/metrics")).body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(start))


def said(body: bytes) -> dict[str, Any]:
    message = json.loads(body)["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content") if message.get(name)}


async def test_a_conversation_is_one_timeline_whichever_workers_it_meets(tmp_path: Path) -> None:
    async with EngineStub(drift=True) as stub, crew(tmp_path, stub, group_size=1) as client:
        assert len(set(pids(client).values())) == 2
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        served = []
        for turn in range(12):
            before = [await figure(client, f'ajet_worker_cpu_seconds_total{{worker="{n}"}}') for n in (1, 2)]
            assert all(before)
            answer = await client.ask("POST", "/v1/chat/completions", CHAT | {"messages": messages, "seed": turn})
            assert answer.status == 200, answer.body
            served.append(answer.headers["X-AJet-Episode"])
            messages += [said(answer.body), {"role": "user", "content": f"again {turn}"}]
        assert len(set(served)) == 1, "nothing names the episode, and each turn finds it"
        assert (await client.control("POST", f"/episodes/{served[0]}/rewards", {"value": 1.0})).status == 200
        record = await client.record(served[0])
        words = [call["continuity"] for call in record["calls"]]
        assert words == ["first_turn", *["exact"] * 11]
        leased = await client.control("POST", "/batches/lease", {"wait_s": 300})
        (group,) = decode_batch(leased.body).groups
        assert sum(len(sample.calls) for sample in group.episodes[0].samples) == 12
        assert await figure(client, 'ajet_requests_total{route="chat",status="200"}') == 12
        assert await figure(client, 'ajet_captures_total{outcome="complete"}') == 12
        assert identity_holds(await client.status())


async def test_the_gate_holds_and_counts_requests_of_all_workers(tmp_path: Path) -> None:
    async with EngineStub() as stub, crew(tmp_path, stub) as client:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(client.chat(f"before-{n}") for n in range(CROWD)))  # each worker asks how it is sampled
        await client.until(lambda status: status["requests"]["in_flight"] == 0)
        stub.paused.clear()
        running = [loop.create_task(client.chat(f"ep-{n}")) for n in range(CROWD)]
        await client.until(lambda status: status["requests"]["in_flight"] == CROWD)
        closing = loop.create_task(client.control("POST", "/gate/close", {"reason": "weights", "wait_s": 300}))
        stub.paused.set()
        assert [answer.status for answer in await asyncio.gather(*running)] == [200] * CROWD
        assert (await closing).json == {"gate": "closed", "in_flight": 0}
        held = [loop.create_task(client.chat(f"ep-{n}", "more")) for n in range(CROWD)]
        await client.until(lambda status: status["requests"]["waiting"] == CROWD)
        seen = len(stub.llm_requests())
        for gone in held[:4]:
            gone.cancel()
        await client.until(lambda status: status["requests"]["waiting"] == CROWD - 4)
        assert len(stub.llm_requests()) == seen
        assert (await client.control("POST", "/gate/open", {"policy_version": 7})).status == 200
        assert [answer.status for answer in await asyncio.gather(*held[4:])] == [200] * (CROWD - 4)
        record = (await client.control("GET", "/episodes/ep-9")).json
        assert [call["policy_version"] for call in record["calls"]] == [0, 7]
        assert (await client.status())["requests"]["in_flight"] == 0


async def test_what_runs_in_an_episode_that_is_discarded_ends_in_its_worker(tmp_path: Path) -> None:
    async with EngineStub(delay_s=300.0) as stub, crew(tmp_path, stub) as client:
        loop = asyncio.get_running_loop()
        running = [loop.create_task(client.chat(f"ep-{n}")) for n in range(6)]
        await client.until(lambda status: status["requests"]["in_flight"] == 6)
        for n in range(6):
            assert (await client.control("POST", f"/episodes/ep-{n}/abort", {})).status == 200
        answers = await asyncio.gather(*running)
        assert {(answer.status, answer.json["error"]["code"]) for answer in answers} == {(409, "episode_discarded")}
        closed = await client.control("POST", "/gate/close", {"wait_s": 300})
        assert closed.json == {"gate": "closed", "in_flight": 0}
        await until(lambda: all(request.cancelled for request in stub.llm_requests()))


class Halting(EngineStub):
    """An engine whose streams stop behind some tokens until it is told to go on."""

    async def pieces(self, parts: Any, delay: float) -> AsyncIterator[bytes]:
        number = 0
        async for piece in super().pieces(parts, delay):
            if number == 4:
                await self.go_on.wait()
            number += 1
            yield piece


async def test_weights_that_change_in_mid_stream_are_known_to_every_worker(tmp_path: Path) -> None:
    async with Halting(delay_s=0.1) as stub, crew(tmp_path, stub, gate_mode="pause") as client:
        body = CHAT | {"stream": True, "max_tokens": 12}
        changed, begun = asyncio.Event(), 0

        async def reads(episode: str) -> None:
            nonlocal begun
            url = f"{client.app.url}/e/{episode}/v1/chat/completions"
            async with client.session.post(url, json=body) as answer:
                for _ in range(3):
                    await answer.content.readuntil(b"\n\n")
                begun += 1
                await changed.wait()
                await answer.read()

        running = [asyncio.create_task(reads(f"ep-{n}")) for n in range(8)]
        await until(lambda: begun == 8)
        await client.control("POST", "/gate/close", {})
        await client.control("POST", "/gate/open", {"policy_version": 3})
        stub.go_on.set()
        changed.set()
        await asyncio.gather(*running)
        for n in range(8):
            (call,) = (await client.control("GET", f"/episodes/ep-{n}")).json["calls"]
            assert {version for version, _ in call["policy_version"]} == {0, 3}, call


async def test_a_worker_that_is_killed_loses_its_calls_and_no_others(tmp_path: Path) -> None:
    async with EngineStub() as stub, crew(tmp_path, stub) as client:
        loop = asyncio.get_running_loop()
        before = pids(client)
        stub.paused.clear()
        running = [loop.create_task(client.chat(f"ep-{n}")) for n in range(CROWD)]
        await client.until(lambda status: status["requests"]["in_flight"] == CROWD)
        os.kill(before[1], signal.SIGKILL)
        stub.paused.set()
        answers = await asyncio.gather(*running, return_exceptions=True)
        whole = [not isinstance(answer, BaseException) and answer.status == 200 for answer in answers]
        assert 0 < sum(whole) < CROWD
        for number, ended in enumerate(whole):
            (call,) = (await client.control("GET", f"/episodes/ep-{number}")).json["calls"]
            assert call["complete"] == ended, call
            assert ended or call["reason"] == "restarted", call
        await client.until(lambda status: status["requests"]["in_flight"] == 0)
        await eventually(lambda: replaced(client, before))
        again = await asyncio.gather(*(client.chat(f"ep-{n}", "again") for n in range(CROWD)))
        assert [answer.status for answer in again] == [200] * CROWD
        assert await figure(client, "ajet_worker_restarts_total") == 1
        assert await figure(client, 'ajet_captures_total{outcome="complete"}') == sum(whole) + CROWD
        assert await figure(client, 'ajet_captures_total{outcome="restarted"}') == CROWD - sum(whole)
        assert identity_holds(await client.status())


def replaced(client: Client, before: dict[int, int]) -> bool:
    """Tell whether another worker than `before` has taken the first place, and two of them answer."""
    now = pids(client)
    assert client.app.workers is not None
    return now.get(1, before[1]) != before[1] and client.app.workers.listening == 2


async def test_a_worker_that_starts_is_not_taken_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "SILENT_S", 0.05)  # it takes longer to load its modules
    monkeypatch.setattr(workers_module, "START_S", 300.0)
    ask = WorkerConnection.ask

    async def patient(connection: WorkerConnection, *question: Any) -> Any:
        """The last question before a worker listens, which it answers."""
        answer = await ask(connection, *question)
        monkeypatch.setattr(workers_module, "SILENT_S", 300.0)
        return answer

    monkeypatch.setattr(WorkerConnection, "ask", patient)
    async with EngineStub() as stub, crew(tmp_path, stub) as client:
        assert len(pids(client)) == 2


async def test_a_daemon_that_stood_still_takes_no_worker_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers that they gave meanwhile are there to be read."""
    loop, ask, asked = asyncio.get_running_loop(), WorkerConnection.ask, Counter[WorkerConnection]()
    answered = set[WorkerConnection]()

    async def standing_still(connection: WorkerConnection, *question: Any) -> Any:
        asking = asyncio.ensure_future(ask(connection, *question))
        asked[connection] += 1
        if asked[connection] == 1:
            await asyncio.sleep(0)
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 40.0 * len(asked))
        answer = await asking
        answered.add(connection)
        return answer

    async with EngineStub() as stub, crew(tmp_path, stub) as client:
        before = pids(client)
        monkeypatch.setattr(WorkerConnection, "ask", standing_still)
        await until(lambda: len(answered) == 2)
        assert pids(client) == before and max(asked.values()) > 1


async def test_a_worker_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "SILENT_S", 2.0)
    async with EngineStub() as stub, crew(tmp_path, stub) as client:
        before = pids(client)
        os.kill(before[1], signal.SIGSTOP)

        async def all_are_answered() -> bool:
            asked = (client.chat(f"ep-{n}") for n in range(CROWD))
            answers = await asyncio.gather(*asked, return_exceptions=True)
            return [getattr(answer, "status", 0) for answer in answers] == [200] * CROWD

        await eventually(lambda: replaced(client, before))
        await eventually(all_are_answered)  # a busy machine may have taken the other one for silent, too


async def test_keys_hold_in_workers_and_one_file_has_the_audit(tmp_path: Path) -> None:
    async with EngineStub() as stub, crew(tmp_path, stub, admin_secret=SECRET) as client:
        opened = (await client.control("POST", "/episodes", {"task": "t"}, key=SECRET)).json
        key, name = opened["api_key"], opened["episode"]
        for _ in range(8):
            assert (await client.ask("POST", "/v1/chat/completions", CHAT, key=key)).headers["X-AJet-Episode"] == name
            assert (await client.ask("POST", "/v1/chat/completions", CHAT, key="sk-none")).status == 401
            assert (await client.ask("GET", "/metrics")).status == 200, "the peer is on this machine"
            assert (await client.control("GET", "/status")).status == 401
        for _ in range(8):
            rewarded = await client.ask("GET", "/v1/models", key=key, X_AJet_Reward="0.5")
            assert rewarded.status == 200, rewarded.body
        expected = ["open_episode", *["reward_header"] * 8]
        await until(lambda: audited(tmp_path, name) == expected)


def audited(data_dir: Path, episode: str) -> list[str]:
    lines = [json.loads(line) for line in (data_dir / "audit.jsonl").read_text().splitlines()]
    return [line["route"] for line in lines if line["episode"] == episode]


def test_after_kill_9_of_the_daemon_its_workers_are_gone_and_one_that_cannot_listen_starts_none(tmp_path: Path) -> None:
    with stub_process() as engine, ProxyProcess(engine, tmp_path / "data", options=["--workers", "2"]) as proxy:
        crew_pids = children(proxy.pid)
        assert len(crew_pids) == 2
        os.kill(crew_pids[0], signal.SIGSTOP)  # one that hangs would keep the port
        proxy.kill()
        deadline = time.monotonic() + 300
        while any(Path(f"/proc/{pid}").exists() for pid in crew_pids):
            assert time.monotonic() < deadline, "a worker outlives its daemon"
            time.sleep(0.05)
        proxy.start()
        code, words = failed_start(["--listen", f"127.0.0.1:{proxy.port}", "--workers", "2", "--data-dir",
                                    str(tmp_path / "other")])  # fmt: skip
        assert code == 1 and "cannot listen" in words and words.count("\n") == 1


async def test_a_worker_of_another_version_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = [sys.executable, "-m", "ajet_proxy.worker", "0", "another"]
    ended = await asyncio.to_thread(subprocess.run, worker, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "ajet-proxy: another version was installed while the daemon runs: restart the daemon\n"
    monkeypatch.setattr(workers_module, "program", lambda: "another")
    app = App(Config(listen="127.0.0.1:0", data_dir=str(tmp_path), workers=2))
    with pytest.raises(OSError, match="ended before it listened: status 1"):
        await app.start()


async def test_workers_that_cannot_start_are_an_error_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    app = App(Config(listen="127.0.0.1:0", data_dir=str(tmp_path), workers=2))
    with pytest.raises(OSError, match="ended before it listened: status 1"):
        await app.start()
    assert "workers.sock" not in os.listdir(tmp_path)
