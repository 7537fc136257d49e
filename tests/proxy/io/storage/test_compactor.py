"""The daemon's side of compaction: when it starts, what leaves memory, and what happens when it fails."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.ledger import retention, views
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage import compactor as module
from ajet_proxy.io.storage.archive import ArchiveFile
from ajet_proxy.io.storage.compaction import alone
from ajet_proxy.io.storage.compactor import Compactor
from ajet_proxy.io.storage.journal import Journal, segments, snapshots
from ajet_proxy.io.storage.store import Store
from ajet_proxy.offline import replay_lines
from tests.kit.disk import Disk
from tests.kit.ledger_rig import SETTINGS, LedgerRig, picture
from tests.kit.patience import until
from tests.kit.source import ROOT
from tests.proxy.test_serve import children


def opened(data: Path) -> Store:
    store = Store.open(
        data, SETTINGS, journal=lambda data, told: Journal(data, told, segment_bytes=2000, retry_s=0.01)
    )
    if not store.state.now:
        store.post(store.commands.restarted(1.0))  # a journal begins so
    return store


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(retention, "KEPT_EPISODES", 2)
    store = opened(tmp_path)
    yield store
    await store.close()


class Daemon:
    """A store that lives, and its compactor."""

    def __init__(self, store: Store, data: Path, **options: Any) -> None:
        self.store, self.data, self.metrics, self.at = store, data, Metrics(), 1000.0
        self.rig = LedgerRig()
        self.rig.state, self.rig.commands = store.state, store.commands
        store.state.episodes.archive = ArchiveFile(data)  # which nobody waits for here
        self.rig.run = self.post  # type: ignore[method-assign, assignment]
        self.compactor = Compactor(store, data, metrics=self.metrics, now=lambda: self.at, **options)

    def post(self, events: Any) -> Any:
        self.store.post(events)
        return events

    async def trains(self, episodes: int) -> list[str]:
        names = []
        for _ in range(episodes):
            names.append(self.rig.in_state("trained"))
            self.store.post(retention.to_archive(self.store.state, 1000.0))
            await self.store.commit(())
        return names

    @property
    def at_work(self) -> bool:
        task = self.compactor._task
        return task is not None and not task.done()

    def compactions(self, outcome: str) -> int:
        """The number of those that ended so."""
        found = re.search(rf'ajet_compactions_total{{outcome="{outcome}"}} (\d+)', self.metrics.render())
        return int(found[1]) if found else 0

    async def tick(self) -> asyncio.Task[None] | None:
        """One, and what it begins; the latest that was begun."""
        self.compactor.tick()
        if (task := self.compactor._task) is not None:
            await task
        return task

    async def ticks(self) -> None:
        """Until there is nothing more to do."""
        before = await self.tick()
        while (now := await self.tick()) is not before:
            before = now


async def test_what_is_trained_leaves_memory_and_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_EPISODES", 2)
    store = opened(tmp_path)
    daemon = Daemon(store, tmp_path)
    names = await daemon.trains(30)
    whole = {name: views.record(store.state, name, tokens="all") for name in names}
    said = list(replay_lines(tmp_path))
    assert len(store.state.episodes.leaving) == 28
    given_back = []
    monkeypatch.setattr(module, "give_memory_back", lambda: given_back.append(len(store.state.episodes.leaving)))
    await daemon.ticks()
    assert given_back[-1] == len(store.state.episodes.leaving)
    assert len(snapshots(tmp_path)) == 1
    assert len(segments(tmp_path)) <= 2
    assert len(store.state.episodes.leaving) < 10 and len(store.state.batches.leaving) < 10
    assert {name: views.record(store.state, name, tokens="all") for name in names} == whole
    assert list(replay_lines(tmp_path)) == said
    assert daemon.compactions("done") == 1
    left = picture(store.state)
    await store.close()
    again = opened(tmp_path)
    again.state.episodes.archive = ArchiveFile(tmp_path)
    assert picture(again.state) == left
    assert {name: views.record(again.state, name, tokens="all") for name in names} == whole
    await again.close()


async def test_the_more_episodes_are_in_the_archive_the_more_leave_memory_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 1)
    daemon = Daemon(store, tmp_path)
    await daemon.trains(33)
    left = []
    for _ in range(7):
        left.append(len(store.state.episodes.leaving))
        await daemon.tick()
    assert left == [31, 31, 31, 28, 26, 24, 22], "nothing has arrived at first, and a compaction is due"


async def test_a_compaction_that_fails_is_tried_again_later(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(store, tmp_path)
    await daemon.trains(30)
    first = segments(tmp_path)[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    await daemon.ticks()
    assert "is damaged at byte" in caplog.text
    assert daemon.compactions("failed") == 1
    assert len(store.state.episodes.leaving) == 28
    first.write_bytes(whole)
    daemon.compactor.tick()
    assert not daemon.at_work
    daemon.at += module.RETRY_S
    await daemon.ticks()
    assert len(store.state.episodes.leaving) < 10


async def test_why_it_fails_is_said_once_for_each_reason(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(store, tmp_path)
    await daemon.trains(30)
    monkeypatch.setattr(module.sys, "executable", "/bin/sh")
    failing = "echo {} >&2; exit 1"
    for program in (failing.format("full"), failing.format("full"), failing.format("torn"), failing.format("torn"),
                    "echo large >&2; echo 0", failing.format("torn")):
        monkeypatch.setattr(module, "COMMAND", ("-c", program))
        daemon.at += module.RETRY_S
        for _ in range(2):  # what has arrived is let go of first
            await daemon.tick()
    every = "; it is tried again every 60 seconds"
    assert [record.message for record in caplog.records] == [f"full{every}", f"torn{every}", "large", f"torn{every}"]
    assert daemon.compactions("failed") == 5
    assert daemon.compactions("done") == 1


async def test_what_cannot_be_read_or_started_does_not_end_the_daemon(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(store, tmp_path)
    await daemon.trains(30)
    (tmp_path / "archive.sqlite").write_bytes(b"no database" * 1000)
    await store_ticks(daemon)
    assert "cannot be read" in caplog.text
    (tmp_path / "archive.sqlite").unlink()
    await store_ticks(daemon)
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "nothing"))
    await store_ticks(daemon)
    await store_ticks(daemon)
    assert "cannot be started" in caplog.text
    assert daemon.compactions("failed") == 3
    assert len(store.state.episodes.leaving) == 28


async def store_ticks(daemon: Daemon) -> None:
    """One tick, after whatever was waited for."""
    daemon.at += module.RETRY_S
    await daemon.tick()


async def test_retention_is_looked_after_without_new_segments(store: Store, tmp_path: Path) -> None:
    daemon = Daemon(store, tmp_path, max_age=3600.0)
    names = await daemon.trains(30)
    await daemon.ticks()
    assert views.record(store.state, names[0], tokens="none")["stored"] == "archive"
    daemon.at += module.RETAIN_S
    await daemon.ticks()
    assert store.state.episodes.find(names[0]) is not None, "it ended an hour ago, whatever the system's clock says"
    daemon.at += module.RETAIN_S
    await daemon.ticks()
    assert store.state.episodes.find(names[0]) is None
    assert "ajet_removed_episodes_total 0" not in daemon.metrics.render()
    done = daemon.compactions("done")
    await daemon.ticks()
    assert daemon.compactions("done") == done
    daemon.at += module.RETAIN_S
    await daemon.ticks()
    assert daemon.compactions("done") == done + 1


async def test_a_disk_that_ends_no_segment_lets_none_be_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    daemon = Daemon(store, tmp_path, max_age=10.0)
    await daemon.trains(1)
    daemon.post(retention.to_archive(store.state, 1011.0, 10.0))
    disk = Disk(monkeypatch)
    disk.fail("open")
    await daemon.ticks()
    assert "the journal cannot write" in caplog.text and snapshots(tmp_path) == []
    assert daemon.compactions("failed") == 1
    disk.heal()
    daemon.at += module.RETRY_S
    while not store.healthy:
        await store.leasable(store.state.leasable(), 0.005)
    await daemon.ticks()
    assert not store.state.episodes.leaving
    await store.close()


async def test_failing_again_and_again_is_an_alert_until_it_succeeds(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(store, tmp_path)
    await daemon.trains(30)
    right = module.COMMAND
    monkeypatch.setattr(module, "COMMAND", ("-c", "raise SystemExit(1)"))
    for failures in range(1, 5):
        await daemon.ticks()
        assert daemon.compactions("failed") == failures
        assert bool(store.alerts()) == (failures >= 3)
        daemon.at += module.RETRY_S
    assert store.alerts()["compaction"].startswith("compaction failed 4 times in a row")
    monkeypatch.setattr(module, "COMMAND", right)
    await daemon.ticks()
    assert not store.alerts()


async def test_what_a_compaction_archived_before_it_failed_is_let_go_of_before_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one's retention may remove it, and then it could not be seen to have arrived."""
    daemon = Daemon(store, tmp_path, max_bytes=1)
    await daemon.trains(30)
    monkeypatch.setattr(module, "COMMAND", ("-c", FAILS_AT_THE_SNAPSHOT))
    await daemon.ticks()
    assert daemon.compactions("failed") == 1 and store.state.episodes.leaving
    daemon.at += module.RETRY_S
    before = len(store.state.episodes.leaving)
    await daemon.tick()
    assert before == 28 and len(store.state.episodes.leaving) < 10


