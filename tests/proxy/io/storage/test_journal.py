"""The journal against kills, torn tails, damage and disks that refuse."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from ajet_proxy.io.storage.journal import (
    END_OF_SEGMENT,
    FRAME,
    MAGIC,
    Journal,
    JournalDamaged,
    framed,
    read_segment,
    records,
    segments,
)
from tests.kit.disk import Disk

RECORDS = [b"\x92\xa5First", b"\x92\xa6Second record", b"\x92\xbf" + b"T" * 300, b"\x92\xa0F" + b"\x00\xff" * 5]


def until(fact: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def opened(data: Path, *, segment_bytes: int = 1 << 20) -> tuple[Journal, list[bytes]]:
    journal = Journal(data, lambda: None, segment_bytes=segment_bytes, retry_s=0.01)
    return journal, list(journal.open())


def write(data: Path, items: list[bytes], **options: int) -> None:
    journal, _ = opened(data, **options)
    for item in items:
        number = journal.append([item])
        until(lambda number=number: journal.durable >= number)  # type: ignore[misc]
    assert journal.close() == 0


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert list(records(tmp_path)) == []
    write(tmp_path, RECORDS[:2])
    write(tmp_path, RECORDS[2:])
    assert list(records(tmp_path)) == RECORDS
    journal, found = opened(tmp_path)
    assert found == RECORDS
    assert journal.close() == 0


def test_nothing_written_leaves_nothing(tmp_path: Path) -> None:
    journal, found = opened(tmp_path)
    assert (found, journal.close(), segments(tmp_path)) == ([], 0, [])


def test_closing_writes_what_is_pending(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    journal.append(RECORDS)
    assert journal.close() == 0
    assert list(records(tmp_path)) == RECORDS


def test_closing_before_opening(tmp_path: Path) -> None:
    assert Journal(tmp_path, lambda: None).close() == 0


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    for path in (tmp_path / "journal", *segments(tmp_path)):
        assert path.stat().st_mode & 0o077 == 0


def test_a_journal_cut_at_any_byte_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    ends = [len(MAGIC)]
    for record in RECORDS:
        ends.append(ends[-1] + FRAME.size + len(record))
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        expected = RECORDS[: max(sum(end <= size for end in ends) - 1, 0)]
        assert list(records(tmp_path)) == expected
        if size < ends[-2]:
            continue
        write(tmp_path, [b"more"])  # every byte of the last record, through a restart that goes on writing
        assert list(records(tmp_path)) == [*expected, b"more"]


@pytest.mark.parametrize("size", [0, 1, len(MAGIC) - 1, len(MAGIC)])
def test_a_segment_that_was_only_just_begun(tmp_path: Path, size: int) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00000001.log").write_bytes(MAGIC[:size])
    write(tmp_path, RECORDS)
    assert list(records(tmp_path)) == RECORDS


def test_a_cut_tail_is_reported_and_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, RECORDS)
    (path,) = segments(tmp_path)
    with path.open("ab") as stream:
        stream.write(b"\x00" * 100)
    journal, found = opened(tmp_path)
    assert found == RECORDS
    assert "cut 100 bytes off" in caplog.text
    (torn,) = path.parent.glob("*.torn-*")
    assert torn.read_bytes() == b"\x00" * 100
    assert journal.close() == 0
    assert list(records(tmp_path)) == RECORDS


def test_a_record_that_an_agent_wrote_into_a_torn_one_is_none(tmp_path: Path) -> None:
    write(tmp_path, RECORDS[:1])
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    inner = framed([RECORDS[1]])
    torn = framed([RECORDS[0] + inner * 3 + b"z" * 100])
    first = FRAME.size + len(RECORDS[0])
    for cut in range(1, len(torn)):
        path.write_bytes(whole + torn[:cut])
        if cut not in {first + len(inner) * number for number in (1, 2, 3)}:  # a tear right behind one: nobody can tell
            assert list(records(tmp_path)) == RECORDS[:1]


def test_damage_in_mid_segment_is_found_though_the_tail_is_torn_too(tmp_path: Path) -> None:
    write(tmp_path, RECORDS * 3)
    (path,) = segments(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"Second")] ^= 1
    path.write_bytes(whole[:-3])
    with pytest.raises(JournalDamaged):
        list(records(tmp_path))


def test_a_flipped_bit_yields_no_wrong_record_and_is_refused_where_a_whole_one_follows(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    last = len(whole) - len(framed(RECORDS[-1:]))
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        found: list[bytes] = []
        with pytest.raises(JournalDamaged) if at < last else nullcontext():
            found.extend(records(tmp_path))
        assert found == RECORDS[: len(found)]
        assert len(found) < len(RECORDS)


def test_segments_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, segment_bytes=32)
    assert len(segments(tmp_path)) == 3
    assert list(records(tmp_path)) == RECORDS
    write(tmp_path, RECORDS, segment_bytes=32)
    assert list(records(tmp_path)) == RECORDS * 2


def test_damage_before_the_tail_is_refused(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, segment_bytes=32)
    first = segments(tmp_path)[0]
    for damage in (first.read_bytes()[:-1], b"", first.read_bytes() + b"\0"):
        first.write_bytes(damage)
        with pytest.raises(JournalDamaged, match=r"00000001.log is damaged at byte"):
            list(records(tmp_path))
        with pytest.raises(JournalDamaged):
            opened(tmp_path)


def test_a_segment_that_grows_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    found = records(tmp_path)
    first = next(found)
    write(tmp_path, RECORDS)
    assert [first, *found] == RECORDS
    assert list(records(tmp_path)) == RECORDS * 2


def test_a_segment_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, segment_bytes=32)
    first, second, _ = segments(tmp_path)
    for path in (second, first):
        path.rename(path.with_suffix(".away"))
        for read in (records, opened):
            with pytest.raises(JournalDamaged, match=rf"{path.name} is missing, and 0000000\d.log is there"):
                list(read(tmp_path))


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    for name in ("copy.log", "00000001.log.bak", "00000009 (copy).log", "old.snapshot"):
        (tmp_path / "journal" / name).write_bytes(b"mine")
    journal, found = opened(tmp_path)
    assert found == RECORDS
    assert journal.close() == 0
    assert list(records(tmp_path)) == RECORDS


# ---- durability


def test_nothing_counts_as_durable_before_it_is_synced(tmp_path: Path, disk: Disk) -> None:
    journal, _ = opened(tmp_path)
    disk.hold()
    assert [journal.append([b"a"]), journal.append([b"b", b"c"])] == [1, 3]
    time.sleep(0.05)
    assert (journal.durable, disk.synced) == (0, 0)
    disk.release()
    until(lambda: journal.durable == 3)
    assert journal.close() == 0


def test_those_who_wait_share_one_sync(tmp_path: Path, disk: Disk) -> None:
    journal, _ = opened(tmp_path)
    disk.hold()
    for index in range(200):
        journal.append([b"%d" % index])
    disk.release()
    until(lambda: journal.durable == 200)
    assert disk.synced <= 2
    assert journal.close() == 0
    assert list(records(tmp_path)) == [b"%d" % index for index in range(200)]


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("taken", [0, 7])
def test_a_disk_that_refuses_loses_nothing(tmp_path: Path, disk: Disk, call: str, error: int, taken: int) -> None:
    journal, _ = opened(tmp_path)
    journal.append([b"before"])
    until(lambda: journal.durable == 1)
    disk.fail(call, error, taken=taken)
    journal.append([b"during"])
    until(lambda: journal.error is not None)
    assert isinstance(journal.error, OSError)
    assert (journal.error.errno, journal.durable) == (error, 1)
    journal.append([b"too"])
    time.sleep(0.05)
    disk.heal()
    until(lambda: journal.durable == 3)
    assert journal.error is None
    assert journal.close() == 0
    assert list(records(tmp_path)) == [b"before", b"during", b"too"]


def test_what_the_disk_refused_does_not_stand_in_the_file(tmp_path: Path, disk: Disk) -> None:
    """A start after a kill would read it, and what was decided since then is not behind it."""
    journal, _ = opened(tmp_path)
    journal.append([b"before"])
    until(lambda: journal.durable == 1)
    disk.fail("fdatasync")
    journal.append([b"refused"])
    until(lambda: journal.error is not None)
    assert list(records(tmp_path)) == [b"before"]
    disk.heal()
    assert journal.close() == 0


@pytest.mark.parametrize("call", ["open", "fsync", "pwrite"])
def test_a_segment_that_cannot_be_begun_is_begun_later(tmp_path: Path, disk: Disk, call: str) -> None:
    journal, _ = opened(tmp_path, segment_bytes=1)
    journal.append([b"a"])
    until(lambda: journal.durable == 1)
    disk.fail(call, taken=3)
    journal.append([b"b"])
    until(lambda: journal.error is not None)
    assert [path.name for path in segments(tmp_path)] == ["00000001.log"], "a compaction would take it for ended"
    assert list(records(tmp_path)) == [b"a"]
    disk.heal()
    until(lambda: journal.durable == 2)
    assert journal.close() == 0
    assert list(records(tmp_path)) == [b"a", b"b"]


def test_nothing_is_written_behind_the_end_of_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction may remove it once the next one has its name. Nothing is durable while that name may be lost."""
    journal, _ = opened(tmp_path, segment_bytes=1)
    journal.append([b"a"])
    until(lambda: journal.durable == 1)
    first = segments(tmp_path)[0]
    ended = first.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("ajet_proxy.io.storage.journal.sync_folder", lambda folder: os.stat(folder / "refused"))
        journal.append([b"b"])
        until(lambda: journal.error is not None)
        time.sleep(0.05)
        assert (journal.durable, len(segments(tmp_path))) == (1, 2)
    until(lambda: journal.durable == 2)
    assert journal.close() == 0
    assert (first.read_bytes(), list(records(tmp_path))) == (ended, [b"a", b"b"])


