"""Every test of a whole front runs twice: with the ledger in the front's process, and with the front in a worker."""

from __future__ import annotations

import pytest

from tests.proxy.io.front import Front


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if getattr(metafunc.module, "Front", None) is Front:
        metafunc.parametrize("either_way", [False, True], ids=["one process", "worker"], indirect=True)


@pytest.fixture(autouse=True)
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Front, "remote", getattr(request, "param", False))