FAILS_AT_THE_SNAPSHOT = """
import sys
from ajet_proxy.io.storage import compaction
from ajet_proxy.io.storage import snapshot
def fail(*_): raise OSError("no space")
snapshot.save = fail
compaction.main(sys.argv[1:])
"""


async def test_a_compaction_ends_with_the_daemon(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(store, tmp_path)
    await daemon.compactor.stop()
    await daemon.trains(30)
    monkeypatch.setattr(module.sys, "executable", "/bin/sh")
    monkeypatch.setattr(module, "COMMAND", ("-c", "exec sleep 900"))
    for _ in range(2):
        daemon.compactor.tick()
        await asyncio.sleep(0.1)
    assert daemon.at_work
    await asyncio.wait_for(daemon.compactor.stop(), 300)
    assert len(store.state.episodes.leaving) == 28


DAEMON = """
import asyncio, sys, time
from pathlib import Path
from ajet_proxy.io.storage.compactor import Compactor
from ajet_proxy.io.runtime.metrics import Metrics

async def main():
    await Compactor(None, Path(sys.argv[1]), metrics=Metrics(), now=time.monotonic)._run()

asyncio.run(main())
"""


def runs(process: int) -> bool:
    """Tell whether it does, and is not only what init has yet to bury."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the child in /proc")
def test_a_compaction_does_not_outlive_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """Also where it waits, as here for another one."""
    with alone(tmp_path):
        daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(tmp_path)], cwd=ROOT)
        try:
            assert until(lambda: children(daemon.pid))
            (orphan,) = children(daemon.pid)
            daemon.kill()
        finally:
            daemon.wait()
        try:
            assert until(lambda: not runs(orphan))
        finally:
            if runs(orphan):
                os.kill(orphan, signal.SIGKILL)
    with alone(tmp_path):
        pass  # as a start does it
