"""The store: what it says has happened is on disk, and a restart at any byte finds a state that was once live."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import CallFinished, EpisodeSealed, EpisodeTouched, Event, TaskNamed
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage.codec import decode
from ajet_proxy.io.storage.journal import FRAME, MAGIC, Journal, JournalDamaged, framed, records, segments
from ajet_proxy.io.storage.store import SUBSCRIBER_EVENTS, Store
from ajet_sdk.errors import NotReady
from tests.kit.disk import Disk
from tests.kit.histories import folded
from tests.kit.ledger_rig import SETTINGS, LedgerRig, check, picture
from tests.kit.steps import counting
from tests.proxy.serving import eventually


def quick(data: Path, on_progress: Callable[[], None]) -> Journal:
    return Journal(data, on_progress, retry_s=0.01)


def opened(data: Path, metrics: Metrics | None = None) -> Store:
    return Store.open(data, SETTINGS, metrics=metrics, journal=quick)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = opened(tmp_path)
    yield store
    await store.close()


def story() -> list[list[Event]]:
    """The events, command by command: episodes in every state, a restart, a batch that came back."""
    rig, out = LedgerRig(), []
    run = rig.run

    def keep(events: Any) -> Any:
        out.append(list(events))
        return run(events)

    rig.run = keep  # type: ignore[method-assign]
    rig.announce("m", 3, ("http://engine",))
    for state in ("trained", "leased", "recorded", "discarded", "sealed", "open", "ready"):
        rig.in_state(state)
    batch = rig.lease(group_size=1)
    assert batch is not None
    rig.nack(batch)
    rig.restart()
    rig.ready()
    return [events for events in out if events]


async def tell(store: Store) -> list[Event]:
    """Live through `story`."""
    events = story()
    for command in events:
        await store.commit(command)
    return [event for command in events for event in command]


# ---- restarts


async def test_a_kill_at_any_byte_leaves_a_state_that_was_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every record, and at every byte of the last one."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the files outlive this process anyway
    (tmp_path / "live").mkdir()
    store = opened(tmp_path / "live")
    events = await tell(store)
    await store.close()
    (path,) = segments(tmp_path / "live")
    whole = path.read_bytes()
    pictures = [picture(folded(events[:count])) for count in range(len(events) + 1)]
    ends = [len(MAGIC)]
    for record in records(tmp_path / "live"):
        ends.append(ends[-1] + FRAME.size + len(record))
    data = tmp_path / "cut"
    (data / "journal").mkdir(parents=True)
    for size in sorted({0, *ends, *range(ends[-2], ends[-1])}):
        shutil.rmtree(data / "journal")
        (data / "journal").mkdir()
        (data / "journal" / path.name).write_bytes(whole[:size])
        survivor = opened(data)
        check(survivor.state)
        assert picture(survivor.state) == pictures[max(sum(end <= size for end in ends) - 1, 0)]
        await survivor.close()


@pytest.mark.parametrize(("first", "words"), [
    (MAGIC + framed([msgpack.packb(["EpisodePainted", {"at": 1.0}])]), "another version"),
    (MAGIC[:3], r"00000001\.log"),
])
async def test_a_journal_that_is_newer_or_damaged_is_refused_and_let_go(
    tmp_path: Path, first: bytes, words: str
) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00000001.log").write_bytes(first)
    (tmp_path / "journal" / "00000002.log").write_bytes(MAGIC)
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=words):
            opened(tmp_path)


# ---- durability


async def test_a_commit_returns_when_it_is_on_disk(store: Store, disk: Disk, tmp_path: Path) -> None:
    (command, *_) = story()
    disk.hold()
    waiting = asyncio.ensure_future(store.commit(command))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert store.state.weights.models() == ("m",)
    disk.release()
    await waiting
    assert [decode(record) for record in records(tmp_path)] == command


async def test_a_repetition_waits_for_the_first(store: Store, disk: Disk) -> None:
    """The command had nothing to do, because its first run is applied; but that one is not on disk yet."""
    disk.hold()
    store.post(story()[0])
    repeated = asyncio.ensure_future(store.commit(()))
    await asyncio.sleep(0.05)
    assert not repeated.done()
    disk.release()
    await repeated
    await store.commit(())


async def test_many_commits_at_once(store: Store, disk: Disk) -> None:
    rig = LedgerRig()
    opens = []
    for index in range(100):
        seen = len(rig.events)
        rig.open(f"e{index}")
        opens.append(rig.events[seen:])
    await asyncio.gather(*(store.commit(events) for events in opens))
    assert views.status(store.state)["episodes"]["open"] == 100
    assert disk.synced < 50


async def test_a_waiter_that_leaves_disturbs_nobody(store: Store, disk: Disk) -> None:
    first, second, *_ = story()
    disk.hold()
    leaver = asyncio.ensure_future(store.commit(first))
    stayer = asyncio.ensure_future(store.commit(second))
    await asyncio.sleep(0.02)
    leaver.cancel()
    disk.release()
    await stayer
    assert leaver.cancelled()


async def test_the_time_of_a_commit_is_reported(tmp_path: Path, disk: Disk) -> None:
    store = opened(tmp_path, metrics := Metrics())
    disk.hold()
    waiting = asyncio.ensure_future(store.commit(story()[0]))
    await asyncio.sleep(0)  # from now on the commit waits
    await asyncio.sleep(0.05)
    disk.release()
    await waiting
    await store.close()
    said = dict(line.split() for line in metrics.render().splitlines() if line.startswith("ajet_commit_seconds_"))
    assert said["ajet_commit_seconds_count"] == "1" and float(said["ajet_commit_seconds_sum"]) >= 0.04


# ---- a disk that refuses


def deciding(store: Store) -> LedgerRig:
    """A rig that decides over `store`."""
    rig = LedgerRig()
    rig.state, rig.commands = store.state, store.commands
    rig.run = store.post  # type: ignore[method-assign, assignment]
    return rig


def finished() -> CallFinished:
    """The end of the call that a `broken` store has in flight."""
    rig = LedgerRig()
    rig.open("ep", task="t")
    rig.begin("ep")
    rig.finish("ep", "call-000")
    (found,) = [event for event in rig.events if isinstance(event, CallFinished)]
    return found


async def broken(store: Store, disk: Disk) -> LedgerRig:
    """A store with one call in flight whose disk has just failed, and a rig to decide by."""
    rig = deciding(store)
    rig.open("ep", task="t")
    rig.begin("ep")
    await store.commit(())
    disk.fail("fdatasync")
    with pytest.raises(NotReady) as caught:
        await store.commit(rig.commands.heartbeat("ep", at=rig.at))
    assert caught.value.retry_after
    assert not store.healthy
    return rig


async def test_a_full_disk_stops_intake_and_changes_nothing(store: Store, disk: Disk) -> None:
    rig = await broken(store, disk)
    before = picture(store.state)
    with pytest.raises(NotReady):
        rig.open("new")
    with pytest.raises(NotReady):
        rig.begin("ep")
    with pytest.raises(NotReady):
        await store.commit(())
    assert picture(store.state) == before


async def test_what_ends_on_a_full_disk_waits_for_it_and_is_not_lost(store: Store, disk: Disk, tmp_path: Path) -> None:
    rig = await broken(store, disk)
    ending = asyncio.ensure_future(store.commit([finished()]))
    await asyncio.sleep(0.05)
    assert not ending.done()
    assert store.state.tallies.calls["running"] == 0
    disk.heal()
    await ending
    while not store.healthy:
        await store.leasable(store.state.leasable(), 0.005)
    await store.commit(rig.commands.seal("ep", at=rig.at))
    written = [decode(record) for record in records(tmp_path)]
    assert [type(event) for event in written[-2:]] == [CallFinished, EpisodeSealed]
    assert picture(folded(written)) == picture(store.state)


async def test_thousands_who_wait_for_a_disk_that_fails_are_told_together(store: Store, disk: Disk) -> None:
    rig = deciding(store)
    rig.open("ep", task="t")
    await store.commit(())
    disk.hold()
    ends = [asyncio.ensure_future(store.commit([TaskNamed(rig.at, "ep", f"t{place}")])) for place in range(4000)]
    touched = rig.commands.heartbeat("ep", at=rig.at)
    others = [asyncio.ensure_future(store.commit(touched)) for _ in range(4000)]
    await asyncio.sleep(0)
    disk.fail("fdatasync")
    with counting() as steps:
        disk.release()
        assert all(isinstance(told, NotReady) for told in await asyncio.gather(*others, return_exceptions=True))
    assert steps() < 1000 * (len(ends) + len(others)), "not one look for each at all others"
    assert not any(end.done() for end in ends)
    disk.heal()
    await asyncio.gather(*ends)


async def test_what_was_refused_can_be_asked_again(store: Store, disk: Disk, tmp_path: Path) -> None:
    """The reward was applied and its answer refused; asked again, it is there once."""
    rig = deciding(store)
    rig.open("ep", task="t")
    await store.commit(())
    disk.fail("pwrite", taken=5)
    rig.reward("ep", 1.0, id="r", final=False)
    with pytest.raises(NotReady):
        await store.commit(())
    assert rig.reward("ep", 1.0, id="r", final=False) is None
    disk.heal()
    while not store.healthy:
        await store.leasable(store.state.leasable(), 0.005)
    await store.commit(())
    names = [type(decode(record)).__name__ for record in records(tmp_path)]
    assert names == ["EpisodeOpened", "RewardGiven"]


async def test_closing_on_a_full_disk_tells_those_who_wait(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    await broken(store, disk)
    other = LedgerRig()
    other.open("ep")
    (call,) = other.begin("ep")
    ending = asyncio.ensure_future(store.commit(other.commands.lose_call("ep", call, "x", at=2000.0)))
    await asyncio.sleep(0.02)
    await store.close()
    with pytest.raises(NotReady):
        await ending
    assert "2 records that the disk did not take" in caplog.text


async def test_what_ends_on_a_full_disk_does_not_wait_for_ever(tmp_path: Path, disk: Disk) -> None:
    """It is refused after a while, and on disk all the same once that can be written."""
    store = Store.open(tmp_path, SETTINGS, patience_s=0.05, journal=quick)
    await broken(store, disk)
    async with asyncio.timeout(300):
        with pytest.raises(NotReady) as caught:
            await store.commit([finished()])
    assert (caught.value.code, caught.value.retry_after) == ("journal", 2.0)
    disk.heal()
    await store.close()
    assert [decode(record) for record in records(tmp_path)][-1] == finished()


async def test_a_disk_that_says_nothing_is_not_waited_for_either(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(tmp_path, SETTINGS, patience_s=0.05, journal=quick)
    disk.hold()
    async with asyncio.timeout(300):
        with pytest.raises(NotReady, match=r"not take this within 0\.05 seconds"):
            await store.commit(story()[0])
    disk.release()
    await store.close()


async def test_each_waits_as_long_as_its_own_patience(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(tmp_path, SETTINGS, patience_s=0.2, journal=quick)
    disk.hold()
    first = asyncio.create_task(store.commit(story()[0]))
    await asyncio.sleep(0.1)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(300):
        for waiting in (asyncio.create_task(store.commit(())), first):
            with pytest.raises(NotReady, match="not take this"):
                await waiting
    assert asyncio.get_running_loop().time() - began >= 0.2
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
    assert begun.wait(300)
    assert journal.close() == 0 and not fails
    assert list(records(tmp_path)) == [b"one", b"two"]


# ---- those who watch


async def test_waiting_for_what_a_lease_may_find(store: Store) -> None:
    """Calls come and go and wake nobody; an episode that becomes ready does, and at once who looked before."""
    rig = LedgerRig()
    rig.ready()
    seen = store.state.leasable()
    waiting = [asyncio.ensure_future(store.leasable(seen, 300.0)) for _ in range(3)]
    await asyncio.sleep(0)
    store.post(rig.events[:-1])
    assert await asyncio.wait(waiting, timeout=0.01) == (set(), set(waiting))
    store.post(rig.events[-1:])
    await asyncio.wait_for(asyncio.gather(*waiting, store.leasable(seen, 300.0)), 300)


async def test_however_many_wait_it_is_looked_once_whether_there_is_anything_new(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, looks = store.state.leasable(), list[object]()
    waiting = [asyncio.ensure_future(store.leasable(seen, 300.0)) for _ in range(100)]
    await asyncio.sleep(0)
    monkeypatch.setattr(store.state, "leasable", lambda: looks.append(seen) or seen)
    store.post(story()[0])
    assert looks == [seen]
    for waits in waiting:
        waits.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_subscribers_see_every_event_until_the_end(tmp_path: Path) -> None:
    store = opened(tmp_path)
    seen: list[Event] = []

    async def watch() -> None:
        async for event in store.subscribe():
            seen.append(event)  # noqa: PERF401 (what was seen so far must stay when the watcher is stopped)

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    events = await tell(store)
    await store.close()
    await watching
    assert seen == events


async def test_a_subscriber_that_falls_behind_is_let_go(store: Store) -> None:
    stream = store.subscribe()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    event = story()[0]
    for _ in range(SUBSCRIBER_EVENTS + 2):
        store.post(event)
    assert await first == event[0]
    rest = [item async for item in stream]
    assert len(rest) == SUBSCRIBER_EVENTS
    store.post(event)
    await store.commit(())


def test_progress_after_the_loop_has_ended_is_ignored(tmp_path: Path) -> None:
    made = Mock(side_effect=quick)

    async def lives() -> None:
        await Store.open(tmp_path, SETTINGS, journal=made).close()

    asyncio.run(lives())
    made.call_args.args[1]()


def touched(store: Store) -> list[Event]:
    return [EpisodeTouched(store.state.now + 1, next(iter(store.state.episodes.unsettled)))]


async def test_what_nobody_waits_for_comes_to_the_disk_by_itself(store: Store, disk: Disk, tmp_path: Path) -> None:
    told, before = await tell(store), disk.synced
    store.post(touched(store))
    assert disk.synced == before
    await eventually(lambda: disk.synced == before + 1)
    assert len([*records(tmp_path)]) == len(told) + 1


async def test_what_nobody_waits_for_goes_along_with_what_somebody_does(
    store: Store, disk: Disk, tmp_path: Path
) -> None:
    told, before = await tell(store), disk.synced
    store.post(touched(store))
    await store.commit(touched(store))
    assert (len([*records(tmp_path)]), disk.synced) == (len(told) + 2, before + 1)
