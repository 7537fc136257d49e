"""Data sets in files: what a line is called, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ajet_sdk.bodies import check_id
from ajet_sdk.errors import BadRequest
from ajet_sdk.play import tasks
from ajet_sdk.play.tasks import BrokenLines, Line, as_part, digest, read_tasks
from ajet_sdk.routes import DEFAULT_LANE, lane_of


def file(tmp_path: Path, data: bytes | str, name: str = "tasks.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_text_has_a_task_on_each_line(tmp_path: Path) -> None:
    path = file(tmp_path, "\ufeffsum/1\r\n\n  What is 1 + 1?\t\nümläut")
    assert read_tasks(path) == (
        Line("sum/1", '"sum/1"'), Line("What is 1 + 1?", '"What is 1 + 1?"'), Line("ümläut", json.dumps("ümläut")),
    )


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.ndjson", "tasks.json"])
def test_json_is_called_by_its_task_or_id(tmp_path: Path, name: str) -> None:
    lines = [
        '{"task": "sum/1", "id": 5}', '{"id": 7}', '{"task": {"a": 1}, "id": "x"}', '{"task": "", "id": "y"}',
        '"text"', "12", '{"task": "' + "x" * 1001 + '", "id": "short"}', '{"task": true, "id": "z"}',
        '{"task": "a\\u0000", "id": 3}',
    ]
    found = read_tasks(file(tmp_path, "\n".join(lines), name))
    assert [line.name for line in found] == ["sum/1", "7", "x", "y", "text", "12", "short", "z", "3"]
    assert [line.json for line in found] == lines


def test_json_without_a_name_is_called_by_a_digest_that_stays(tmp_path: Path) -> None:
    one, two = (read_tasks(file(tmp_path, f'  {{"question": {number}}}\n')) for number in (1, 2))
    assert one[0].name.startswith("task-") and len(one[0].name) == 21
    assert one[0].name != two[0].name
    assert one == read_tasks(file(tmp_path, '{"question": 1}'))


def test_every_line_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    bad = [
        b'{"id": 1}', b'{"id": ', b"[1]", b"\xff", b'{"id": 1e999}', b'{"id": "' + b"x" * tasks.MAX_LINE + b'"}',
        b"null", b'{"a": "\\ud800"}', b"true", b"[" * 100_000, b'{"id": 2}',
    ]
    path = file(tmp_path, b"\n".join(bad), "tasks.jsonl")
    with pytest.raises(BrokenLines, match=r"9 of 11 lines of .* cannot be used: nothing is played") as caught:
        read_tasks(path)
    told = [fault.removeprefix(f"{path}:") for fault in caught.value.faults]
    assert [fault.partition(":")[0] for fault in told] == [str(number) for number in range(2, 11)]
    for place, words in enumerate((
        "it is no JSON: Expecting value (at character 6)", "it must be a JSON object, a text or an integer, not [1]",
        "it is not UTF-8 (at byte 0)", "finite", "it has 100010 bytes, and may have 100000", "not null", "surrogates",
        "not true",
    )):
        assert words in told[place]


def test_text_that_no_environment_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenLines) as caught:
        read_tasks(file(tmp_path, "a\0b\n" + "x" * 1001))
    zero, long = caught.value.faults
    assert "it has a character 0" in zero and "1000 characters, not 1001" in long


@pytest.mark.parametrize(("data", "said"), [("", "has no task"), (" \n\n", "has no task"), (None, "No such file")])
def test_a_file_without_tasks(tmp_path: Path, data: str | None, said: str) -> None:
    path = tmp_path / "missing" if data is None else file(tmp_path, data)
    with pytest.raises(BadRequest, match=said):
        read_tasks(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_FILE", 3)
    with pytest.raises(BadRequest, match="more than 3 bytes"):
        read_tasks(file(tmp_path, "abcd"))


def test_lanes_are_those_of_the_proxy() -> None:
    assert [lane_of(name) for name in ("math/1", "plain", "/x", "a/b/c")] == ["math", DEFAULT_LANE, DEFAULT_LANE, "a"]


def test_parts_of_a_name() -> None:
    assert as_part("agent.py-tasks.jsonl", 40) == "agent.py-tasks.jsonl"
    assert as_part("a b/c", 40).startswith("a-b-c-") and as_part("a b/c", 40) != as_part("a/b c", 40)
    assert len(as_part("x" * 100, 20)) == 20
    assert not as_part("é", 20).startswith("-")
    odd = ("ajet-agent", "ajet-ajet-x", "ajet é", "ajet-", "_agent.py", ":x", "@x", "-x", "é", "a\udcff", "x" * 300)
    for name in odd:
        assert check_id(as_part(name, 40)) and as_part(name, 40) != as_part(name + "+", 40)
    assert digest(["a", "b"]) != digest(["ab"]) and len(digest([])) == 12
