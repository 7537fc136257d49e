"""The archive is read by nobody on the event loop: a command that asks for more is given again when it was read."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.ledger import retention
from ajet_proxy.io.storage import compactor
from ajet_proxy.io.storage.archive import ArchiveFile
from ajet_proxy.io.storage.recalled import Recalled, Unread
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Client, eventually, serving


class File:
    """Knows one episode, and who asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def episode(self, name: str) -> Any:
        self.asked.append((name, threading.current_thread() is threading.main_thread()))
        return name.upper() if name == "known" else None


async def test_a_command_is_given_again_once_what_it_asks_for_is_read() -> None:
    recalled = Recalled(file := File())  # type: ignore[arg-type]
    given = []

    def command() -> list[Any]:
        given.append(1)
        return [recalled.episode(name) for name in ("known", "none", "new")]

    assert await recalled.decide(command, unknown=("new",)) == ["KNOWN", None, None]
    assert (len(given), file.asked) == (3, [("known", False), ("none", False)])
    with pytest.raises(Unread):
        recalled.episode("known")
    assert await asyncio.to_thread(recalled.episode, "known") == "KNOWN"
    with pytest.raises(ZeroDivisionError):
        await recalled.decide(lambda: 1 / 0)


async def until_archived(client: Client) -> None:
    """Something is in the archive, and not on its way there."""
    episodes = client.store.state.episodes
    await eventually(lambda: episodes.archived and not episodes.leaving)


async def test_no_request_reads_the_archive_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEPT_EPISODES", 0)
    monkeypatch.setattr(compactor, "RETAIN_S", 0.0)
    main, ask = threading.main_thread(), ArchiveFile._ask
    read = list[str]()

    def off_the_loop(self: ArchiveFile, question: str, *values: Any) -> Any:
        assert threading.current_thread() is not main
        read.append(question)
        return ask(self, question, *values)

    monkeypatch.setattr(ArchiveFile, "_ask", off_the_loop)
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), archive_max_age=3600.0) as client:
        await client.chat("ep")
        await client.control("POST", "/episodes/ep/rewards", {"value": 1.0, "id": "r"})
        batch = (await client.control("POST", "/batches/lease", {"group_size": 1})).headers
        assert batch["Content-Type"].startswith("application/")
        name = (await client.control("GET", "/overview")).json["leases"][0]["batch"]
        assert (await client.control("POST", f"/batches/{name}/ack", {"policy_version": 1})).status == 200

        await until_archived(client)
        assert (await client.control("GET", "/episodes/ep")).json["stored"] == "archive"
        assert (await client.control("GET", "/episodes")).json["episodes"][0]["episode"] == "ep"
        assert (await client.control("POST", "/episodes/ep/rewards", {"value": 1.0, "id": "r"})).status == 200
        assert (await client.control("POST", "/episodes/ep/heartbeat")).json["state"] == "trained"
        assert (await client.control("POST", f"/batches/{name}/ack", {"policy_version": 1})).status == 200
        assert (await client.control("POST", "/episodes", {"id": "ep"})).json["error"]["code"] == "episode_exists"
        assert (await client.control("POST", "/episodes", {})).status == 200, "an id of its own, also when asked again"
        assert (await client.chat("ep")).json["error"]["code"] == "episode_trained"
        assert (await client.chat("ep", X_AJet_Reward="1")).status == 409
        for episode in ("other", "another"):
            assert (await client.chat(episode)).status == 200
        assert (await client.ask("POST", "/v1/chat/completions", {
            "model": "stub", "messages": [{"role": "user", "content": "Hi"}], "user": "ep",
        })).status == 200
        assert len(read) > 10


async def test_who_waits_for_the_archive_takes_no_room_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others open episodes meanwhile: no lane gets more of them than it has room for, none is opened twice, and runs
    that share a name are told apart."""
    monkeypatch.setattr(retention, "KEPT_EPISODES", 0)
    monkeypatch.setattr(compactor, "RETAIN_S", 0.0)
    ask = ArchiveFile._ask

    def slowly(self: ArchiveFile, question: str, *values: Any) -> Any:
        time.sleep(0.05)
        return ask(self, question, *values)

    monkeypatch.setattr(ArchiveFile, "_ask", slowly)
    settings = {"archive_max_age": 3600.0, "group_size": 2}
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), **settings) as client:
        await client.control("POST", "/episodes", {"id": "old"})
        await client.control("POST", "/episodes/old/abort", {})
        await until_archived(client)
        rewarded = await asyncio.gather(*(client.chat("ep", X_AJet_Reward="1") for _ in range(4)))
        assert [answer.status for answer in rewarded] == [200] * 4
        same = [{"role": "user", "content": "Hi"}]
        told = await asyncio.gather(*(client.ask("POST", "/v1/chat/completions", {
            "model": "stub", "messages": same, "user": "somebody", "seed": number,
        }) for number in range(4)))
        assert [answer.status for answer in told] == [200] * 4
        known = (await client.control("GET", "/episodes")).json["episodes"]
        assert sorted(one["identified_by"] for one in known[:4]) == ["body", "lineage", "lineage", "lineage"]
        await client.control("PUT", "/mix", {"ahead": 1})
        for lane, named in (("a", {"id": "ep-{}"}), ("b", {})):
            opened = await asyncio.gather(*(
                client.control("POST", "/episodes", {
                    "task": f"{lane}/t", "hold_s": 0.5, **{key: name.format(number) for key, name in named.items()}
                }) for number in range(4)
            ))
            assert sorted(answer.status for answer in opened) == [200, 200, 503, 503]