def test_closing_on_a_full_disk_counts_what_is_lost(tmp_path: Path, disk: Disk) -> None:
    journal, _ = opened(tmp_path)
    disk.fail("pwrite")
    journal.append(RECORDS)
    until(lambda: journal.error is not None)
    assert journal.close() == len(RECORDS)


def test_progress_and_failure_are_told(tmp_path: Path, disk: Disk) -> None:
    told: list[tuple[int, bool]] = []
    heard = threading.Event()

    def listen() -> None:
        told.append((journal.durable, journal.error is None))
        heard.set()

    journal = Journal(tmp_path, listen, retry_s=0.01)
    assert list(journal.open()) == []
    journal.append([b"a"])
    assert heard.wait(300)
    assert told == [(1, True)]
    heard.clear()
    disk.fail("fdatasync")
    journal.append([b"b"])
    assert heard.wait(300)
    assert told[1] == (1, False)
    disk.heal()
    until(lambda: told[-1] == (2, True))
    assert journal.close() == 0


WRITER = """
import sys
from pathlib import Path
from ajet_proxy.io.storage.journal import Journal
journal = Journal(Path(sys.argv[1]), lambda: print(journal.durable, flush=True), segment_bytes=2000)
found = len(list(journal.open()))
print("found", found, flush=True)
for number in range(found, found + 100_000):
    journal.append([b"%d" % number * 20])
"""


