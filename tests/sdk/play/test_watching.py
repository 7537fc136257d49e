"""A program whose file changes, and programs that fail as soon as they begin."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ajet_sdk.errors import AjetError
from ajet_sdk.play.revision import Digest
from ajet_sdk.play.watching import Streak, Watch


def test_each_change_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("one")
    changed = threading.Semaphore(0)
    with Watch(Digest(path), changed.release, look_s=0.02):
        path.touch()
        assert not changed.acquire(timeout=0.3), "what it says is as before"
        for text in ("two", "three"):
            path.write_text(text)
            assert changed.acquire(timeout=20)
        path.unlink()
        assert not changed.acquire(timeout=0.3)
        path.write_text("four")
        assert changed.acquire(timeout=20)
    path.write_text("five")
    assert not changed.acquire(timeout=0.3)


def test_a_file_that_is_being_written_is_waited_for() -> None:
    told = iter(["a", "b", "c", "c", *["d"] * 1000])
    seen: list[int] = []
    settled = threading.Event()

    def digest() -> str:
        seen.append(1)
        return next(told)

    with Watch(digest, settled.set, look_s=0.01):
        assert settled.wait(20)
        assert len(seen) >= 4


def test_a_streak_that_waits_for_a_change() -> None:
    lines: list[str] = []
    streak = Streak(2, waits=True, say=lines.append)
    for well in (False, False, True, False, False):
        streak.began(well=well)
        assert not streak.held()
    streak.began(well=False)
    streak.began(well=False)
    assert streak.held()
    (line,) = lines
    assert line.startswith("the program failed 3 times in a row within 2 s, without a call to a model. Nothing more")
    streak.changed()
    assert not streak.held()


def test_a_streak_that_ends_the_run() -> None:
    streak = Streak(4, waits=False)
    for _ in range(4):
        assert not streak.held()
        streak.began(well=False)
    with pytest.raises(AjetError, match="failed 4 times in a row"):
        streak.held()
