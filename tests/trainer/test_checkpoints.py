from __future__ import annotations

import zipfile
from pathlib import Path

from ajet_trainer.backends.verl.checkpoints import MARKER, prune, repair_marker


def checkpoint(folder: Path, step: int, *, history: bytes | None = None, marker: bool = True) -> None:
    """A checkpoint as verl leaves it, or with `history` instead of a whole data.pt."""
    place = folder / f"global_step_{step}"
    (place / "actor").mkdir(parents=True)
    if history is None:
        with zipfile.ZipFile(place / "data.pt", "w") as archive:
            archive.writestr("data.pkl", "state")
    elif history:
        (place / "data.pt").write_bytes(history)
    if marker:
        (folder / MARKER).write_text(str(step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_no_checkpoint_is_a_start_from_scratch(tmp_path: Path) -> None:
    assert repair_marker(tmp_path / "none") is None
    assert repair_marker(tmp_path) is None


def test_the_marked_checkpoint_is_resumed_and_nothing_touched(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 10)
    assert repair_marker(tmp_path) == 10
    assert names(tmp_path) == ["global_step_10", "global_step_2", MARKER]


def test_a_crash_before_the_history_was_written_goes_back_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, history=b"", marker=False)
    assert repair_marker(tmp_path) == 2
    assert names(tmp_path) == ["global_step_2", MARKER]


def test_a_history_cut_short_is_no_history(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, history=b"PK\x03\x04 cut", marker=False)
    assert repair_marker(tmp_path) == 2


def test_a_crash_while_the_marker_was_written_keeps_the_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, marker=False)
    (tmp_path / MARKER).write_text("")
    assert repair_marker(tmp_path) == 4
    assert (tmp_path / MARKER).read_text() == "4"


def test_only_broken_checkpoints_are_a_start_from_scratch(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, history=b"")
    (tmp_path / "global_step_notes").mkdir()
    assert repair_marker(tmp_path) is None
    assert names(tmp_path) == ["global_step_notes"]


def test_only_the_newest_whole_checkpoints_stay(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        checkpoint(tmp_path, step, history=b"" if step == 8 else None)
    (tmp_path / "global_step_notes").mkdir()
    prune(tmp_path, 2)
    assert names(tmp_path) == ["global_step_10", "global_step_6", "global_step_notes", MARKER]
    prune(tmp_path, 1)
    assert names(tmp_path) == ["global_step_10", "global_step_notes", MARKER]
    assert repair_marker(tmp_path) == 10


def test_without_a_whole_checkpoint_nothing_goes(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, history=b"")
    prune(tmp_path, 1)
    prune(tmp_path / "none", 1)
    assert names(tmp_path) == ["global_step_4", MARKER]
