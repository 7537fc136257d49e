"""Nothing that was started may outlive its block; each case runs in a process of its own that owns its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ajet_trainer.quickstart.children import Children
from ajet_trainer.quickstart.machine import QuickstartError

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from ajet_trainer.quickstart.children import Children
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
    for _ in range(200):
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
        import ajet_trainer.quickstart.children as children
        children.TERM_GRACE_S = 1.0
        children.Program.end.__defaults__ = (1.0,)
        with Children() as programs:
            programs.start("sh", ["/bin/sh", "-c", {script!r}], folder / "log", os.environ)
            while len(list(folder.glob("*.pid"))) < 2:
                time.sleep(0.05)
        """,
    )
    started = pids(tmp_path, 2)
    assert owner.wait(30) == 0
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
    assert owner.wait(30) == 7
    assert not any(runs(pid) for pid in started)


def test_a_failed_program_is_quoted(tmp_path: Path) -> None:
    children = Children()
    script = "echo broken pipe fitting; exit 3"
    program = children.start("the thing", ["/bin/sh", "-c", script], tmp_path / "log", os.environ)
    program.process.wait(10)
    with pytest.raises(QuickstartError, match=r"(?s)the thing ended with status 3.*broken pipe fitting"):
        children.check()
