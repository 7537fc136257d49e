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

import pytest

from integrations.quickstart import programs
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
    monkeypatch.setattr(programs.shutil, "disk_usage", lambda _: Usage(0, 0, 50e9))
    monkeypatch.setattr(programs, "memory", lambda _: 20e9)


@pytest.mark.usefixtures("roomy")
def test_a_good_machine_passes(tmp_path: Path) -> None:
    programs.check_machine(tmp_path / "not" / "there")


@pytest.mark.usefixtures("roomy")
def test_short_disk_and_memory_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "memory", lambda _: 1e9)
    with pytest.raises(QuickstartError, match=r"1\.0 GB of memory"):
        programs.check_machine(tmp_path)
    monkeypatch.setattr(programs.shutil, "disk_usage", lambda _: Usage(0, 0, 2e9))
    with pytest.raises(QuickstartError, match=r"2\.0 GB of free disk"):
        programs.check_machine(tmp_path)


@pytest.mark.usefixtures("roomy")
def test_a_larger_model_needs_more(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2_000_000_000)
    with pytest.raises(QuickstartError, match=r"20\.0 GB of memory are free; 24 GB are needed"):
        programs.check_machine(tmp_path, "cpu", tmp_path)


@pytest.mark.usefixtures("roomy")
def test_a_short_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = (16_000_000_000, 80_000_000_000)
    monkeypatch.setattr(programs, "gpu_memory", lambda: there)
    with pytest.raises(QuickstartError, match=r"16\.0 GB of a GPU's memory are free; 29 GB are needed, of which vLLM"):
        programs.check_machine(tmp_path, "cuda")
    there = (16_000_000_000, 24_000_000_000)
    programs.check_machine(tmp_path, "cuda")


def test_where_torch_sees_no_gpu_it_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert programs.gpu_memory() == (0, 0)


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
