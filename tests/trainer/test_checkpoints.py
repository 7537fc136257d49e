from __future__ import annotations

import errno
import os
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl import checkpoints
from ajet_trainer.backends.verl.checkpoints import MARKER, must_fit, prune, repair_marker, set_aside
from ajet_trainer.run_folder import sync


def checkpoint(folder: Path, step: int, *, history: bytes | None = None) -> None:
    """A checkpoint as verl leaves it, or with `history` instead of a whole data.pt."""
    place = folder / f"global_step_{step}"
    (place / "actor").mkdir(parents=True)
    if history is None:
        with zipfile.ZipFile(place / "data.pt", "w") as archive:
            archive.writestr("data.pkl", "state")
    elif history:
        (place / "data.pt").write_bytes(history)
    (folder / MARKER).write_text(str(step))


def test_all_of_a_checkpoint_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, 1)
    synced, refused = set[int](), set[int]()

    def fsync(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        if os.fstat(file).st_ino in refused:
            raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fsync", fsync)
    sync(tmp_path)
    assert synced == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}
    for name, lost in (("global_step_1/data.pt", True), ("global_step_1/actor", False)):
        synced.clear()
        refused = {(tmp_path / name).stat().st_ino}
        with pytest.raises(OSError, match="gone") if lost else nullcontext():
            sync(tmp_path)


def test_other_processes_than_have_saved_it_cannot_resume(tmp_path: Path) -> None:
    """Each would look for a part of its own, which nobody wrote."""
    checkpoint(tmp_path, 1)
    place = tmp_path / "global_step_1"
    must_fit(place, 3)  # another engine than fsdp has no such parts
    for rank in (0, 1):
        (place / "actor" / f"model_world_size_2_rank_{rank}.pt").touch()
    must_fit(place, 2)
    with pytest.raises(ConfigError, match=r"saved by 2 processes, .* have 2 GPUs in all") as failure:
        must_fit(place, 1)
    assert failure.value.param == "trainer.n_gpus_per_node"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


CUT = b"PK\x03\x04 cut"


@pytest.mark.parametrize(("steps", "marked", "resumed", "left"), [
    ({}, None, None, []),
    ({2: None, 10: None}, "10", 10, ["global_step_10", "global_step_2"]),
    ({2: None, 4: b""}, "2", 2, ["global_step_2"]),
    ({2: None, 4: CUT}, "2", 2, ["global_step_2"]),
    ({2: None, 4: None}, "", 4, ["global_step_2", "global_step_4"]),
    ({4: b""}, "4", None, []),
], ids=["none", "a marked one", "a crash before the history", "a history cut short", "a crash while it was marked",
        "only broken ones"])  # fmt: skip
def test_the_newest_whole_checkpoint_is_resumed_and_later_ones_go(
    tmp_path: Path, steps: dict[int, bytes | None], marked: str | None, resumed: int | None, left: list[str]
) -> None:
    (tmp_path / "global_step_notes").mkdir()
    for step, history in steps.items():
        checkpoint(tmp_path, step, history=history)
    if marked is not None:
        (tmp_path / MARKER).write_text(marked)
    assert repair_marker(tmp_path) == resumed
    assert names(tmp_path) == [*left, "global_step_notes", *[MARKER] * (resumed is not None)]
    assert resumed is None or (tmp_path / MARKER).read_text() == str(resumed)


@pytest.mark.parametrize("part", ["actor/model_world_size_2_rank_1.pt", "critic/optim_world_size_1_rank_0.pt"])
def test_a_checkpoint_with_a_part_that_is_cut_short_is_not_whole(tmp_path: Path, part: str) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step)
    (cut := tmp_path / "global_step_4" / part).parent.mkdir(exist_ok=True)
    cut.write_bytes(b"")
    assert repair_marker(tmp_path) == 2


def test_a_folder_that_is_not_there_has_no_checkpoint(tmp_path: Path) -> None:
    assert repair_marker(tmp_path / "none") is None


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


def test_later_checkpoints_are_set_aside_and_none_is_deleted(tmp_path: Path) -> None:
    folder, place = tmp_path / "checkpoints", tmp_path / "aside"
    for step in (2, 4, 6):
        checkpoint(folder, step)
    assert set_aside(folder, 2, place) == [4, 6]
    assert names(folder) == ["global_step_2", MARKER] and names(place) == ["global_step_4", "global_step_6"]
    assert repair_marker(folder) == 2
    assert set_aside(folder, 2, tmp_path / "again") == [] and not (tmp_path / "again").exists()


def test_a_checkpoint_that_did_not_stay_is_not_gone_back_to(tmp_path: Path) -> None:
    for step, history in ((2, b""), (4, None), (6, None)):
        checkpoint(tmp_path, step, history=history)
    before = names(tmp_path)
    for step in (1, 2):
        with pytest.raises(ConfigError, match=rf"no whole checkpoint of step {step} in .*; those that are: 4, 6$"):
            set_aside(tmp_path, step, tmp_path / "aside")
    with pytest.raises(ConfigError, match="those that are: none"):
        set_aside(tmp_path / "nowhere", 1, tmp_path / "aside")
    assert names(tmp_path) == before


def test_killed_while_it_sets_aside_it_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a start in between goes on from one of them, and deletes none."""
    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        checkpoint(folder, step)
    monkeypatch.setattr(checkpoints, "put", None)
    with pytest.raises(TypeError):
        set_aside(folder, 2, tmp_path / "one")
    monkeypatch.undo()
    assert repair_marker(folder) == 2 and names(tmp_path / "one") == ["global_step_4", "global_step_6"]
    assert set_aside(folder, 2, tmp_path / "two") == []
