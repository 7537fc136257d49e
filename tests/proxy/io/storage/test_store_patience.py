"""A disk that does not write: nobody waits for it for longer than the store is told to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ajet_proxy.core.ledger.events import CallFinished
from ajet_proxy.io.storage.codec import decode
from ajet_proxy.io.storage.journal import records
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
