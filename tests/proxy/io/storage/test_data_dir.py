"""A data directory is held by one proxy, and a start that finds its journal gone begins no other one there."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from ajet_proxy.io.storage.data_dir import COMPACTING, begin, lock
from ajet_proxy.io.storage.journal import JournalDamaged, segments
from ajet_proxy.io.storage.store import Store
from ajet_proxy.offline import replay_lines
from ajet_sdk.errors import AjetError, Conflict
from tests.kit.ledger_rig import SETTINGS


def test_one_proxy_to_a_directory(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(Conflict, match=rf"another proxy \(process {os.getpid()}\) is using") as caught:
        lock(tmp_path)
    assert caught.value.code == "data_dir_locked"
    os.close(held)
    os.close(lock(tmp_path))



def used(data_dir: Path) -> None:
    """Let a proxy run there for a moment."""

    async def run() -> None:
        store = Store.open(data_dir, SETTINGS)
        await store.commit(store.commands.restarted(1.0))
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("emptied", [False, True])
def test_a_directory_that_lost_its_journal_is_refused(tmp_path: Path, emptied: bool) -> None:
    used(tmp_path)
    shutil.rmtree(tmp_path / "journal")
    if emptied:
        (tmp_path / "journal").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=r"no journal, and compacting next to it .* restore it") as caught:
            Store.open(tmp_path, SETTINGS)
        assert caught.value.code == "journal_missing" and "\n" not in caught.value.message
    with pytest.raises(JournalDamaged, match="holds no journal"):
        list(replay_lines(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "compacting").unlink()
    used(tmp_path)


def test_an_archive_without_a_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "archive.sqlite").touch()
    with pytest.raises(JournalDamaged, match=r"archive\.sqlite next to it"):
        Store.open(tmp_path, SETTINGS)
    with pytest.raises(AjetError):
        list(replay_lines(tmp_path))


def test_what_is_there_before_a_first_start_is_no_trace_of_one(tmp_path: Path) -> None:
    for name in ("lock", "secret", "revoked", "audit.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "ca").mkdir()
    (tmp_path / "journal").mkdir()
    used(tmp_path)
    used(tmp_path)


def test_a_kill_at_any_moment_of_a_first_start_leaves_what_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first segment's being on disk, nothing that counts as a trace is there."""
    whole = []
    for step in ("mkdir", "open", "pwrite", "fsync"):
        data = tmp_path / step
        data.mkdir()
        os.close(lock(data))
        with monkeypatch.context() as patch:
            patch.setattr(Path if step == "mkdir" else os, step, killed)
            with pytest.raises(KeyboardInterrupt):
                begin(data)
        whole.append(bool(segments(data)))
        assert not (data / "compacting").exists()
        begin(data)
        assert [path.name for path in segments(data)] == ["00000001.log"]
    assert whole == [False, False, True, True]


def killed(*arguments: object, **more: object) -> None:
    raise KeyboardInterrupt


def test_a_snapshot_without_the_segment_behind_it_is_refused(tmp_path: Path) -> None:
    used(tmp_path)
    (path,) = segments(tmp_path)
    path.rename(path.with_name("00000001.snapshot"))
    with pytest.raises(JournalDamaged, match=r"00000002\.log is missing; it begins where the snapshot"):
        Store.open(tmp_path, SETTINGS)


def test_a_first_segment_without_its_beginning_was_another_one(tmp_path: Path) -> None:
    """It is on disk, beginning and all, before anything else is."""
    begin(tmp_path)
    (tmp_path / COMPACTING).touch()
    begin(tmp_path)
    for left in (b"", b"\0" * 100):
        segments(tmp_path)[0].write_bytes(left)
        with pytest.raises(JournalDamaged, match="holds no journal, and compacting next to it"):
            begin(tmp_path)
    (tmp_path / COMPACTING).unlink()
    begin(tmp_path)
