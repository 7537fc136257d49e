"""The journal moved, removed or replaced under the daemon: nothing is acknowledged any more, and that is said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ajet_proxy.io.storage.journal import END_OF_SEGMENT, Journal, JournalDamaged, JournalGone, records, segments
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import NotReady
from tests.kit.ledger_rig import SETTINGS
from tests.proxy.io.storage.test_journal import opened, until
from tests.proxy.io.storage.test_store import quick, story
from tests.proxy.serving import eventually


def begun(data: Path) -> Journal:
    """A journal that has written something."""
    journal, _ = opened(data)
    journal.append([b"before"])
    until(lambda: journal.durable == 1)
    return journal


def moved(data: Path) -> None:
    (data / "journal").rename(data / "away")


def removed(data: Path) -> None:
    shutil.rmtree(data / "journal")


def emptied(data: Path) -> None:
    removed(data)
    (data / "journal").mkdir()


def unlinked(data: Path) -> None:
    segments(data)[-1].unlink()


def replaced(data: Path) -> None:
    copy = data / "copy"
    shutil.copytree(data / "journal", copy)
    shutil.rmtree(data / "journal")
    copy.rename(data / "journal")


def a_file(data: Path) -> None:
    removed(data)
    (data / "journal").touch()


def cut_short(data: Path) -> None:
    os.truncate(segments(data)[-1], 0)


GONE = pytest.mark.parametrize("gone", [moved, removed, emptied, unlinked, replaced, a_file, cut_short])


@GONE
@pytest.mark.parametrize("what", ["write", "end of segment", "nothing"])
def test_it_is_noticed_with_and_without_a_write(tmp_path: Path, gone: Callable[[Path], None], what: str) -> None:
    journal = begun(tmp_path)
    gone(tmp_path)
    if what != "nothing":
        journal.append([b"after"] if what == "write" else [END_OF_SEGMENT])
    until(lambda: journal.error is not None)
    assert isinstance(journal.error, JournalGone) and "put" in str(journal.error)
    assert journal.durable == 1
    assert journal.close() == (what != "nothing")
    assert isinstance(journal.error, JournalGone)
    if gone is emptied:
        assert not list((tmp_path / "journal").iterdir())


@pytest.mark.parametrize("held", [[], [b"held"], [b"held", END_OF_SEGMENT, b"too"]])
def test_put_back_it_goes_on_and_nothing_is_lost_or_doubled(tmp_path: Path, held: list[bytes]) -> None:
    journal = begun(tmp_path)
    moved(tmp_path)
    journal.append(held)
    until(lambda: journal.error is not None)
    (tmp_path / "away").rename(tmp_path / "journal")
    until(lambda: journal.error is None)
    journal.append([b"after"])
    assert journal.close() == 0
    assert [record for record in [b"before", *held, b"after"] if record] == list(records(tmp_path))


def test_put_back_while_it_closes_it_is_whole(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    moved(tmp_path)
    until(lambda: journal.error is not None)
    (tmp_path / "away").rename(tmp_path / "journal")
    assert journal.close() == 0 and journal.error is None


async def test_the_store_takes_nothing_in_and_says_so_to_the_end(tmp_path: Path) -> None:
    store = Store.open(tmp_path, SETTINGS, journal=quick)
    first, second, *_ = story()
    await store.commit(first)
    assert store.healthy and store.alerts() == {}
    removed(tmp_path)
    await eventually(lambda: not store.healthy)
    with pytest.raises(NotReady, match="its file is gone"):
        await store.commit(second)
    assert "moved, removed, replaced or cut short under the proxy: put" in store.alerts()["journal"]
    with pytest.raises(JournalDamaged, match="restore it from a copy"):
        await store.close()
