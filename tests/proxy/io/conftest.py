"""Every test of a whole front runs twice: with the ledger in the front's process, and with the front in a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ajet_proxy.io.capture import continuity, models
from ajet_proxy.io.control import openings, runs
from ajet_proxy.io.engines import probe, questions, watch
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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, supervisors and lanes have all the time that a busy machine takes."""
    for module, names in (
        (continuity, ("LIMIT_S",)), (models, ("PATIENCE_S",)), (openings, ("HOLD_S",)), (probe, ("LIMIT_S",)),
        (questions, ("SCORE_S", "STOP_S", "TEXT_S")), (runs, ("VERDICT_S",)), (watch, ("ANSWER_S",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, 300.0)


@pytest.fixture
async def flying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sleeps no second: where no socket has news, its clock jumps to the next timer. What the machine takes
    for its work is no time."""
    loop: Any = asyncio.get_running_loop()
    select, now = loop._selector.select, loop.time()

    def jump(timeout: float | None = None) -> Any:
        nonlocal now
        news = select(timeout if timeout is None else min(timeout, 0.02))
        now += 0.0 if news else timeout or 0.0
        return news

    monkeypatch.setattr(loop._selector, "select", jump)
    monkeypatch.setattr(loop, "time", lambda: now)


@pytest.fixture
def asked_briefly(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that answer no question about themselves: nobody waits long."""
    monkeypatch.setattr(probe, "LIMIT_S", 1.0)
