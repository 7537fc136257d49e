"""The unit of a supervisor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.runs import systemd as service
from ajet_trainer.runs.allowed import Allowed

GIVEN: dict[str, Any] = {"proxy": "https://proxy:8484", "allow": "/a b/%x/$y.toml", "name": None}
ALLOWED = Allowed(Path("/srv/a b/runs"), {}, {"fast": "/dev/shm/100%"}, (), {})


def unit(user: bool = False) -> str:
    return service.unit(GIVEN, ALLOWED, user=user, owner="ajet")


def analyzed(tmp_path: Path, *words: str, text: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    path = tmp_path / service.UNIT_NAME
    path.write_text(text)
    return subprocess.run(
        ["systemd-analyze", *words, str(path)], capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip


@pytest.mark.parametrize("user", [False, True])
def test_systemd_accepts_the_unit(tmp_path: Path, user: bool) -> None:
    done = analyzed(tmp_path, "verify", "--user" if user else "--system", "--man=no", text=unit(user))
    assert [line for line in done.stderr.splitlines() if service.UNIT_NAME in line] == []


def test_systemd_rates_the_units_exposure_as_medium_at_most(tmp_path: Path) -> None:
    done = analyzed(tmp_path, "security", "--offline=true", "--threshold=45", "--no-pager", text=unit())
    if "--offline" in done.stderr:
        pytest.skip("needs a systemd-analyze that rates files (250 or later)")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", [
    "KillMode=process", "TimeoutStopSec=2100", "Restart=on-failure", "RestartPreventExitStatus=2", "UMask=0077",
    "NoNewPrivileges=yes", "ProtectSystem=strict", "RestrictNamespaces=yes", "SystemCallFilter=@system-service",
    'ReadWritePaths="-/tmp" "-/srv/a b/runs" "-/dev/shm/100%%"',
])  # fmt: skip
@pytest.mark.parametrize("user", [False, True])
def test_every_unit_is_confined_and_lets_trainers_outlive_a_supervisor(line: str, user: bool) -> None:
    assert line in unit(user).splitlines()


def test_it_hides_no_device_and_keeps_temporary_files() -> None:
    said = [line.partition("=")[0] for line in unit().splitlines()]
    assert not {"PrivateDevices", "PrivateTmp", "DynamicUser", "DevicePolicy", "ProtectClock"} & set(said)
    assert "User=ajet" in unit().splitlines()
    assert "User=ajet" not in unit(user=True)


def test_the_command_is_written_so_that_systemd_expands_nothing() -> None:
    command = unit().split("ExecStart=")[1].split("\n")[0]
    assert command.endswith("-m ajet_trainer.cli serve --proxy https://proxy:8484 --allow '/a b/%%x/$$y.toml'")


def test_installing(tmp_path: Path) -> None:
    allow, said = tmp_path / "allow.toml", list[str]()
    allow.write_text(f'runs = "{tmp_path}"')
    given = {"proxy": "http://a:1", "allow": str(allow), "name": "s"}
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    service.install(given, user=True, only_print=True, env=env, say=said.append)
    service.install(given, user=True, only_print=False, env=env, say=said.append)
    path = tmp_path / "config" / "systemd" / "user" / service.UNIT_NAME
    assert path.read_text() == said[0] + "\n"
    assert "--name s" in said[0]
    assert f"wrote {path}" in said[1]
    assert "systemctl --user enable" not in said[1].splitlines()[0]
    with pytest.raises(ConfigError, match="absolute path of --allow"):
        service.install({**given, "allow": "a.toml"}, user=True, only_print=True, env=env, say=said.append)
    allow.write_text(f'runs = "{tmp_path}/missing"')
    with pytest.raises(ConfigError, match="make it, owned by the user that should train"):
        service.install(given, user=False, only_print=True, env=env, say=said.append)
    allow.write_text('runs = "/"')
    with pytest.raises(ConfigError, match="belongs to root"):
        service.install(given, user=False, only_print=True, env=env, say=said.append)
