"""`export` over the journal and the archive, as a user calls it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.export import Choice, rows
from ajet_proxy.io.storage.compaction import compact
from ajet_proxy.io.storage.data_dir import ARCHIVE
from ajet_proxy.offline import replay_lines
from tests.kit.histories import encoded, write_segments
from tests.kit.ledger_rig import LedgerRig
from tests.proxy.test_cli import run
from tests.proxy.test_offline import by_name, laid_out


@pytest.fixture
def rig() -> LedgerRig:
    """Two tasks of four trained episodes with rewards 0 to 3, all archived, and one that is ready."""
    rig = LedgerRig()
    for number in range(8):
        episode = rig.open(task=f"t{number // 4}")
        rig.call(episode, (1, 2, number // 4), (5, number))
        rig.reward(episode, float(number % 4))
    batch = rig.lease(group_size=4, groups=2)
    assert batch is not None
    rig.ack(batch)
    rig.in_state("recorded")
    rig.archive()
    rig.ready("t0")
    return rig


@pytest.fixture(params=["journal", "archive"])
def data(request: pytest.FixtureRequest, rig: LedgerRig, tmp_path: Path) -> Path:
    """The same history in the journal alone, and with the archived part in the archive."""
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 5])
    if request.param == "archive":
        compact(tmp_path)
    return tmp_path


def exported(data: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run("export", str(data), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_samples_are_those_that_were_delivered(data: Path) -> None:
    def by_name(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(samples, key=lambda sample: str(sample["sample"]))

    found = exported(data)
    replayed = [json.loads(line) for line in replay_lines(data)]
    for sample in (*found, *replayed):
        sample["logprobs"] = [round(value, 5) for value in sample["logprobs"]]
    assert [sample.pop("responses") for sample in found] == [
        [f"answer-{call}" for call in sample["calls"]] for sample in found
    ]
    assert {str(sample.pop("feedback")) for sample in found} == {"[]"}
    assert by_name(found) == by_name(replayed)
    assert len(found) == 9


def test_what_is_exported_can_be_chosen(data: Path) -> None:
    for least in ("2", repr(math.fsum([0.1] * 3) + 1.7), "2.000000000001"):  # but for the rounding of sums
        assert [row["reward"] for row in exported(data, "--task", "t1", "--min-reward", least)] == [2.0, 3.0]
    assert [row["reward"] for row in exported(data, "--task", "t1", "--min-reward", "2.00000001")] == [3.0]
    assert [row["task"] for row in exported(data, "--state", "recorded")] == ["only recorded"]
    assert len(exported(data, "--state", "ready")) == 1


def test_rows_for_fine_tuning(data: Path) -> None:
    found = exported(data, "--as", "sft", "--min-reward", "3")
    assert all(row["responses"][0].startswith("answer-call-") for row in found)
    assert [(row["input_ids"], row["labels"]) for row in found] == [
        ([1, 2, 0, 5, 3], [-100, -100, -100, 5, 3]), ([1, 2, 1, 5, 7], [-100, -100, -100, 5, 7]),
    ]


def test_pairs(data: Path) -> None:
    found = exported(data, "--as", "preferences")
    assert [(row["task"], row["chosen_reward"], row["rejected_reward"]) for row in found] == [
        ("t0", 3.0, 0.0), ("t0", 2.0, 1.0), ("t1", 3.0, 0.0), ("t1", 2.0, 1.0),
    ]
    assert (found[0]["prompt_ids"], found[0]["chosen_ids"], found[0]["rejected_ids"]) == ([1, 2, 0], [5, 3], [5, 0])


@pytest.mark.parametrize("archived", [True, False])
def test_what_users_said_is_in_every_form(tmp_path: Path, archived: bool) -> None:
    """Of the calls of a sample, and of its episode."""
    rig = LedgerRig()
    for name, value in (("a", 1.0), ("b", 0.0)):
        rig.open(name, task="t")
        rig.call(name, (9, 9), (8,))
        call = rig.call(name, (1, 2), (5, int(value)))
        rig.feedback(name, call, value=-1.0, better="7")
        rig.feedback(name, text="slow")
        rig.reward(name, value)
    if archived:
        rig.ack(rig.batch(group_size=2))
        rig.archive()
    write_segments(tmp_path, encoded(rig.events), [])
    if archived:
        compact(tmp_path)
    for form in ("samples", "sft"):
        said = sorted((row["feedback"] for row in exported(tmp_path, "--as", form)), key=len)
        words = [[one.get("better") or one["text"] for one in some] for some in said]
        assert words == [["slow"]] * 2 + [["7", "slow"]] * 2
    for pair in exported(tmp_path, "--as", "preferences"):
        assert pair["chosen_feedback"] and len(pair["chosen_feedback"]) == len(pair["rejected_feedback"])


def test_trees(data: Path) -> None:
    """Laid out, they are the samples, archived or not, and a task's group holds both."""
    own = ("responses", "feedback")
    samples = [{name: value for name, value in row.items() if name not in own} for row in exported(data)]
    trees, groups = exported(data, "--tree"), exported(data, "--tree", "--by", "group")
    assert trees == exported(data, "--tree", "--by", "episode")
    assert [tree["episodes"] for tree in trees] == [[sample["episode"]] for sample in samples]
    assert [tree["task"] for tree in groups] == ["t0", "t1"]
    assert [len(tree["episodes"]) for tree in groups] == [5, 4]
    assert groups[1]["token_ids"] == [1, 2, 1, 5, 4, 5, 6, 7] and groups[1]["parents"] == [[5, -1], *[[1, 3]] * 3]
    for found in (trees, groups):
        laid = [by_name(sample) for tree in found for sample in laid_out(tree)]
        assert sorted(laid) == sorted(map(by_name, samples))
    assert [tree["episodes"] for tree in exported(data, "--tree", "--by", "group", "--min-reward", "3")] == [
        [sample["episode"]] for sample in samples if sample["reward"] == 3.0
    ]


