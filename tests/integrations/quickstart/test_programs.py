"""Nothing that was started may outlive its block; each case of that runs in a process of its own that owns its
children. And what a machine lacks is named before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from ajet_trainer import doctor
from integrations.quickstart import programs
from integrations.quickstart.plan import Plan
from integrations.quickstart.programs import Children, QuickstartError

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from integrations.quickstart.programs import Children
folder = Path(sys.argv[1])
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def start(tmp_path: Path, body: str) -> subprocess.Popen[bytes]:
    code = HEAD + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)


def pids(tmp_path: Path, count: int) -> list[int]:
    for _ in range(6000):
        found = [int(path.read_text()) for path in tmp_path.glob("*.pid") if path.read_text()]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError("the programs did not start")


ORPHAN = "sleep 300 & echo $! > {}/orphan.pid; echo $$ > {}/parent.pid; {}"


@pytest.mark.parametrize("ending", ["exit 0", "wait", "trap '' TERM; while true; do sleep 1; done"])
def test_orphans_end_with_the_block(tmp_path: Path, ending: str) -> None:
    script = ORPHAN.format(tmp_path, tmp_path, ending)
    owner = start(
        tmp_path,
        f"""
        import integrations.quickstart.programs
        integrations.quickstart.programs.TERM_GRACE_S = 1.0
        with Children() as programs:
            programs.start("sh", ["/bin/sh", "-c", {script!r}], folder / "log", os.environ)
            while len(list(folder.glob("*.pid"))) < 2:
                time.sleep(0.05)
        """,
    )
    started = pids(tmp_path, 2)
    assert owner.wait(300) == 0
    assert not any(runs(pid) for pid in started)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_everything(tmp_path: Path, number: int) -> None:
    script = ORPHAN.format(tmp_path, tmp_path, "wait")
    owner = start(
        tmp_path,
        f"""
        try:
            with Children() as programs:
                programs.start("sh", ["/bin/sh", "-c", {script!r}], folder / "log", os.environ)
                time.sleep(300)
        except KeyboardInterrupt:
            sys.exit(7)
        """,
    )
    started = pids(tmp_path, 2)
    os.kill(owner.pid, number)
    assert owner.wait(300) == 7
    assert not any(runs(pid) for pid in started)


def test_a_failed_program_is_quoted(tmp_path: Path) -> None:
    children = Children()
    script = "echo broken pipe fitting; exit 3"
    program = children.start("the thing", ["/bin/sh", "-c", script], tmp_path / "log", os.environ)
    program.process.wait(300)
    with pytest.raises(QuickstartError, match=r"(?s)the thing ended with status 3.*broken pipe fitting"):
        children.check()


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(0, 0, 50e9))
    monkeypatch.setattr(doctor, "memory", lambda _: 20e9)
    monkeypatch.setattr(doctor, "parameters", lambda _: 135_000_000)


@pytest.mark.usefixtures("roomy")
def test_a_good_machine_passes(tmp_path: Path) -> None:
    programs.check_machine(Plan(), tmp_path / "not" / "there", tmp_path)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(("device", "change", "said"), [
    ("cpu", {"memory": lambda _: 7e9}, r"take 7\.7 GB, and 7\.0 GB are free: .*end other programs"),
    ("cpu", {"parameters": lambda _: 2_000_000_000}, r"take 45\.0 GB, and 20\.0 GB are free"),
    ("cuda", {"gpus": lambda: [(16_000_000_000, 80_000_000_000)]}, r"take 31\.2 GB, and 16\.0 GB are free"),
])  # fmt: skip
def test_what_a_machine_lacks_is_said_as_the_doctor_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, change: dict[str, Any], said: str
) -> None:
    [(name, is_)] = change.items()
    monkeypatch.setattr(doctor, name, is_)
    with pytest.raises(QuickstartError, match=said):
        programs.check_machine(Plan(device=device), tmp_path, tmp_path)


@pytest.mark.usefixtures("roomy")
def test_a_short_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(0, 0, 2e9))
    with pytest.raises(QuickstartError, match=r"2 checkpoints take 8\.2 GB, and 2\.0 GB are free"):
        programs.check_machine(Plan(), tmp_path, tmp_path)


def test_programs_are_found_beside_us_in_the_daemons_environment_and_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, daemons, path = (tmp_path / name for name in (".venv-engine/bin", ".venv/bin", "elsewhere"))
    for folder in (ours, daemons, path):
        folder.mkdir(parents=True)
        for name in ("ajet", "ajet-proxy"):
            (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", str(path))
    assert programs.path_of("ajet-proxy") == str(daemons / "ajet-proxy")
    assert programs.path_of("ajet") == str(ours / "ajet")
    (daemons / "ajet-proxy").unlink()
    (ours / "ajet-proxy").unlink()
    assert programs.path_of("ajet-proxy") == str(path / "ajet-proxy")
    with pytest.raises(QuickstartError, match="make setup"):
        programs.path_of("ajet-nothing")
