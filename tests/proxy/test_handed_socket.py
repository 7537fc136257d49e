"""A socket that somebody else listens on, as systemd's socket units do: who connects during a restart is answered."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.kit.proxy_process import PROXY

HAND_OVER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1');"
    "os.execv(sys.argv[2], sys.argv[2:])"
)
UPSTREAM = ("--upstream", "http://127.0.0.1:9")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as held:
        yield held


def serve(held: socket.socket, data: Path, *options: str, address: str = "") -> subprocess.Popen[str]:
    listen = address or f"127.0.0.1:{held.getsockname()[1]}"
    command: Sequence[str] = (
        sys.executable, "-c", HAND_OVER, str(held.fileno()), str(PROXY), "serve", "--listen", listen,
        "--data-dir", str(data), *UPSTREAM, *options,
    )  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith("AJET_")}
    return subprocess.Popen(
        command, pass_fds=[held.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ajet-proxy ready on ")


def ended(process: subprocess.Popen[str]) -> str:
    process.terminate()
    with process:
        _, said = process.communicate(timeout=300)
    return said


def test_who_connects_during_a_restart_waits_and_is_answered(listening: socket.socket, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/ajet/v1/status"
    first = serve(listening, tmp_path / "data")
    ready(first)
    assert httpx.get(url, timeout=300, trust_env=False).status_code == 200
    ended(first)
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=300, trust_env=False).status_code))
    asking.start()
    second = serve(listening, tmp_path / "data")
    ready(second)
    asking.join(300)
    assert answers == [200]
    ended(second)


@pytest.mark.parametrize(
    ("options", "address", "complaint"),
    [(("--workers", "2"), "", "listen for themselves"), ((), "127.0.0.1:1", "they must be the same")],
)
def test_a_socket_that_does_not_fit_is_refused(
    listening: socket.socket, tmp_path: Path, options: Sequence[str], address: str, complaint: str
) -> None:
    with serve(listening, tmp_path / "data", *options, address=address) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert complaint in said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("both", [True, False])
def test_a_socket_that_hears_ipv4_too_is_at_its_addresses_as_well(tmp_path: Path, both: bool) -> None:
    """As systemd makes it for ``ListenStream=[::]:8484``: the proxy is no engine of its own there."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the operator")
    secret.chmod(0o600)
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=both) as held:
        port = held.getsockname()[1]
        process = serve(
            held, tmp_path / "data", "--insecure", "--admin-secret-file", str(secret), "--upstream",
            f"http://127.0.0.1:{port}", address=f"[::]:{port}",
        )  # fmt: skip
        if not both:
            ready(process)
        said = ended(process) if not both else process.communicate(timeout=300)[1]
    assert ("is the proxy's own address" in said) == both
    assert process.returncode == (2 if both else 0)