def test_what_was_durable_before_a_kill_is_there_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    known = 0
    for lines in (2, 5, 9):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = int(process.stdout.readline().split()[1])
            assert found >= known
            durable = 0
            for _ in range(lines):
                durable = int(process.stdout.readline() or durable)
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
        known = found + max([durable, *(int(line) for line in rest if line.isdigit())])
        everything = list(records(tmp_path))
        assert len(everything) >= known
        assert everything == [b"%d" % number * 20 for number in range(len(everything))]


@pytest.mark.parametrize("refused", [None, "open", "fsync", "fdatasync", "pwrite"])
def test_a_segment_ends_where_it_is_told_to(tmp_path: Path, disk: Disk, refused: str | None) -> None:
    """Also where several ends come together, or before any record; a disk that refuses doubles and loses nothing."""
    journal, end = opened(tmp_path)[0], END_OF_SEGMENT
    first = journal.append([end, *RECORDS[:1]])
    until(lambda: journal.durable == first)
    if refused is not None:
        disk.fail(refused, taken=3)
    last = journal.append([RECORDS[1], end, end, *RECORDS[2:], end])
    if refused is not None:
        until(lambda: journal.error is not None)
        disk.heal()
    until(lambda: journal.durable == last)
    assert list(records(tmp_path)) == RECORDS and journal.error is None
    assert [list(read_segment(path, last=False))[-1:] != [] for path in segments(tmp_path)] == [True, True, False]
    assert journal.close() == 0
    write(tmp_path, [b"more"])
    assert list(records(tmp_path)) == [*RECORDS, b"more"] and len(segments(tmp_path)) == 3
