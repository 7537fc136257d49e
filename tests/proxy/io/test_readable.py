"""Nothing is written that cannot be read: not in the journal, not in a snapshot, not in the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.io.storage import archive, compaction, journal, snapshot
from ajet_proxy.io.storage.archive import ArchiveFile
from ajet_proxy.io.storage.compaction import compact
from ajet_proxy.io.storage.journal import MAGIC, JournalDamaged, folder_of, framed, read, snapshots
from ajet_proxy.io.storage.store import Store
from ajet_proxy.offline import replay_lines
from ajet_sdk.errors import TooLarge
from tests.kit.histories import encoded, everything, write_segments
from tests.kit.ledger_rig import SETTINGS, LedgerRig, picture
from tests.proxy.io.storage.test_compaction import eventful, same, state_in


def files(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder_of(data).iterdir()}


def test_a_record_is_no_longer_than_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_RECORD", 10)
    path = tmp_path / "segment"
    path.write_bytes(MAGIC + framed([b"x" * 10]))
    assert [record for record, _ in read(path)] == [b"x" * 10]
    with pytest.raises(TooLarge, match="a record of 11 bytes is more than the journal holds"):
        framed([b"x", b"x" * 11])
    path.write_bytes(MAGIC + journal.FRAME.pack(11, journal.crc32(b"x" * 11)) + b"x" * 11)
    assert list(read(path)) == []


async def test_what_the_journal_cannot_hold_does_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But what stood before it in the same command does, on the disk too."""
    rig = LedgerRig()
    rig.call(rig.open(), range(1000))
    events = rig.events
    heard: list[Any] = []
    store = Store.open(tmp_path, SETTINGS)
    store.listen(heard.extend)
    monkeypatch.setattr(journal, "MAX_RECORD", 1000)
    with pytest.raises(TooLarge):
        await store.commit(events)
    at = events.index(*[event for event in events if type(event).__name__ == "CallFinished"])
    assert heard == events[:at]
    assert store.state.tallies.calls == {"running": 1, "complete": 0, "lost": 0}
    await store.commit(store.commands.lose_call("ep-000", "call-001", "engine_error", at=rig.at))
    left = picture(store.state)
    await store.close()
    again = Store.open(tmp_path, SETTINGS)
    assert picture(again.state) == left
    await again.close()


@pytest.mark.parametrize("piece", [1, 7, 300])
def test_an_episode_may_be_larger_than_any_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) // 2, len(rig.events)])
    said = list(replay_lines(tmp_path))
    monkeypatch.setattr(snapshot, "PIECE", piece)
    compact(tmp_path)
    assert max(len(record) for record, _ in read(snapshots(tmp_path)[0])) <= piece
    same(tmp_path, rig, said)


def unreadable() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Faults of the values of a snapshot."""
    yield "a value is missing", lambda values: list(values)[:-2] + list(values)[-1:]
    yield "the count is wrong", lambda values: [*list(values)[:-1], snapshot.pack(99)]
    yield "a field is missing", lambda values: [values[0], msgpack.packb(["Episode", {}]), *values[1:]]
    yield "no values", lambda values: [b"\xc1", *values]
    yield "none", lambda values: []


@pytest.mark.parametrize("wrong", [wrong for _, wrong in unreadable()], ids=[name for name, _ in unreadable()])
def test_what_a_snapshot_that_cannot_be_read_stands_for_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]
) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [20, 40])
    (folder_of(tmp_path) / "00000003.log").rename(tmp_path / "later")
    compact(tmp_path)
    (tmp_path / "later").rename(folder_of(tmp_path) / "00000003.log")
    before, said, pack_state = files(tmp_path), list(replay_lines(tmp_path)), snapshot.pack_state
    monkeypatch.setattr(snapshot, "pack_state", lambda state: wrong(list(pack_state(state))))
    with pytest.raises(JournalDamaged, match=r"snapshot\.new is damaged"):
        compact(tmp_path)
    assert files(tmp_path) == before and len(before) == 3
    same(tmp_path, rig, said)
    monkeypatch.undo()
    compact(tmp_path)
    same(tmp_path, rig, said)


def test_what_another_kind_of_machine_wrote_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LedgerRig()
    rig.open()
    (tmp_path / "journal").mkdir()
    monkeypatch.setattr(snapshot, "HEADER", ("ajet-snapshot-0", "little"))
    snapshot.save(tmp_path, 1, rig.state)
    monkeypatch.undo()
    with pytest.raises(JournalDamaged, match="of another version"):
        snapshot.load(tmp_path, SETTINGS)


def test_a_set_of_names_is_no_object(tmp_path: Path) -> None:
    """Whatever agents call their models."""
    rig = LedgerRig()
    name = rig.in_state("ready")
    rig.state.episodes[name].shares.taken = {"Text", "m"}
    (tmp_path / "journal").mkdir()
    snapshot.save(tmp_path, 1, rig.state)
    assert everything(snapshot.load(tmp_path, SETTINGS)) == everything(rig.state)


@pytest.mark.parametrize("by_size", [True, False])
def test_an_episode_that_the_archive_cannot_hold_loses_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by_size: bool
) -> None:
    """Its tokens may be too many, or what is known of its calls."""
    rig = LedgerRig()
    small, large = rig.in_state("trained"), rig.open(task="t", eval=True)
    for _ in range(1 if by_size else 300):
        call = rig.call(large, range(3000 if by_size else 1), (7,), agent="white")
    rig.reward(large, 0.25, call=call, note="kept", final=False)
    rig.reward(large, 0.75)
    rig.seal(large)
    rig.archive()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events)])
    monkeypatch.setattr(archive, "MAX_BODY", 10_000)
    compact(tmp_path)
    assert f"episode {large} has more than 10000 bytes: it is archived without its calls" in caplog.text
    reader = ArchiveFile(tmp_path)
    found = [reader.episode(name) for name in (small, large)]
    reader.close()
    assert [episode.stored for episode in found if episode is not None] == ["archive", "removed"]
    state = state_in(tmp_path)
    whole, rest = views.record(state, small), views.record(state, large)
    assert (len(whole["calls"]), rest["calls"], rest["reward"], rest["state"]) == (1, [], 1.0, "recorded")
    assert (rest["rewards"][0]["note"], rest["rewards"][0]["agent"]) == ("kept", "white")


@pytest.mark.parametrize(("error", "words"), [(MemoryError(), "MemoryError"), (OSError(28, "full"), "full")])
def test_what_a_compaction_lacks_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(compaction, "compact", fails)
    with pytest.raises(SystemExit, match=f"cannot compact .*{words}"):
        compaction.main([str(tmp_path), "0", "0"])
