"""Every test of a whole front runs twice: with the ledger in the front's process, and with the front in a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ajet_proxy.io.engines import probe
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.front import Front


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if getattr(metafunc.module, "Front", None) is Front:
        metafunc.parametrize("either_way", [False, True], ids=["one process", "worker"], indirect=True)


@pytest.fixture(autouse=True)
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Front, "remote", getattr(request, "param", False))


@pytest.fixture
async def front(either_way: None, stub: EngineStub) -> AsyncIterator[Front]:
    """A listening front before `stub`."""
    async with Front(stub.url) as running:
        yield running


@pytest.fixture
def asked_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that answer no question about themselves: nobody waits long."""
    monkeypatch.setattr(probe, "LIMIT_S", 1.0)
