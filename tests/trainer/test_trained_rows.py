from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet_trainer.batch import Row, to_row
from ajet_trainer.progress import Progress
from ajet_trainer.trained_rows import KEPT_STEPS, TrainedRow, read, steps, take_back, write
from tests.trainer.making import sample
from tests.trainer.test_cli import status


def trained(name: str = "e", *, turns: int = 2, weight: bool = True, rejected: int | None = None) -> TrainedRow:
    """A row of `turns` calls; the trainer's logprobs are 0.25 above the engine's, but for tokens of no call."""
    row = to_row("g", 1, 0, 0.5, sample(f"{name}/0", turns=turns))
    mask = row.mask.copy()
    if rejected is not None:
        mask[rejected] = 0
    ones = np.ones(len(mask), np.float32)
    return TrainedRow(row, mask, row.logprobs + 0.25, ones * 2, ones * 0.75 if weight else None)


def alike(one: Row, other: Row) -> bool:
    """But for the version of each token, which nobody reads again."""
    names = [field.name for field in fields(one) if field.name != "versions"]
    pairs = ((getattr(one, name), getattr(other, name)) for name in names)
    return all(np.array_equal(a, b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0) for a, b in pairs)


def test_advantages_that_a_row_brings_along_are_kept_as_its_tokens_have_them(tmp_path: Path) -> None:
    """With credit by turn."""
    one = trained()
    write(tmp_path, 1, [replace(one, row=replace(one.row, advantages=one.advantage))], "m")
    (found,), _ = read(tmp_path, 1)
    assert found.row.advantages is None
    assert found.advantage[one.row.mask == 1].tolist() == one.advantage[one.row.mask == 1].tolist()


def test_what_a_kill_left_of_a_file_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 1, [trained()], "m")
    (tmp_path / "rows" / ".2.new").write_bytes(b"half")
    take_back(tmp_path, 1)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["1.npz"]


@pytest.mark.parametrize("weight", [True, False])
def test_what_is_written_is_what_is_read(tmp_path: Path, weight: bool) -> None:
    rows = [trained("a", turns=1, weight=weight), trained("b", turns=3, weight=weight, rejected=2)]
    write(tmp_path, 7, rows, "models/m")
    found, model = read(tmp_path, 7)
    assert model == "models/m" and len(found) == 2
    for one, other in zip(rows, found, strict=True):
        sampled = one.row.mask == 1
        assert alike(one.row, other.row)
        assert one.mask.tolist() == other.mask.tolist()
        assert one.trainer[sampled].tolist() == other.trainer[sampled].tolist()
        assert one.advantage[sampled].tolist() == other.advantage[sampled].tolist()
        assert (other.weight is not None) == weight
        if one.weight is not None and other.weight is not None:
            assert one.weight[sampled].tolist() == other.weight[sampled].tolist()
    assert (found[1].row.episode, found[1].row.task) == ("b", "t")


def test_the_last_steps_stay(tmp_path: Path) -> None:
    for step in range(1, KEPT_STEPS + 4):
        write(tmp_path, step, [trained()], "m")
    assert steps(tmp_path) == list(range(4, KEPT_STEPS + 4))


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, [trained("first")], "m")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    for step in (1, 2):
        with pytest.raises(OSError, match="killed here"):
            write(tmp_path, step, [trained("second")], "m")
    assert steps(tmp_path) == [1]
    assert read(tmp_path, 1)[0][0].row.episode == "first"


def test_a_resumed_run_drops_the_rows_that_it_takes_back(tmp_path: Path) -> None:
    take_back(tmp_path, 0)
    for step in (3, 4, 5):
        write(tmp_path, step, [trained()], "m")
    Progress(tmp_path, 0, lambda _: None).resume_at(4)
    assert steps(tmp_path) == [3, 4]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write(tmp_path, 1, [trained("a")], "m")
    write(tmp_path, 3, [trained("a", rejected=0), trained("b", turns=1, weight=False)], "m")
    write(tmp_path, 4, [trained("a", weight=False)], "m")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert status("rows", *words) == 0
    return capsys.readouterr().out


def test_json_has_a_line_for_each_row_and_lists_over_its_tokens(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in shown(capsys, str(run_dir), "--step", "1", "--json").splitlines()]
    assert lines == [{
        "step": 1, "episode": "a", "task": "t", "group": "g", "session": 1, "index": 0, "reward": 0.5,
        "temperature": 1.0, "ids": [1, 2, 3, 4, 20, 21, 22, 10, 11, 20, 21, 22], "texts": None,
        "calls": [None] * 4 + ["a/0/c0"] * 3 + [None] * 2 + ["a/0/c1"] * 3,
        "mask": [0] * 4 + [1] * 3 + [0] * 2 + [1] * 3,
        "engine": [None] * 4 + [-0.5] * 3 + [None] * 2 + [-0.5] * 3,
        "trainer": [None] * 4 + [-0.25] * 3 + [None] * 2 + [-0.25] * 3,
        "advantage": [None] * 4 + [2.0] * 3 + [None] * 2 + [2.0] * 3,
        "weight": [None] * 4 + [0.75] * 3 + [None] * 2 + [0.75] * 3,
    }]  # fmt: skip


def test_the_table_is_headed_by_episode_and_call(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(run_dir), "--step", "1").rstrip("\n").split("\n") == [
        "step 1, episode a, task t: reward 0.5, temperature 1, 4 prompt tokens, 6 trained of 8",
        "  prompt  1 2 3 4",
        "  id  mask  engine   trainer  advantage  weight  text",
        "  call a/0/c0",
        *[f"    {token}  1     -0.5000  -0.2500  2.0000     0.7500" for token in (20, 21, 22)],
        "  not sampled",
        *[f"    {token}  0" for token in (10, 11)],
        "  call a/0/c1",
        *[f"    {token}  1     -0.5000  -0.2500  2.0000     0.7500" for token in (20, 21, 22)],
    ]


def test_a_rejected_token_is_sampled_and_not_trained(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads(shown(capsys, str(run_dir), "--step", "3", "--json", "--episode", "a"))
    assert (line["mask"][4], line["engine"][4]) == (0, -0.5)
    assert "weight" not in line, "where one row has none, none is kept"


def test_the_latest_step_is_shown_unless_another_is_asked_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(shown(capsys, str(run_dir), "--json"))["step"] == 4


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trained()
    write(tmp_path, 1, [replace(one, row=replace(one.row, task="\x1b[31mred"))], "m")
    assert "task \\x1b[31mred" in shown(capsys, str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "2"), "the rows of step 2 are not kept; those of steps 1, 3 to 4 are"),
        (("--step", "3", "--episode", "x"), "episode x is not in step 3; it trained a, b"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    run_dir: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("rows", str(run_dir), *words) == 2
    captured: Any = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"ajet-trainer: {said}\n")


@pytest.mark.parametrize("left", [b"", b"PK\x03\x04 cut", b"\x00\x00"])
def test_a_file_that_is_cut_short_is_named(run_dir: Path, left: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (path := run_dir / "rows" / "4.npz").write_bytes(left)
    assert status("rows", str(run_dir)) == 1
    captured: Any = capsys.readouterr()
    assert captured.err.startswith(f"ajet-trainer: {path} is not whole: ") and captured.err.count("\n") == 1


def test_a_folder_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("rows", str(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f"ajet-trainer: no rows are kept in {tmp_path}: is it the run_dir of a run that has made a step?\n"
    )
