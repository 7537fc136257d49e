"""The ends of a run's files reach a daemon whole, whatever it has of them already."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.supervisors import Supervisors
from ajet_sdk.bodies import parse
from ajet_sdk.routes import Supervise
from ajet_sdk.runs import line_digest
from ajet_trainer.runs import tails
from ajet_trainer.runs.tails import last_line, log_after, metrics_after


def plain(text: str) -> str:
    return text


def test_whole_lines_behind_a_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_after(path, 0, plain) is None
    path.write_text("one\nsecret\nhal")
    assert log_after(path, 0, lambda line: line.replace("secret", "***")) == {
        "after": 0, "start": 0, "end": 11, "lines": ["one", "***"],
    }
    assert log_after(path, 4, plain) == {"after": 4, "start": 4, "end": 11, "lines": ["secret"]}
    assert log_after(path, 11, plain) is None
    assert log_after(path, 500, plain) == {
        "after": 500, "start": 0, "end": 11, "lines": ["one", "secret"],
    }


def test_of_a_long_log_the_end_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(300_000)))
    place, lines = 0, list[str]()
    while (found := log_after(path, place, plain)) is not None:
        assert found["end"] - found["start"] <= tails.MOST
        lines += found["lines"]
        place = found["end"]
    assert place == path.stat().st_size
    assert lines == [f"line {number}" for number in range(300_000 - len(lines), 300_000)]
    assert 10_000 < len(lines) < 300_000


def test_a_line_longer_than_a_report_is_cut(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 3 * tails.MOST + "\nend\n")
    place, lines = 0, list[str]()
    while (found := log_after(tmp_path / "log", place, plain)) is not None:
        lines += found["lines"]
        place = found["end"]
    assert lines[-1] == "end"
    assert all(len(line) <= tails.MAX_LINE for line in lines)


def have(lines: list[dict[str, Any]]) -> dict[str, Any]:
    newest = json.dumps(lines[-1]) if lines else ""
    return {"step": lines[-1]["step"] if lines else -1, "line": line_digest(newest), "log": 0}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_metrics_that_the_daemon_lacks(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert metrics_after(path, have([])) == ([], -1, 0)
    lines = [{"step": step, "try": 1} for step in range(5)]
    write(path, lines)
    assert metrics_after(path, have([])) == (lines, -1, 0)
    assert metrics_after(path, have(lines[:3])) == (lines[3:], 4, 0)
    assert metrics_after(path, have(lines)) == ([], 4, 0)
    again = [*lines[:2], {"step": 2, "try": 2}]
    write(path, again)
    assert metrics_after(path, have(lines)) == (again, -1, 0)
    assert metrics_after(path, have(again[:2])) == (again[2:], 2, 0)
    path.write_text('{"step": 1}\nnonsense\n[]\n{"step": "2"}\n{"st')
    assert metrics_after(path, have([])) == ([{"step": 1}], -1, 3)


def test_metrics_come_in_pieces_and_a_monster_in_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [{"step": step, "x": "y" * 50_000} for step in range(6)]
    lines[2]["x"] = "y" * (tails.MOST + 1)
    write(path, lines)
    got: list[dict[str, Any]] = []
    while (found := metrics_after(path, have(got))[0]):
        got += found
    assert [line["step"] for line in got] == [0, 1, 3, 4, 5]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4))
def test_the_daemon_ends_with_what_the_file_says(tries: list[list[int]]) -> None:
    """Whatever stood there in between."""
    import tempfile

    from ajet_proxy.core.ledger.supervisors import Followed, Report

    known = Followed()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        for number, steps in enumerate(tries):
            lines = [{"step": step, "try": number} for step in sorted(set(steps))]
            write(path, lines)
            for _ in range(3):
                found, last, _ = metrics_after(path, known.have)
                known.take(Report(state="running", metrics=tuple(found), last=last, follows=known.have["line"]))
            assert [json.loads(line) for _, line in known.metrics.lines] == lines


ODD = [
    '{"step": 2, "x": NaN}', '{"step": 2, "x": 1e999}', '{"step": 2, "x": "\\ud800"}', '{"step": 2, "\\ud800": 1}',
    '{"step": 2, "x": ' + "[" * 100_000, '{"step": 2, "x": ' + "[" * 30 + "]" * 30 + "}", "[" * 100_000,
    '{"step": 2, "x": 18446744073709551616}', '{"step": 18446744073709551616}', '{"step": 2.0}', '{"step": true}',
    '{"step": null}', "{}", "7", "", "\ufeff{}",
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_one_odd_line_costs_itself_alone(tmp_path: Path, odd: str) -> None:
    """All that comes of the file can be sent, and the daemon takes it."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{odd}\n{{"step": 3}}\n')
    found, last, left_out = metrics_after(path, have([]))
    assert (found, left_out) == ([{"step": 1}, {"step": 3}], 1)
    report = {"state": "running", "metrics": found, "last": last, "follows": have([])["line"]}
    body = Supervise("s", "i", {"r": report}, {}, "", 0.0)
    said = parse(Supervise, json.loads(json.dumps(asdict(body), allow_nan=False)))
    runs: Any = {"r": SimpleNamespace(supervisor="s")}
    known = Supervisors()
    known.hear(said, runs, 1.0)
    assert [json.loads(line) for _, line in known.of("r").metrics.lines] == found


def test_a_line_that_is_still_being_written_is_not_odd(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    assert metrics_after(tmp_path / "metrics.jsonl", have([])) == ([{"step": 1}], -1, 0)


def test_the_last_line_that_says_anything(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == ""
    (tmp_path / "log").write_text("old fault\nnew\n\n  \n")
    assert last_line(tmp_path / "log") == "new"
    assert last_line(tmp_path / "log", 100) == ""
    assert last_line(tmp_path / "log", 10) == "new"
