"""A proxy that answers the control routes, the command in this process, and a scripted engine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from ajet_sdk import cli
from tests.kit.control_stub import ControlStub
from tests.kit.patience import LIMITS
from tests.kit.proxy_process import ProxyProcess

Ajet = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, key or episode of whoever runs the tests, and patience."""
    for name in ("AJET_PROXY_URL", "AJET_API_KEY", "AJET_EPISODE", "AJET_TASK", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, seconds in LIMITS.items():
        monkeypatch.setattr(name, seconds)


@pytest.fixture
def stub(environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlStub]:
    """A proxy that answers the control routes only. The environment names it, with no key."""
    with ControlStub() as running:
        monkeypatch.setenv("AJET_PROXY_URL", running.url)
        yield running


@pytest.fixture
def daemon(proxy: ProxyProcess, environment: None, monkeypatch: pytest.MonkeyPatch) -> ProxyProcess:
    """The real proxy as a process, which the environment names."""
    monkeypatch.setenv("AJET_PROXY_URL", proxy.url)
    return proxy


@pytest.fixture
def ajet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ajet:
    """Runs the command in this process: exit code, standard output, standard error."""
    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ajet", *argv])
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # those of the tests stay
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return run
