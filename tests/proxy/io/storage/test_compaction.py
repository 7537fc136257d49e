"""Compaction: whatever happened, wherever the segments end and whenever it is killed or the disk refuses, a start finds
the same state, `replay` says the same, and every archived episode is in the archive once."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.state import State
from ajet_proxy.io.storage import compaction
from ajet_proxy.io.storage.archive import ArchiveFile
from ajet_proxy.io.storage.compaction import alone, compact
from ajet_proxy.io.storage.data_dir import ARCHIVE
from ajet_proxy.io.storage.journal import JournalDamaged, folder_of, segments, snapshots
from ajet_proxy.io.storage.store import Store
from ajet_proxy.offline import read_state, replay_lines
from tests.kit.disk import Disk
from tests.kit.histories import encoded, everything, folded, histories, write_segments
from tests.kit.ledger_rig import SETTINGS, LedgerRig, picture

ROOT = Path(__file__).parents[4]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files outlive this process anyway."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def state_in(data: Path) -> State:
    """As a start finds it."""
    archive = ArchiveFile(data)
    state = read_state(data, archive)
    state.settings, state.mixes.group_size = SETTINGS, SETTINGS.group_size
    state.mixes.size_groups()
    state.derive()
    return state


def seen(state: State, rig: LedgerRig) -> dict[str, Any]:
    """Every episode there ever was, as `ajet show` has it."""
    names = [*rig.state.episodes, *rig.state.episodes.leaving]
    return {name: views.record(state, name, tokens="all") for name in names}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(), st.data())
def test_compaction_anywhere_changes_nothing(
    quick: None, tmp_path_factory: pytest.TempPathFactory, rig: LedgerRig, data: st.DataObject
) -> None:
    folder, records = tmp_path_factory.mktemp("data"), encoded(rig.events)
    ends = data.draw(st.lists(st.integers(0, len(records)), max_size=4), label="ends")
    write_segments(folder, records, ends)
    said, shown = list(replay_lines(folder)), seen(rig.state, rig)
    later = segments(folder)[data.draw(st.integers(1, 5), label="there at first") :]
    for path in later:
        path.rename(path.with_suffix(".later"))
    for path in later:
        if data.draw(st.booleans(), label="compacted in between"):
            compact(folder)
        path.with_suffix(".later").rename(path)
    compact(folder)
    assert everything(state_in(folder)) == everything(rig.state)
    assert list(replay_lines(folder)) == said
    assert seen(state_in(folder), rig) == shown
    assert len(segments(folder)) == 1 and len(list(folder_of(folder).iterdir())) <= 2


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(), st.data())
def test_a_compacted_journal_torn_at_any_byte_of_its_last_record(
    quick: None, tmp_path_factory: pytest.TempPathFactory, rig: LedgerRig, data: st.DataObject
) -> None:
    records = encoded(rig.events)
    if not records:
        return
    folder = tmp_path_factory.mktemp("data")
    write_segments(folder, records, data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=3)))
    compact(folder)
    (last,) = segments(folder)
    whole = last.read_bytes()
    before = picture(folded(rig.events[:-1]))
    for size in range(len(whole) - len(records[-1]) - 8, len(whole)):
        last.write_bytes(whole[:size])
        assert picture(state_in(folder)) == before
    last.write_bytes(whole)
    assert picture(state_in(folder)) == picture(rig.state)


def eventful() -> LedgerRig:
    """Every state, twice archived; a batch that came back."""
    rig = LedgerRig()
    rig.restart()  # a journal begins so
    for _ in range(2):
        for state in ("trained", "recorded", "discarded", "leased", "open", "sealed", "ready"):
            rig.in_state(state)
        batch = rig.lease(group_size=1)
        assert batch is not None
        rig.nack(batch)
        again = rig.lease(group_size=1)
        assert again is not None
        rig.ack(again)
        rig.archive(kept=1)
    rig.ready()
    return rig


def same(data: Path, rig: LedgerRig, said: list[str]) -> None:
    same_as((everything(rig.state), said, seen(rig.state, rig)), data, rig)


def same_as(expected: tuple[Any, list[str], dict[str, Any]], data: Path, rig: LedgerRig) -> None:
    found = state_in(data)
    assert (everything(found), list(replay_lines(data)), seen(found, rig)) == expected


def killed_at(line: int, data: Path) -> bool:
    """Compact in a process that ends, without a word, when it reaches its `line`-th line; whether it got so far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # pragma: no cover
        left = [line]

        def trace(frame: Any, event: str, _: Any) -> Any:
            if "/ajet_proxy/io/" not in frame.f_code.co_filename:
                return None
            left[0] -= event == "line"
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            compact(data)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_kill_at_any_line_changes_nothing(quick: None, tmp_path: Path) -> None:
    rig = eventful()
    records, original = encoded(rig.events), tmp_path / "original"
    write_segments(original, records, [10, 40, len(records) - 3])
    expected = everything(rig.state), list(replay_lines(original)), seen(rig.state, rig)
    line, lives = 0, 0
    while True:
        data = tmp_path / "data"
        shutil.copytree(original, data)
        if not killed_at(line, data):
            break
        same_as(expected, data, rig)
        if lives % 5 == 0:
            compact(data)
            same_as(expected, data, rig)
            assert [path.suffix for path in sorted(folder_of(data).iterdir())] == [".snapshot", ".log"]
        shutil.rmtree(data)
        line, lives = line + 1 + line // 25, lives + 1
    same_as(expected, data, rig)
    assert lives > 70


