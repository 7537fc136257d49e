"""Which code an episode is played with: whatever changes what a program does changes its digest, and nothing else."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ajet_sdk.play.revision import MOST_BYTES, Digest, is_own, of_agent, of_program, shown, told

FILES = (
    "agent.py", "tool", "data.json", "package/__main__.py", "package/part.py", "app.jar", "Makefile", "main.go",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some programs in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "agent.py").write_text("print(1)\n")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "data.json").write_text("{}")
    for name in ("app.jar", "Makefile", "main.go"):
        (tmp_path / name).write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("print(2)\n")
    (tmp_path / "package/part.py").write_text("print(3)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        (["python", "agent.py"], "agent.py"),
        (["/usr/bin/python3.12", "-u", "agent.py", "data.json"], "agent.py"),
        (["python", "-m", "package", "data.json"], "package/__main__.py"),
        (["python", "-um", "package"], "package/__main__.py"),
        (["python3", "-mpackage.part"], "package/part.py"),
        (["python", "package", "data.json"], "package/__main__.py"),
        (["python", "-m", "package.part"], "package/part.py"),
        (["env", "A=1", "python", "agent.py"], "agent.py"),
        (["uv", "run", "agent.py"], "agent.py"),
        (["sh", "-c", "python agent.py --fast"], "agent.py"),
        (["./tool", "data.json"], "tool"),
        (["bash", "-lc", "python agent.py > data.json"], "agent.py"),
        (["bash", "-lc", "cd package; exec python part.py"], "package/part.py"),
        (["sh", "-c", "cd package && python ../agent.py"], "agent.py"),
        (["sh", "-c", "python -m package.part"], "package/part.py"), (["sh", "-c", "sh data.json"], "data.json"),
        (["stdbuf", "-oL", "python", "agent.py"], "agent.py"),
        (["taskset", "-c", "0", "./tool"], "tool"),
        (["taskset", "-c", "0", "python", "agent.py"], "agent.py"),
        (["nohup", "python", "-u", "agent.py"], "agent.py"),
        (["xargs", "-a", "/dev/null", "python", "agent.py"], "agent.py"),
        (["java", "-jar", "app.jar"], "app.jar"),
        (["make", "play"], "Makefile"),
        (["go", "run", "main.go"], "main.go"), (["go", "run", "."], "main.go"),
        (["timeout", "5", "bash", "-c", "./tool"], "tool"),
    ],
)
def test_where_the_code_of_a_program_is(here: Path, argv: Sequence[str], file: str) -> None:
    digest, before = of_program(argv), of_program(argv)()
    assert digest() == before is not None
    assert len(before) == 16
    for other in FILES:
        (here / other).write_text((here / other).read_text() + "# more\n")
        assert (digest() != before) == (other == file), other
        before = digest()


def test_code_that_stands_in_the_command_is_its_own_revision(here: Path) -> None:
    one, two = of_program(["python", "-c", "print(1)"])(), of_program(["python", "-c", "print(2)"])()
    assert None not in (one, two) and one != two
    assert of_program(["sh", "-c", "echo 'open"])() is not None


def test_arguments_that_look_like_code_count_too(here: Path) -> None:
    (here / "big.py").touch()
    os.truncate("big.py", MOST_BYTES + 1)
    digest = of_program(["python", "agent.py", "--config", "c.yaml", "./tool", "big.py", "data.json", "agent.py", "\0"])
    assert [path.name for path in digest.files] == ["agent.py", "tool"]
    (here / "c.yaml").write_text("a: 1")
    digest = of_program(["./tool", "--config", "c.yaml"])
    assert [path.name for path in digest.files] == ["tool", "c.yaml"]
    assert of_program(["python", "big.py"]).files == (Path("big.py"),)


def test_a_program_of_the_users_own_is_found_behind_another_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir("/")
    assert of_program(["timeout", "9", "tool"]).files == (here / "tool",)
    assert of_program(["tool"]).files == (here / "tool",)


def test_what_is_the_users_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/at/someone")
    assert [is_own(Path(path)) for path in ("agent.py", "/at/someone/bin/x", "/usr/bin/env")] == [True, True, False]
    assert shown([here / "agent.py", Path("/usr/bin/env")]) == "agent.py, /usr/bin/env"
    assert shown([Path(name) for name in "abcdef"]) == "a, b, c, d and 2 more"


def test_an_interpreter_without_a_script_is_the_program(here: Path) -> None:
    python = of_program([sys.executable])()
    assert python is not None
    for words in (["-m", "json.tool"], ["-m"], ["-c"], ["-m", "."], ["no-such-file.py"]):
        assert of_program([sys.executable, *words])() == python


def test_a_module_is_looked_for_where_python_looks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere/mine.py").write_text("print(4)\n")
    monkeypatch.setenv("PYTHONPATH", str(here / "elsewhere"))
    digest = of_program(["python", "-m", "mine"])
    before = digest()
    (here / "elsewhere/mine.py").write_text("print(5)\n")
    assert digest() != before


def test_the_reward_command_counts_too(here: Path) -> None:
    plain = of_program(["./tool"])()
    digest = of_program(["./tool"], "python agent.py")
    before = digest()
    assert before != plain != of_program(["./tool"], "python agent.py --strict")() != before
    (here / "agent.py").write_text("print('judged otherwise')\n")
    assert digest() != before


def test_a_folder_of_its_own(here: Path, tmp_path: Path) -> None:
    assert of_program(["python", "__main__.py"], cwd="package")() == of_program(["python", "package/__main__.py"])()


def test_a_file_that_is_gone_has_no_revision_until_it_is_back(here: Path) -> None:
    digest = of_program(["python", "agent.py"])
    before, text = digest(), (here / "agent.py").read_text()
    (here / "agent.py").unlink()
    assert digest() is None
    (here / "agent.py").write_text(text)
    assert digest() == before
    assert of_program(["no such program"])() is None


def test_what_has_not_changed_is_not_read_again(here: Path) -> None:
    digest = of_program(["python", "agent.py"])
    before, stat = digest(), os.stat("agent.py")
    with open("agent.py", "r+b") as file:
        file.write(b"PRINT")
    os.utime("agent.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest() == before


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
    assert digest() == Digest([Path(__file__)])() is not None
    assert digest.name == "test_revision.py"


def test_what_is_not_written_in_python_has_none() -> None:
    assert (of_agent(print)(), of_agent(print).name) == (None, "agent")


def test_one_that_is_named_is_that() -> None:
    assert told("r1", lambda: "r2")() == "r1"
    assert told(None, lambda: "r2")() == "r2"
