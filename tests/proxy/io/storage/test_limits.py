"""Limits on disk and memory: told to come back, counted, and let in again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ajet_proxy import daemon as app_module
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.quotas import Quota
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import SMALL, MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage import limits as module
from ajet_proxy.io.storage.limits import DaemonLimits, disk_bytes, resident_bytes
from ajet_sdk.errors import NotReady
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.runtime.test_memory_budget import LARGE, PATHS, sending, told
from tests.proxy.serving import CHAT, Answer, Client, eventually, identity_holds, serving

OPENED = ev.EpisodeOpened(1.0, "e", None, None, None, False, 1.0, 1.0)
STARTED = ev.CallStarted(1.0, "e", ("c",), "m", "", "path", "")
OTHERS = [ev.EpisodeSealed(1.0, "e"), ev.BatchTrained(1.0, "b", 1), ev.EpisodesArchived(1.0, ("e",), ())]


def refuses(limits: DaemonLimits, event: ev.Event) -> bool:
    try:
        limits.check([event])
    except NotReady as error:
        return bool(error.retry_after)
    return False


def test_nearly_used_up_takes_no_new_episode_and_used_up_no_new_call(tmp_path: Path) -> None:
    held, metrics = [0], Metrics()
    limits = DaemonLimits(tmp_path, max_disk=0, max_memory=1000, metrics=metrics, resident=lambda: held[0])
    for used, opened, started in ((899, False, False), (900, True, False), (1000, True, True), (100, False, False)):
        held[0] = used
        limits.measure()
        assert (refuses(limits, OPENED), refuses(limits, STARTED)) == (opened, started)
        assert not any(refuses(limits, event) for event in OTHERS)
        assert bool(limits.refused()) == opened
        assert limits.memory == used
    assert 'ajet_refused_total{reason="memory"} 3' in metrics.render()


class Ring:
    """Holds itself, and so many bytes."""

    def __init__(self, size: int) -> None:
        self.itself, self.size = self, size
        alive.add(self)


alive: weakref.WeakSet[Ring] = weakref.WeakSet()


def test_garbage_is_collected_before_anything_is_refused(tmp_path: Path) -> None:
    """At most once a minute, because it takes a while."""
    clock = [0.0]
    gc.disable()
    try:
        Ring(950)
        limits = DaemonLimits(
            tmp_path, max_disk=0, max_memory=1000, metrics=Metrics(), resident=lambda: sum(one.size for one in alive),
            now=lambda: clock[0],
        )
        assert not refuses(limits, OPENED)
        for later, refused in ((0.0, True), (59.0, True), (1.0, False)):
            Ring(950)
            clock[0] += later
            limits.measure()
            assert refuses(limits, OPENED) == refused
    finally:
        gc.enable()


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes for the daemon, so that no quota fills up again."""
    now = Clock().now()
    monkeypatch.setattr(Clock, "now", lambda clock: now)