@pytest.mark.parametrize("name", ["open", "fsync"])
def test_a_disk_that_refuses_changes_nothing(tmp_path: Path, disk: Disk, name: str) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [20])
    said = list(replay_lines(tmp_path))
    disk.fail(name)
    with pytest.raises(OSError, match="No space"):
        compact(tmp_path)
    same(tmp_path, rig, said)
    disk.heal()
    compact(tmp_path)
    same(tmp_path, rig, said)


def run(data: Path, *arguments: str, file_bytes: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    """The compaction as the daemon runs it, where no file may grow beyond a size."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))

    return subprocess.run(
        [sys.executable, "-m", "ajet_proxy.io.storage.compaction", str(data), *(arguments or ("0", "0"))], cwd=ROOT,
        text=True, capture_output=True, check=False, preexec_fn=limit,
    )


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 1])
    said = list(replay_lines(tmp_path))
    for size in (100, 4096, 40_000, 60_000):
        failed = run(tmp_path, file_bytes=size)
        assert failed.returncode == (1 if size < 60_000 else failed.returncode), failed.stderr
        assert failed.returncode == 0 or failed.stderr.startswith("cannot compact")
        assert failed.returncode == 0 or len(failed.stderr.splitlines()) == 1
        same(tmp_path, rig, said)
    assert run(tmp_path).returncode == 0
    same(tmp_path, rig, said)


def test_a_damaged_segment_is_not_compacted(tmp_path: Path) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [10, 20])
    first = segments(tmp_path)[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(JournalDamaged):
        compact(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 1 and "is damaged at byte" in done.stderr
    assert len(segments(tmp_path)) == 3
    assert snapshots(tmp_path) == []


def starts(data: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """The two that read `data` whole: a replay, and a daemon."""

    async def start() -> None:
        await Store.open(data, SETTINGS).close()

    return lambda: list(replay_lines(data)), lambda: asyncio.run(start())


def test_an_archive_that_is_missing_is_refused_until_somebody_wants_it_so(tmp_path: Path) -> None:
    """Nor does a compaction make it anew: an empty one would let the next start pass."""
    rig = LedgerRig()
    rig.in_state("trained")
    rig.archive()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events)])
    compact(tmp_path)
    (tmp_path / ARCHIVE).unlink()
    replays, opens = starts(tmp_path)
    for begin in (lambda: compact(tmp_path), replays, opens):
        with pytest.raises(JournalDamaged, match=f"{ARCHIVE} is missing; it held 1 ended episodes"):
            begin()
    assert not (tmp_path / ARCHIVE).exists()
    (tmp_path / ARCHIVE).touch()
    assert replays() == []
    opens()


def test_files_of_several_copies_are_refused(tmp_path: Path) -> None:
    rig = LedgerRig()
    rig.seal(rig.open())
    write_segments(tmp_path, encoded(rig.events)[1:], [])
    for begin in starts(tmp_path):
        with pytest.raises(JournalDamaged, match="restore all of them from one copy"):
            begin()


def test_what_somebody_put_beside_the_segments_stays(tmp_path: Path) -> None:
    write_segments(tmp_path, encoded(eventful().events), [3, 6])
    copy = folder_of(tmp_path) / "00000001 (copy).log"
    copy.write_bytes(b"mine")
    compact(tmp_path)
    assert copy.read_bytes() == b"mine"
    assert not (folder_of(tmp_path) / "00000001.log").exists()


def test_nothing_to_compact(tmp_path: Path) -> None:
    assert compact(tmp_path) == 0
    write_segments(tmp_path, [], [])
    assert compact(tmp_path) == 0
    assert len(segments(tmp_path)) == 1


def test_one_compaction_at_a_time(tmp_path: Path) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [20])
    with alone(tmp_path):
        process = subprocess.Popen(
            [sys.executable, "-m", "ajet_proxy.io.storage.compaction", str(tmp_path), "0", "0"], cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        assert len(segments(tmp_path)) == 2
    assert process.wait(300) == 0
    assert len(segments(tmp_path)) == 1


def test_the_files_of_the_archive_are_for_their_owner_alone(tmp_path: Path) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [20])
    compact(tmp_path)
    for path in (tmp_path / ARCHIVE, *snapshots(tmp_path)):
        assert path.stat().st_mode & 0o077 == 0


def test_the_time_to_start_does_not_grow_with_what_was_trained(tmp_path: Path) -> None:
    """A start reads the snapshot and the segments behind it."""
    read = []
    for count in (256, 1024):  # the curve of rewards has its 256 points in both
        rig = LedgerRig()
        for _ in range(count):
            rig.in_state("trained")
            rig.archive(kept=5)
        records = encoded(rig.events)
        data = tmp_path / str(count)
        write_segments(data, records, [len(records)])
        compact(data)
        read.append(sum(path.stat().st_size for path in folder_of(data).iterdir()))
        assert len(views.records(state_in(data), views.Wanted(2000, "trained"))["episodes"]) == count
    assert read[1] < read[0] * 1.1


def test_it_runs_where_it_may_not_lower_its_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under the systemd unit, which forbids the system calls of resources."""

    def refuse(_: int) -> None:
        raise PermissionError

    write_segments(tmp_path, encoded(eventful().events), [20])
    monkeypatch.setattr(os, "nice", refuse)
    monkeypatch.setattr(compaction, "OOM_SCORE", tmp_path / "score")
    compaction.main([str(tmp_path), "0", "0"])
    assert capsys.readouterr().out == "0\n"
    assert (tmp_path / "score").read_text() == "1000", "the kernel kills it before the daemon"
    assert len(segments(tmp_path)) == 1
