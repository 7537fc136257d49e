"""Who listens on a port, as far as /proc tells."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ajet_sdk import ports
from tests.kit.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_listens_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    name = Path("/proc/self/comm").read_text().strip()
    with socket.create_server((host, 0), family=family) as made:
        assert ports.listener(made.getsockname()[1]) == f"{name} (process {os.getpid()})"


def test_who_only_connects_or_is_bound_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as made, socket.create_connection(made.getsockname()) as there:
        assert ports.listener(there.getsockname()[1]) is None
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert ports.listener(bound.getsockname()[1]) is None
    assert ports.listener(free_port()) is None


def test_whose_files_may_not_be_seen_is_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError

    with socket.create_server(("127.0.0.1", 0)) as made:
        monkeypatch.setattr(ports.os, "listdir", refuse)
        assert ports.listener(made.getsockname()[1]) == "a program of another user"


def test_without_proc_nobody_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "Path", lambda *parts: tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as made:
        assert ports.listener(made.getsockname()[1]) is None
