"""The systemd unit and the datagrams to systemd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import uuid
from pathlib import Path

import pytest

from ajet_proxy import systemd as service
from ajet_sdk.settings import ConfigError
from ajet_sdk.systemd import out_of_reach, unit_path


@pytest.mark.parametrize("user", [False, True])
def test_systemd_accepts_the_unit(tmp_path: Path, user: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    path = tmp_path / service.UNIT_NAME
    arguments = ("--listen", "127.0.0.1:9", "--tls-cert", "/a b/%x/$y")
    path.write_text(service.unit(arguments, user=user, drain_s=60, files={"tls_cert": "/a b/%x/$y"}))
    done = subprocess.run(
        ["systemd-analyze", "verify", *(["--user"] if user else ["--system"]), "--man=no", str(path)],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    complaints = [line for line in done.stderr.splitlines() if service.UNIT_NAME in line]
    assert complaints == []


def test_systemd_rates_the_units_exposure_as_low(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    path = tmp_path / service.UNIT_NAME
    path.write_text(service.unit(("--upstream", "http://127.0.0.1:8000"), user=False, drain_s=60))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager", str(path)],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    if "--offline" in done.stderr:
        pytest.skip("needs a systemd-analyze that rates files (250 or later)")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", [
    "Type=notify", "WatchdogSec=60", "TimeoutStartSec=300", "TimeoutStopSec=90",
    "Restart=on-failure", "RestartSec=2", "RestartPreventExitStatus=2",
    "StateDirectory=ajet", "StateDirectoryMode=0700", "UMask=0077", "LimitNOFILE=65536", "MemoryMax=80%",
    "OOMPolicy=continue", "NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes", "RestrictSUIDSGID=yes",
    "RestrictNamespaces=yes", "RestrictRealtime=yes", "LockPersonality=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service", "SystemCallFilter=~@privileged @resources", "SystemCallErrorNumber=EPERM",
    "After=network-online.target time-sync.target", "Wants=network-online.target",
])  # fmt: skip
@pytest.mark.parametrize("user", [False, True])
def test_every_unit_is_confined_and_limited_and_waits_for_the_drain(line: str, user: bool) -> None:
    assert line in service.unit((), user=user, drain_s=60).splitlines()


@pytest.mark.parametrize("line", [
    "DynamicUser=yes", "ProtectHome=read-only", "PrivateDevices=yes", "DevicePolicy=closed", "PrivateMounts=yes",
    "PrivateUsers=yes", "ProtectProc=invisible", "ProtectKernelTunables=yes", "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes", "ProtectControlGroups=yes", "ProtectClock=yes", "ProtectHostname=yes",
    "CapabilityBoundingSet=", "EnvironmentFile=-/etc/ajet/proxy.env", "WantedBy=multi-user.target",
])  # fmt: skip
def test_the_system_unit_has_a_user_of_its_own_and_nothing_of_the_machine(line: str) -> None:
    assert line in service.unit((), user=False, drain_s=60).splitlines()


def test_the_users_unit_asks_for_nothing_that_only_root_may() -> None:
    lines = service.unit((), user=True, drain_s=60).splitlines()
    assert "DynamicUser=yes" not in lines
    assert "WantedBy=default.target" in lines


def test_files_that_only_root_may_read_are_handed_over() -> None:
    arguments = ("--tls-key", "/etc/ssl/private/50%.pem", "--public-url", "https://x/$y%z")
    text = service.unit(arguments, user=False, drain_s=60, files={"tls_key": "/etc/ssl/private/50%.pem"})
    assert "LoadCredential=tls_key:/etc/ssl/private/50%%.pem\n" in text
    assert text.split("ExecStart=")[1].split("\n")[0].endswith("serve --tls-key %d/tls_key --public-url 'https://x/$$y%%z'")
    assert "LoadCredential" not in service.unit(arguments, user=True, drain_s=60, files={"tls_key": "/x"})


def test_a_flag_and_its_value_may_be_one_word() -> None:
    arguments = ("--tls-key=/k=1", "--upstream", "a=http://b")
    text = service.unit(arguments, user=False, drain_s=60, files={"tls_key": "/k=1"})
    assert "LoadCredential=tls_key:/k=1\n" in text
    assert text.split("ExecStart=")[1].split("\n")[0].endswith("serve --tls-key %d/tls_key --upstream a=http://b")


def test_a_program_in_a_private_folder_is_out_of_the_services_reach(tmp_path: Path) -> None:
    private = tmp_path / "private"
    (private / "bin").mkdir(parents=True)
    private.chmod(0o700)
    assert out_of_reach(private / "bin" / "python") == private
    assert out_of_reach(Path("/usr/bin/env")) is None


def test_where_the_unit_goes() -> None:
    assert unit_path(service.UNIT_NAME, user=False, env={}) == Path("/etc/systemd/system/ajet-proxy.service")
    users = unit_path(service.UNIT_NAME, user=True, env={"XDG_CONFIG_HOME": "/c"})
    assert users == Path("/c/systemd/user/ajet-proxy.service")


def test_the_services_environment_is_what_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "proxy.env"
    assert service.environment(file) == {"STATE_DIRECTORY": "%S/ajet"}
    monkeypatch.setenv("AJET_LISTEN", "of the shell that installs it")
    lines = ("# AJET_A=1", "; AJET_B=2", "", "no sign", "AJET_C = 3 4 ", 'AJET_D="5 # 6"', "AJET_E='7'", 'AJET_F=a=b"')
    file.write_text("\n".join([*lines, "AJET_G="]))
    said = {"AJET_C": "3 4", "AJET_D": "5 # 6", "AJET_E": "7", "AJET_F": 'a=b"', "AJET_G": ""}
    assert service.environment(file) == {"STATE_DIRECTORY": "%S/ajet", **said}


def test_the_environment_file_is_the_one_that_the_unit_names() -> None:
    assert service.environment_file(user=False, env={}) == Path("/etc/ajet/proxy.env")
    assert service.environment_file(user=True, env={"XDG_CONFIG_HOME": "/c"}) == Path("/c/ajet/proxy.env")
    assert "EnvironmentFile=-%E/ajet/proxy.env" in service.unit((), user=True, drain_s=60)


def test_systemd_is_asked_to_wait_for_the_drain(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "s"))
        server.settimeout(300)
        assert service.notify_stopping(600.5, {"NOTIFY_SOCKET": str(tmp_path / "s")})
        assert server.recv(100) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=630000000"


def test_notify_speaks_to_a_path_and_to_an_abstract_address(tmp_path: Path) -> None:
    for address in (str(tmp_path / "s"), f"@ajet-{uuid.uuid4()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind("\0" + address[1:] if address[0] == "@" else address)
            server.settimeout(300)
            assert service.notify("READY=1", {"NOTIFY_SOCKET": address})
            assert server.recv(100) == b"READY=1"


def test_notify_is_silent_where_nobody_listens(tmp_path: Path) -> None:
    assert not service.notify("READY=1", {})
    assert not service.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "none")})


def test_a_socket_is_ours_only_if_it_is_handed_to_this_process() -> None:
    for env in ({}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}):
        assert service.handed_socket(env, address=("127.0.0.1", 1)) is None
    with pytest.raises(ConfigError, match="hands us 2 sockets"):
        service.handed_socket({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}, address=("127.0.0.1", 1))
