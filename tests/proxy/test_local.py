"""Local interception: the kernel is asked for the connections of a program, in a network of its own."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ajet_proxy.io.intercept import interceptor
from ajet_proxy.io.runtime.process import WORKER
from ajet_proxy.settings import split_mode
from tests.kit.namespace import Namespace, lacking
from tests.kit.proxy_process import PROXY, ProxyProcess, failed_start
from tests.kit.stub_process import stub_process
from tests.proxy.test_serve import children

MOUNTS = Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else []
CGROUPS = next((line.split()[1] for line in MOUNTS if " cgroup2 " in line), "")
LACKING = lacking() or (None if CGROUPS else "needs cgroup v2") or (None if shutil.which("curl") else "needs curl")
pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
NAME = "ajetslocalcurl"
"""A program of this name alone is caught: the kernel looks at all programs of the machine."""
ATTACHED_S = 300.0
SUDO = """#!/bin/sh
while [ "${1#-}" != "$1" ] || [ "${1%%=*}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_a_named_program_is_caught_and_no_other(tmp_path: Path) -> None:
    caught = shutil.copy(str(shutil.which("curl")), tmp_path / NAME)
    (tmp_path / "sudo").write_text(SUDO)  # we are root already
    (tmp_path / "sudo").chmod(0o755)
    with ExitStack() as stack:
        net = stack.enter_context(Namespace())
        net.run("ip", "route", "add", "local", "192.0.2.0/24", "dev", "lo")
        net.hosts(tmp_path, api_openai_com="192.0.2.77")
        if CGROUPS != "/sys/fs/cgroup":
            net.run("mount", "--bind", CGROUPS, "/sys/fs/cgroup")
        engine = stack.enter_context(stub_process(inside=net.inside))
        path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        proxy = stack.enter_context(ProxyProcess(
            engine, tmp_path / "data", options=("--intercept", f"local:{NAME}"), env=path, inside=net.inside
        ))
        ca = str(tmp_path / "data" / "ca" / "mitmproxy-ca-cert.pem")
        ask = ("-sS", "--max-time", "300", "--cacert", ca, "https://api.openai.com/v1/models")
        until = time.monotonic() + ATTACHED_S
        while True:
            if "eBPF initialization failed" in proxy.errors():
                pytest.skip("needs the right to attach BPF programs to cgroups")
            told = net.run("sh", "-c", '"$0" "$@" || true', caught, *ask)
            if '"object"' in told or time.monotonic() > until:
                break
        assert '"owned_by":"vllm"' in told, told + proxy.errors()
        assert "Failed to connect" in net.run("sh", "-c", '! curl "$@"', "-", *ask)


@pytest.mark.skipif(sys.platform != "linux", reason="is about Linux")
def test_without_sudo_it_says_so_in_one_line(tmp_path: Path) -> None:
    options = ["--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")]
    status, said = failed_start([*options, "--intercept", f"local:{NAME}"], env={"PATH": str(tmp_path)})
    assert status == 1
    (line,) = [line for line in said.splitlines() if not line.startswith("WARNING ajet_proxy.io.engines.watch: ")]
    assert line.startswith("ajet-proxy: cannot intercept: Failed to run sudo.") and "backtrace" not in line


@pytest.mark.skipif(sys.platform != "linux", reason="is about Linux")
def test_workers_are_spared_whatever_their_program_is_called(tmp_path: Path) -> None:
    """A program that listens under a name that is caught is reached by nobody."""
    assert interceptor._spec(split_mode("local:python3")) == f"local:python3,!{WORKER}"
    with ProxyProcess(None, tmp_path / "data", options=("--workers", "2")) as proxy:
        assert [Path(f"/proc/{pid}/comm").read_text() for pid in children(proxy.pid)] == [f"{WORKER}\n"] * 2
