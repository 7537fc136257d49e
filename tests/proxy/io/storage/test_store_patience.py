"""A disk that does not write: nobody waits for it for longer than the store is told to."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from ajet_proxy.core.ledger.events import CallFinished
from ajet_proxy.io.storage.codec import decode
from ajet_proxy.io.storage.journal import Journal, records
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import NotReady
from tests.kit.disk import Disk
from tests.kit.ledger_rig import SETTINGS, LedgerRig
from tests.proxy.io.storage.test_store import broken, disk, quick, story

__all__ = ["disk"]


async def test_what_ends_on_a_full_disk_does_not_wait_for_ever(tmp_path: Path, disk: Disk) -> None:
    """It is refused after a while, and on disk all the same once that can be written."""
    store = Store.open(tmp_path, SETTINGS, journal=quick)
    await broken(store, disk)
    store.patience_s = 0.05
    other = LedgerRig()
    other.open("ep", task="t")
    other.begin("ep")
    other.finish("ep", "call-000")
    (finished,) = [event for event in other.events if isinstance(event, CallFinished)]
    async with asyncio.timeout(20):
        with pytest.raises(NotReady) as caught:
            await store.commit([finished])
    assert (caught.value.code, caught.value.retry_after) == ("journal", 2.0)
    disk.heal()
    await store.close()
    assert [decode(record) for record in records(tmp_path)][-1] == finished


async def test_a_disk_that_says_nothing_is_not_waited_for_either(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(tmp_path, SETTINGS, patience_s=0.05, journal=quick)
    disk.hold()
    async with asyncio.timeout(20):
        with pytest.raises(NotReady, match=r"not take this within 0\.05 seconds"):
            await store.commit(story()[0])
    disk.release()
    await store.close()


def test_a_write_that_fails_as_the_journal_closes_is_tried_once_more(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began before, and the disk may have healed since."""
    journal, real, fails = Journal(tmp_path, lambda: None), os.fdatasync, [True]
    begun = threading.Event()

    def sync(descriptor: int) -> None:
        if fails:
            begun.set()
            while not journal._closing:
                time.sleep(0.001)
            fails.pop()
            raise OSError(errno.ENOSPC, "full")
        real(descriptor)

    for record in journal.open():
        raise AssertionError(record)
    monkeypatch.setattr(os, "fdatasync", sync)
    journal.append([b"one", b"two"])
    journal.flush()
    assert begun.wait(20)
    assert journal.close() == 0 and not fails
    assert list(records(tmp_path)) == [b"one", b"two"]
