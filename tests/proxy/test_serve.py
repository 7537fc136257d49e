"""The daemon as a process: from an agent's first byte to the acknowledged batch, and every way it can end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.frame import decode_batch
from ajet_sdk.sample import Batch
from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import PROXY, ProxyProcess, failed_start
from tests.kit.stub_process import stub_process
from tests.proxy.serving import eventually

STUB = {"split_seed": 3}
MESSAGES = [{"role": "user", "content": "Hello"}]


async def chat(http: httpx.AsyncClient, url: str, episode: str, *, stream: bool = False, **headers: str) -> Any:
    body = {"model": "stub", "messages": MESSAGES, "max_tokens": 8, "stream": stream}
    answer = await http.post(f"{url}/e/{episode}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def status_of(http: httpx.AsyncClient, url: str) -> Any:
    return (await http.get(f"{url}/ajet/v1/status")).json()


async def lease(http: httpx.AsyncClient, url: str, **wanted: Any) -> Batch:
    answer = await http.post(f"{url}/ajet/v1/batches/lease", json=wanted)
    assert answer.status_code == 200, answer.text
    return decode_batch(answer.content)


async def reward(http: httpx.AsyncClient, url: str, episode: str, value: float) -> None:
    answer = await http.post(f"{url}/ajet/v1/episodes/{episode}/rewards", json={"value": value})
    assert answer.status_code == 200, answer.text


def terms(**nonzero: int) -> dict[str, int]:
    states = ("open", "sealed", "ready", "leased", "trained", "recorded", "discarded")
    return {"opened": sum(nonzero.values())} | dict.fromkeys(states, 0) | nonzero


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_from_the_first_call_to_the_acknowledged_batch(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, workers: str
) -> None:
    with ProxyProcess(stub.url, tmp_path / "data", options=["--group-size", "2", "--workers", workers]) as proxy:
        task = {"X-AJet-Task": "t"}
        whole = await chat(http, proxy.url, "one", **task)
        streamed = await chat(http, proxy.url, "two", stream=True, **task)
        assert whole.json()["choices"][0]["token_ids"] is None
        assert streamed.text.endswith("data: [DONE]\n\n")
        await reward(http, proxy.url, "one", 1.0)
        riding = await http.get(
            f"{proxy.url}/e/two/v1/models", headers={"X-AJet-Reward": "0.25", "X-AJet-Final": "1"}
        )
        assert riding.status_code == 200
        assert (await status_of(http, proxy.url))["episodes"] == terms(ready=2)
        batch = await lease(http, proxy.url)
        (group,) = batch.groups
        assert {e.episode: e.reward for e in group.episodes} == {"one": 1.0, "two": 0.25}
        for episode in group.episodes:
            (sample,) = episode.samples
            assert sum(sample.loss_mask) == 8
            assert all(p < 0 for p, m in zip(sample.logprobs, sample.loss_mask, strict=True) if m)
        url = f"{proxy.url}/ajet/v1/batches/{batch.batch}/ack"
        assert (await http.post(url, json={"policy_version": 1})).status_code == 200
        assert (await status_of(http, proxy.url))["episodes"] == terms(trained=2)
        assert proxy.stop() == 0
    with ProxyProcess(stub.url, tmp_path / "data") as proxy:
        assert (await status_of(http, proxy.url))["episodes"] == terms(trained=2)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_kill_9_loses_nothing_that_was_answered(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, workers: str
) -> None:
    proxy = ProxyProcess(stub.url, tmp_path / "data", options=["--group-size", "1", "--workers", workers])
    with proxy:
        await chat(http, proxy.url, "ready")
        await reward(http, proxy.url, "ready", 1.0)
        await chat(http, proxy.url, "open")
        leased = await lease(http, proxy.url)
        await chat(http, proxy.url, "second")
        await reward(http, proxy.url, "second", 0.5)
        before = await status_of(http, proxy.url)
        proxy.kill()
        proxy.start()
        assert (await status_of(http, proxy.url))["episodes"] == before["episodes"] == terms(ready=1, open=1, leased=1)
        second = await lease(http, proxy.url)
        assert [e.episode for g in second.groups for e in g.episodes] == ["second"]
        for batch in (leased, second):
            url = f"{proxy.url}/ajet/v1/batches/{batch.batch}/ack"
            assert (await http.post(url, json={"policy_version": 1})).status_code == 200
        await reward(http, proxy.url, "open", 1.0)
        proxy.kill()
        proxy.start()
        assert (await status_of(http, proxy.url))["episodes"] == terms(trained=2, ready=1)
    lines = await asyncio.to_thread(replay, tmp_path / "data")
    delivered = {s.sample: s for b in (leased, second) for g in b.groups for e in g.episodes for s in e.samples}
    assert {line["episode"] for line in lines} == {"ready", "second", "open"}
    for line in lines:
        if line["sample"] in delivered:
            sample = delivered[line["sample"]]
            assert line["token_ids"] == list(sample.token_ids)
            assert line["loss_mask"] == list(sample.loss_mask)


def replay(data_dir: Path) -> list[Any]:
    command = [str(PROXY), "replay", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_call_in_flight_at_kill_9_is_never_trained(
    tmp_path: Path, http: httpx.AsyncClient, workers: str
) -> None:
    async with EngineStub(delay_s=0.2) as stub:
        with ProxyProcess(stub.url, tmp_path / "data", options=["--workers", workers]) as proxy:
            body = {"model": "stub", "messages": MESSAGES, "max_tokens": 20, "stream": True}
            async with http.stream("POST", f"{proxy.url}/e/cut/v1/chat/completions", json=body) as answer:
                await anext(answer.aiter_bytes())
                proxy.kill()
            proxy.start()
            await reward(http, proxy.url, "cut", 1.0)
            record = (await http.get(f"{proxy.url}/ajet/v1/episodes/cut")).json()
            assert (record["state"], record["reason"]) == ("discarded", "incomplete_call")
            assert [call["complete"] for call in record["calls"]] == [False]
            assert 'ajet_captures_total{outcome="restarted"} 1' in (await http.get(f"{proxy.url}/metrics")).text


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_sigterm_lets_calls_in_flight_finish_and_new_ones_out(
    tmp_path: Path, http: httpx.AsyncClient, workers: str
) -> None:
    async with EngineStub(delay_s=0.1) as stub:
        proxy = ProxyProcess(stub.url, tmp_path / "data", options=["--workers", workers])
        with proxy:
            body = {"model": "stub", "messages": MESSAGES, "max_tokens": 10, "stream": True}
            async with http.stream("POST", f"{proxy.url}/e/late/v1/chat/completions", json=body) as answer:
                chunks = answer.aiter_bytes()
                parts = [await anext(chunks)]
                for pid in (*children(proxy.pid), proxy.pid):  # as a terminal and systemd do: they signal the group
                    os.kill(pid, signal.SIGTERM)
                await asyncio.to_thread(wait_for, lambda: not _accepts(proxy.port))
                parts += [chunk async for chunk in chunks]
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
            assert proxy.wait() == 0
            proxy.start()
            record = (await http.get(f"{proxy.url}/ajet/v1/episodes/late")).json()
            assert [call["complete"] for call in record["calls"]] == [True]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_call_that_outlasts_a_stop_is_the_worlds_and_is_good_once_it_is_asked_again(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient, workers: str
) -> None:
    """Another question that is answered says nothing of it, although it clears the time in which the daemon was away.
    """
    with ProxyProcess(stub.url, tmp_path / "data", options=["--drain-s", "1", "--workers", workers]) as proxy:
        body = {"model": "stub", "messages": [{"role": "user", "content": "say: " + "word " * 500}], "max_tokens": 900}

        async def ask(episode: str, stream: bool, **fault: Any) -> httpx.Response:
            url, headers = f"{proxy.url}/e/{episode}/v1/chat/completions", {"x-stub-fault": json.dumps(fault)}
            return await http.post(url, json=body | {"stream": stream}, headers=headers if fault else {}, timeout=300)

        async def lost(episode: str) -> list[str]:
            record = (await http.get(f"{proxy.url}/ajet/v1/episodes/{episode}")).json()
            return [one["reason"] for one in record["unanswered"]]

        async def both_run() -> bool:
            return bool((await status_of(http, proxy.url))["requests"]["in_flight"] == 2)

        cut = [
            asyncio.create_task(ask("whole", False, kind="hang")),
            asyncio.create_task(ask("streamed", True, kind="slow", delay_s=0.1)),
        ]
        await eventually(both_run)
        assert await asyncio.to_thread(proxy.stop) == 0
        ends = await asyncio.gather(*cut, return_exceptions=True)
        assert all(isinstance(end, httpx.TransportError) for end in ends), ends
        proxy.start()
        for episode, stream in (("whole", False), ("streamed", True)):
            assert "restarted" in await lost(episode)
            await chat(http, proxy.url, episode)
            assert await lost(episode) == ["restarted"]
            body["max_tokens"] = 8
            assert (await ask(episode, not stream)).status_code == 200
            assert await lost(episode) == []


@pytest.mark.parametrize(("before", "after"), [(signal.SIG_DFL, False), (signal.SIG_IGN, True)])
async def test_a_terminal_that_closes_ends_it_well_but_for_nohup(
    tmp_path: Path, http: httpx.AsyncClient, before: signal.Handlers, after: bool
) -> None:
    async with EngineStub(delay_s=0.1) as stub:
        proxy = ProxyProcess(stub.url, tmp_path / "data")
        own = signal.signal(signal.SIGHUP, before)
        try:
            proxy.start()
        finally:
            signal.signal(signal.SIGHUP, own)
        try:
            asking = asyncio.create_task(chat(http, proxy.url, "late"))
            await asyncio.to_thread(wait_for, stub.llm_requests)
            os.kill(proxy.pid, signal.SIGHUP)
            assert (await asking).status_code == 200
            if after:
                assert (await chat(http, proxy.url, "later")).status_code == 200
            else:
                assert await asyncio.to_thread(proxy.wait) == 0
        finally:
            await asyncio.to_thread(proxy.stop)


async def test_sigterm_does_not_wait_for_those_who_only_wait(
    tmp_path: Path, stub: EngineStub, http: httpx.AsyncClient
) -> None:
    """A held request, a long-polling trainer and a reader of events have nothing that could finish."""
    with ProxyProcess(stub.url, tmp_path / "data", options=["--drain-s", "3000"]) as proxy:
        assert (await http.post(f"{proxy.url}/ajet/v1/gate/close", json={})).status_code == 200
        url = f"{proxy.url}/e/held/v1/chat/completions"
        polling = asyncio.create_task(http.post(f"{proxy.url}/ajet/v1/batches/lease", json={"wait_s": 3000}))
        held = asyncio.create_task(http.post(url, json={"model": "stub", "messages": MESSAGES}))
        async with http.stream("GET", f"{proxy.url}/ajet/v1/events") as events:
            await anext(events.aiter_bytes())

            async def is_held() -> bool:
                return bool((await status_of(http, proxy.url))["requests"]["waiting"])

            await eventually(is_held)
            os.kill(proxy.pid, signal.SIGTERM)
            answer = await held
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
            assert (await polling).status_code == 204
            assert await asyncio.to_thread(proxy.wait) == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with EngineStub(delay_s=3000) as stub:
        proxy = ProxyProcess(stub.url, tmp_path / "data")
        with proxy:
            asking = asyncio.create_task(chat(http, proxy.url, "slow"))
            await asyncio.to_thread(wait_for, stub.llm_requests)
            os.kill(proxy.pid, signal.SIGTERM)
            await asyncio.to_thread(wait_for, lambda: not _accepts(proxy.port))
            os.kill(proxy.pid, signal.SIGTERM)
            assert await asyncio.to_thread(proxy.wait) == 1
            await asyncio.gather(asking, return_exceptions=True)


def children(pid: int) -> list[int]:
    return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_second_proxy_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with ProxyProcess("http://127.0.0.1:9", tmp_path / "data") as proxy:
        code, err = failed_start(["--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"])
        assert code == 1
        assert "another proxy" in err
        assert err.count("\n") == 1
        assert httpx.get(f"{proxy.url}/ajet/v1/status", timeout=300, trust_env=False).status_code == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "192.0.2.1:1", "--insecure"], "192.0.2.1"),
        (["--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"], "tls_cert"),
        (["--data-dir", "/proc/nothing"], "mkdir -m 700, chown), or choose another --data-dir"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(tmp_path: Path, options: list[str], words: str) -> None:
    base = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "d")]
    code, err = failed_start([*base, *options], env={"AJET_ADMIN_SECRET": "sixteen characters"})
    assert code in (1, 2)
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_a_proxy_that_is_ready_names_page_data_and_engine(tmp_path: Path) -> None:
    with stub_process() as engine, ProxyProcess(engine, tmp_path / "data") as proxy:
        said = f"engine {engine} serves 'stub'"
        while said not in (log := proxy.log.read_text()):
            time.sleep(0.1)
    assert f"page {proxy.url}/ajet/, data in {tmp_path / 'data'}" in log


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, err = failed_start(["--listen", address, "--data-dir", str(tmp_path / "d")])
    assert code == 1
    assert err.count("\n") == 1
    who = f"{Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})"
    assert f"cannot listen on {address}: address already in use by {who}: stop that, or give another --listen" in err


def test_systemd_is_told_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    with notify_socket(tmp_path / "notify") as said:
        proxy = ProxyProcess(None, tmp_path / "data", env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        with proxy:
            wait_for(lambda: "WATCHDOG=1" in said)
            assert proxy.stop() == 0
        wait_for(lambda: said[-1].startswith("STOPPING=1\n"))
        assert said[0] == "READY=1"


@contextlib.contextmanager
def notify_socket(path: Path) -> Iterator[list[str]]:
    """Stands in for systemd: the datagrams that it got."""
    said: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))

        def listen() -> None:
            while (word := server.recv(100).decode()) != "end":
                said.append(word)

        listener = threading.Thread(target=listen)
        listener.start()
        yield said
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", str(path))
        listener.join()


def wait_for(condition: Any, limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
