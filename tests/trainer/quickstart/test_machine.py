from __future__ import annotations

import socket
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from ajet_trainer.quickstart import machine
from ajet_trainer.quickstart.machine import QuickstartError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(0, 0, 50e9))
    monkeypatch.setattr(machine, "available_memory", lambda: 20.0)


@pytest.mark.usefixtures("roomy")
def test_a_good_machine_passes(tmp_path: Path) -> None:
    machine.check(tmp_path / "not" / "there", machine.free_port())


@pytest.mark.usefixtures("roomy")
def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(QuickstartError, match=f"port {port} is taken"):
            machine.check(tmp_path, port)


@pytest.mark.usefixtures("roomy")
def test_short_disk_and_memory_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1.0)
    with pytest.raises(QuickstartError, match=r"1\.0 GB of memory"):
        machine.check(tmp_path, 0)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(0, 0, 2e9))
    with pytest.raises(QuickstartError, match=r"2\.0 GB of free disk"):
        machine.check(tmp_path, 0)


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
    assert machine.program("ajet-proxy") == str(daemons / "ajet-proxy")
    assert machine.program("ajet") == str(ours / "ajet")
    (daemons / "ajet-proxy").unlink()
    (ours / "ajet-proxy").unlink()
    assert machine.program("ajet-proxy") == str(path / "ajet-proxy")
    with pytest.raises(QuickstartError, match="make setup"):
        machine.program("ajet-nothing")
