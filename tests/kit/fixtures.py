"""Fixtures that many tests share, registered in `tests/conftest.py`.

A folder or a file that needs another thing under one of these names overrides it. What belongs to the daemon is
imported where it is made, because the trainer's environment reads this file too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.kit.engine_stub import EngineStub
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.stub_process import stub_process

if TYPE_CHECKING:
    from tests.kit.ledger_rig import LedgerRig
    from tests.proxy.serving import Client


@pytest.fixture
def rig() -> LedgerRig:
    """A ledger that is checked after each event."""
    from tests.kit.ledger_rig import LedgerRig

    return LedgerRig(watch=True)


@pytest.fixture
async def stub(request: pytest.FixtureRequest) -> AsyncIterator[EngineStub]:
    """A scripted engine in the test's event loop. A module says more of it as ``STUB``."""
    async with EngineStub(**getattr(request.module, "STUB", {})) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The URL of a scripted engine in a process of its own."""
    with stub_process() as url:
        yield url


@pytest.fixture(scope="module")
def proxy(
    request: pytest.FixtureRequest, engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """The daemon as a process before `engine`, which has met no error of its own at the end. A module gives it options
    as ``DAEMON``, a test more as this fixture's parameter."""
    if not PROXY.exists():
        pytest.skip("needs ajet-proxy in .venv: .ci/setup daemon")
    options = (*getattr(request.module, "DAEMON", ()), *getattr(request, "param", ()))
    with ProxyProcess(engine, tmp_path_factory.mktemp("daemon") / "data", options=options) as running:
        yield running
        assert "Traceback" not in running.errors()


@pytest.fixture
async def client(request: pytest.FixtureRequest, tmp_path: Path, stub: EngineStub) -> AsyncIterator[Client]:
    """Asks a daemon before `stub`, whole in the test's event loop, with its data in `tmp_path`. A module gives it
    settings as ``SERVED``."""
    from tests.proxy.serving import serving

    async with serving(tmp_path, upstream=(stub.url,), **getattr(request.module, "SERVED", {})) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=300, trust_env=False, verify=False) as client:
        yield client
