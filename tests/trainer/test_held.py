"""The holder of a run's folder, from its first instruction on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ajet_trainer import held, run_folder

WAIT = "import sys, time; print('up', flush=True); time.sleep(900)"


def launched(folder: Path, starts: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ajet_trainer.held", str(folder), str(starts), sys.executable, "-c", WAIT]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_folder_has_one_holder_and_it_is_known(tmp_path: Path) -> None:
    assert held.holder(tmp_path) is None
    with launched(tmp_path, 7) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        assert held.holder(tmp_path) == first.pid
        found = held.started(tmp_path, first.pid)
        assert (found["pid"], found["starts"]) == (first.pid, 7)
        assert held.started(tmp_path, first.pid + 1) == {}
        with launched(tmp_path, 8) as second:
            assert second.wait(300) == held.TAKEN
        assert held.started(tmp_path, first.pid)["starts"] == 7
        held.tell_to_end(tmp_path, os.getpid())  # which holds nothing
        held.tell_to_end(tmp_path, first.pid)
        assert first.wait(300) == -15
    assert held.holder(tmp_path) is None
    held.tell_to_end(tmp_path, first.pid)


def test_of_many_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    crowd = [launched(tmp_path, number) for number in range(5)]
    try:
        deadline = time.monotonic() + 300
        while sum(one.poll() is None for one in crowd) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sorted(one.poll() or 0 for one in crowd) == [0, *[held.TAKEN] * 4]
        winner = next(one for one in crowd if one.poll() is None)
        assert held.holder(tmp_path) == winner.pid
    finally:
        for one in crowd:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


def test_a_folder_that_cannot_be_asked_says_so(tmp_path: Path) -> None:
    (tmp_path / run_folder.LOCK).mkdir()
    with pytest.raises(held.NoLocks, match="keep runs elsewhere"):
        held.holder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_note_that_was_cut_short_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_bytes(text.encode("latin-1"))
    assert run_folder.read_json(tmp_path / "note") == {}
    run_folder.put(tmp_path / "note", '{"a": 1}', run_folder.PRIVATE)
    assert run_folder.read_json(tmp_path / "note") == {"a": 1}
    assert (tmp_path / "note").stat().st_mode & 0o777 == 0o600


def test_where_there_are_no_locks_nobody_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two trainers would."""

    def lacking(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lacking)
    with pytest.raises(SystemExit) as ended:
        held.become(tmp_path, 1, [sys.executable])
    assert ended.value.code == held.TAKEN
