"""The code that an episode is played with: the digest of the program's own file, or of the agent's."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ajet_sdk.play.revision import Changes, Digest, of_agent, of_program

FILES = ("agent.py", "tool", "data.json", "package/__main__.py", "package/part.py", "app.jar", "main.go")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some programs in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "package").mkdir()
    for name in FILES:
        (tmp_path / name).write_text("print(1)\n")
    (tmp_path / "tool").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        (["python", "agent.py"], "agent.py"),
        (["/usr/bin/python3.12", "-u", "agent.py", "data.json"], "agent.py"),
        ([sys.executable, "agent.py"], "agent.py"),
        (["python", "-m", "package", "data.json"], "package/__main__.py"),
        (["python", "-um", "package"], "package/__main__.py"),
        (["python", "-m", "package.part"], "package/part.py"),
        (["env", "A=1", "python", "agent.py"], "agent.py"), (["/usr/bin/env", "python", "agent.py"], "agent.py"),
        (["uv", "run", "agent.py"], "agent.py"), (["stdbuf", "-oL", "python", "agent.py"], "agent.py"),
        (["taskset", "-c", "0", "./tool"], "tool"), (["./tool", "data.json"], "tool"),
        (["java", "-jar", "app.jar"], "app.jar"), (["go", "run", "main.go"], "main.go"),
        (["sh", "-c", "python agent.py"], None), (["python", "-c", "print(1)"], None), (["true"], None),
        (["python", "-m", "json.tool"], None), (["python", "-m"], None), (["no such program", "\0"], None),
    ],
)
def test_the_own_file_of_a_program(here: Path, argv: Sequence[str], file: str | None) -> None:
    digest = of_program(argv)
    assert digest.name == (Path(argv[0]) if file is None else Path(file)).name
    before = digest()
    assert (before is None) == (file is None)
    for other in FILES:
        (here / other).write_text((here / other).read_text() + "# more\n")
        assert (digest() != before) == (other == file), other
        before = digest()


def test_a_program_of_the_users_own_is_found_by_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir("/")
    assert of_program(["tool"]).file == here / "tool"


def test_a_module_is_looked_for_where_python_looks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere/mine.py").write_text("print(4)\n")
    monkeypatch.setenv("PYTHONPATH", str(here / "elsewhere"))
    assert of_program(["python", "-m", "mine"]).file == here / "elsewhere/mine.py"
    assert of_program(["python", "__main__.py"], cwd="package")() == of_program(["python", "package/__main__.py"])()


def test_a_file_that_is_gone_has_no_revision_until_it_is_back(here: Path) -> None:
    digest = of_program(["python", "agent.py"])
    before, text = digest(), (here / "agent.py").read_text()
    (here / "agent.py").unlink()
    assert digest() is None
    (here / "agent.py").write_text(text)
    assert digest() == before


def test_what_has_not_changed_is_not_read_again(here: Path) -> None:
    digest = of_program(["python", "agent.py"])
    before, stat = digest(), os.stat("agent.py")
    with open("agent.py", "r+b") as file:
        file.write(b"PRINT")
    os.utime("agent.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest() == before


@pytest.mark.parametrize("looks", ["aa", "abb.b", "abcc.b", "ab_cc.", "a__aa", "abb.aa."])
def test_each_change_is_told_once_it_stays(looks: str) -> None:
    """A look that finds no file is ``_``, and each that is told of has a dot behind it."""
    found = iter([None if one == "_" else one for one in looks if one != "."])
    changes = Changes(lambda: next(found))
    assert looks[0] + "".join(one + "." * changes.look() for one in looks[1:] if one != ".") == looks


class Player:
    def __call__(self, task: str, episode: object) -> float:
        return 1.0


def agent(task: str, episode: object) -> float:
    return 1.0


@functools.wraps(agent)
def wrapped(*args: object) -> float:
    return 1.0


@pytest.mark.parametrize("found", [agent, wrapped, functools.partial(agent, "t"), Player(), Player().__call__])
def test_an_agents_code_is_in_its_file(found: object) -> None:
    digest = of_agent(found)
    assert digest() == Digest(Path(__file__))() is not None
    assert digest.name == "test_revision.py"


def test_what_is_not_written_in_python_has_none() -> None:
    assert (of_agent(print)(), of_agent(print).name) == (None, "agent")