@pytest.mark.usefixtures("no_time")
async def test_a_tenant_over_its_quota_gets_a_429_in_its_own_protocol(tmp_path: Path) -> None:
    tenants = (("a", Quota(episodes=1, requests_per_minute=2)),)
    async with (
        EngineStub() as stub,
        serving(tmp_path, upstream=(stub.url,), tenants=tenants, admin_secret="a secret of the operator") as client,
    ):
        key, other = client.key(Claims("agent", "a")), client.key(Claims("agent", "b"))
        assert (await client.chat("one", key=key)).status == 200
        for refused in (await client.chat("two", key=key), await client.control("POST", "/episodes", {}, key=key)):
            assert (refused.status, refused.headers["Retry-After"]) == (429, "10")
            assert refused.json["error"]["code"] == "episodes_quota"
            assert refused.json["error"]["type"] == "rate_limit_error"
        assert (await client.chat("one", key=key)).status == 200
        body = CHAT | {"messages": [{"role": "user", "content": "Hello"}]}
        told = await client.ask("POST", "/e/one/v1/messages", body, key=key)
        assert (told.status, told.json["type"], told.json["error"]["type"]) == (429, "error", "rate_limit_error")
        assert 0 < int(told.headers["Retry-After"]) <= 30
        assert (await client.chat("theirs", key=other)).status == 200
        page = (await client.ask("GET", "/metrics")).body.decode()
        assert 'ajet_refused_total{reason="episodes_quota"} 2' in page
        assert 'ajet_refused_total{reason="requests_quota"} 1' in page
        assert len([one for one in stub.requests if "completions" in str(one)]) == 3
        status = await client.control("GET", "/status", key=key)
        assert identity_holds(status.json)


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("workers", [1, 2])
async def test_what_passes_through_counts_for_its_tenant(tmp_path: Path, workers: int) -> None:
    tenants = (("a", Quota(requests_per_minute=4)), ("b", Quota(tokens_per_minute=100)))
    settings = {"tenants": tenants, "workers": workers, "admin_secret": "a secret of the operator"}
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), **settings) as client:
        a, b = client.key(Claims("agent", "a")), client.key(Claims("agent", "b"))
        used = {"input": "x", "usage": {"total_tokens": 400}}  # the stub's embeddings are what it was sent
        for _ in range(2):
            assert (await client.ask("POST", "/v1/embeddings", used, key=a)).json == used
            assert (await client.ask("POST", "/tokenize", {"prompt": "x"}, key=a)).status == 200
        for _ in range(3):
            assert (await client.ask("GET", "/v1/models", key=a)).status == 200
        refused = [
            await client.ask("POST", "/v1/embeddings", used, key=a),
            await client.ask("POST", "/tokenize", {"prompt": "x"}, key=a), await client.chat("one", key=a),
        ]
        assert [(one.status, one.json["error"]["code"]) for one in refused] == [(429, "requests_quota")] * 3
        assert all(0 < int(one.headers["Retry-After"]) <= 15 for one in refused)
        assert (await client.ask("POST", "/v1/embeddings", used, key=b)).status == 200
        over: list[Answer] = []

        async def refused_at_last() -> bool:
            """The tokens are counted once the answer is over, which its client may know first."""
            over[:] = [await client.chat("two", key=b)]
            return over[0].status == 429

        await eventually(refused_at_last)
        assert over[0].json["error"]["code"] == "tokens_quota"
        assert 0 < int(over[0].headers["Retry-After"]) <= 240
        for _ in range(9):
            assert (await client.ask("POST", "/v1/embeddings", used, key=client.key(Claims("agent")))).status == 200


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("workers", [1, 2])
async def test_what_is_asked_and_not_captured_counts_for_its_tenant(tmp_path: Path, workers: int) -> None:
    """An image, streamed and not, and an answer that is left before its end."""
    tenants = tuple((name, Quota(tokens_per_minute=10)) for name in ("a", "b", "c"))
    settings = {"tenants": tenants, "workers": workers, "admin_secret": "a secret of the operator"}
    async with EngineStub(delay_s=0.01) as stub, serving(tmp_path, upstream=(stub.url,), **settings) as client:
        shown = {"model": "stub", "messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 20}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        said = [{"role": "user", "content": "say: " + "more and more " * 30}]
        for tenant, body in (
            ("a", shown), ("b", shown | streamed), ("c", {"model": "stub", "messages": said, "stream": True}),
        ):
            key = client.key(Claims("agent", tenant))
            if tenant == "c":
                url, headers = f"{client.app.url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
                async with client.session.post(url, json=body, headers=headers) as answer:
                    for _ in range(30):
                        await answer.content.readuntil(b"\n\n")
            else:
                assert (await client.ask("POST", "/v1/chat/completions", body, key=key)).status == 200

            async def refused_at_last(key: str = key) -> bool:
                """The tokens are counted once the answer is over, which its client may know first."""
                return (await client.ask("POST", "/tokenize", {"prompt": "x"}, key=key)).status == 429

            await eventually(refused_at_last)


def test_the_disk_is_what_journal_and_archive_take(tmp_path: Path) -> None:
    limits = DaemonLimits(tmp_path, max_disk=1000, max_memory=0, metrics=Metrics())
    assert limits.disk == 0
    assert not refuses(limits, OPENED)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/00000001.log").write_bytes(b"x" * 600)
    (tmp_path / "archive.sqlite-wal").write_bytes(b"x" * 300)
    (tmp_path / "secret").write_bytes(b"x" * 5000)
    limits.measure()
    assert disk_bytes(tmp_path) == limits.disk == 900
    assert limits.refused() == {"disk": ["EpisodeOpened"]}
    with pytest.raises(NotReady, match="uses 900 of the 1000 bytes of disk") as caught:
        limits.check([STARTED, OPENED])
    assert caught.value.code == "disk_limit"


def test_memory_is_what_the_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resident_bytes() > 1 << 20
    monkeypatch.setattr(module, "STATM", "/nowhere/{}")
    assert resident_bytes() == 0


async def test_who_would_be_refused_is_not_held_while_the_gate_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits is held in memory: there is none for one that cannot pass, or is over its quota."""
    tenants = (("*", Quota(episodes=1)),)
    async with (
        EngineStub() as stub,
        serving(tmp_path, upstream=(stub.url,), tenants=tenants, max_memory=1 << 40) as client,
    ):
        assert (await client.chat("one")).status == 200
        await client.control("POST", "/gate/close", {})
        refused = await asyncio.wait_for(client.chat("two"), 300)
        assert (refused.status, refused.json["error"]["code"]) == (429, "episodes_quota")
        held = asyncio.create_task(client.chat("one"))
        await client.until(lambda status: status["requests"]["waiting"] == 1)
        monkeypatch.setattr("ajet_proxy.daemon.resident_bytes", lambda process: 1 << 40)
        await client.until(lambda status: "memory" in status["journal"]["refused"])
        refused = await asyncio.wait_for(client.chat("one"), 300)
        assert (refused.status, refused.json["error"]["code"]) == (503, "memory_limit")
        assert refused.headers["Retry-After"]
        monkeypatch.setattr("ajet_proxy.daemon.resident_bytes", lambda process: 1)
        await client.until(lambda status: "memory" not in status["journal"]["refused"])
        await client.control("POST", "/gate/open", {"policy_version": 1})
        assert (await held).status == 200


HELD = 1 << 20


@contextlib.asynccontextmanager
async def daemon(data_dir: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> AsyncIterator[Client]:
    """One whose processes each hold `HELD`, and may each take `LARGE` more, as they know by now."""
    looked, look = asyncio.Event(), MemoryBudget.look

    def looks(budget: MemoryBudget, left: int) -> None:
        look(budget, left)
        looked.set()

    monkeypatch.setattr(MemoryBudget, "look", looks)
    monkeypatch.setattr(app_module, "resident_bytes", lambda pid: HELD)
    monkeypatch.setattr(app_module, "TICK_S", 0.05)
    processes = 1 if workers == 1 else workers + 1
    limit = processes * (HELD + LARGE)
    async with EngineStub() as stub, serving(
        data_dir, upstream=(stub.url,), workers=workers, max_memory=limit
    ) as client:
        await looked.wait()
        yield client


@pytest.mark.parametrize("workers", [1, 2])
async def test_each_process_has_its_share(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon(tmp_path, monkeypatch, workers) as client:
        for _ in range(4):
            async with sending(client.app.url, PATHS[0], 2 * LARGE) as (reader, _):
                assert await told(reader) == (503, "10", "memory_limit")
            body = json.dumps(CHAT).encode()
            async with sending(client.app.url, PATHS[0], len(body) + SMALL) as (reader, writer):
                writer.write(body + b" " * SMALL)
                assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
        refused = (await client.ask("GET", "/metrics")).body.decode()
        assert 'ajet_refused_total{reason="memory"} 4' in refused


def test_a_backlog_makes_room_at_most_once_a_minute(tmp_path: Path) -> None:
    """It takes a while until the memory is given back, and the newest of it should stay."""
    held, at = [799], [0.0]
    limits = DaemonLimits(
        tmp_path, max_disk=0, max_memory=1000, metrics=Metrics(), resident=lambda: held[0], now=lambda: at[0]
    )
    found = []
    for used, seconds in ((799, 0), (800, 1), (850, 2), (850, 60), (850, 61), (850, 62), (100, 200)):
        held[0], at[0] = used, seconds
        limits.measure()
        found.append(limits.tight)
    assert found == [False, True, False, False, True, False, False]