def test_into_a_file(data: Path) -> None:
    out = data / "rows.jsonl"
    assert exported(data, "--out", str(out)) == []
    assert len(out.read_text().splitlines()) == 9
    assert exported(data, "--out", str(out), "--task", "unheard of") == []
    assert out.read_bytes() == b""


def test_what_retention_removed_is_left_out_and_counted(rig: LedgerRig, tmp_path: Path) -> None:
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 5])
    for _ in range(2):
        compact(tmp_path, ended_after=rig.state.now + 1)
    for arguments, what in (
        (["export"], "8 episodes in these states"), (["export", "--as", "preferences"], "8 episodes in these states"),
        (["replay"], f"{rig.state.batches.leases} batches, whole or in part"),
    ):
        done = run(arguments[0], str(tmp_path), *arguments[1:])
        assert done.returncode == 0
        assert done.stderr == f"ajet-proxy: retention has removed {what}\n"
    removed: list[int] = []
    assert len(list(rows(tmp_path, "samples", Choice(), removed.append))) == 1
    assert removed == [8]


def test_an_archive_that_is_damaged_is_said_in_one_line(rig: LedgerRig, tmp_path: Path) -> None:
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 5])
    compact(tmp_path)
    (tmp_path / ARCHIVE).write_bytes(b"no database")
    for arguments in (["export"], ["export", "--as", "preferences"], ["replay"]):
        done = run(arguments[0], str(tmp_path), *arguments[1:])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert f"{tmp_path / ARCHIVE} cannot be read" in done.stderr
        assert "restore it from a copy" in done.stderr


def test_a_copy_that_nobody_may_write_is_read(
    rig: LedgerRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 5])
    compact(tmp_path)
    real = sqlite3.connect

    def connect(database: str, **options: Any) -> sqlite3.Connection:
        assert "immutable=1" in database, "SQLite would lay its files beside it"
        return real(database, **options)

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(sqlite3, "connect", connect)
    assert len(list(rows(tmp_path, "samples", Choice(), none))) == 9


def none(removed: int) -> None:
    assert removed == 0


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="tests/e2e/test_parquet.py writes it")
def test_parquet_without_its_library_says_what_is_missing(data: Path) -> None:
    done = run("export", str(data), "--format", "parquet", "--out", str(data / "rows"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install pyarrow" in done.stderr
    assert not (data / "rows").exists()
