"""A real vLLM with a reasoning parser: an agent that wants no reasoning gets none; the ids are stored all the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e import asking
from tests.e2e.conftest import Engine
from tests.kit import record_tapes, wire
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig

pytestmark = pytest.mark.slow

CASES = {name: (route, body) for name, route, body in record_tapes.reasoning_cases()}


@pytest.fixture(scope="module")
def proxy(thinker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(thinker.url, tmp_path_factory.mktemp("reasoning") / "data") as running:
        yield running
        assert "Traceback" not in running.errors()


@pytest.fixture(scope="module")
def through(proxy: ProxyProcess) -> dict[str, wire.Answer]:
    return asking.ask_all(proxy.url, "/e/{}", CASES)


@pytest.fixture(scope="module")
def direct(thinker: Engine) -> dict[str, wire.Answer]:
    return asking.ask_all(thinker.url, "", CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_agent_sees_the_engines_own_answer(
    name: str, through: dict[str, wire.Answer], direct: dict[str, wire.Answer], proxy: ProxyProcess, thinker: Engine
) -> None:
    asking.once_alike(
        partial(asking.the_agent_sees, named=True),
        (through[name], direct[name]),
        lambda number: asking.both(name, number, proxy.url, thinker.url, *CASES[name]),
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_stored_is_what_the_engine_reports(
    name: str, through: dict[str, wire.Answer], proxy: ProxyProcess, thinker: Engine
) -> None:
    with Rig(proxy.url) as rig:
        calls = rig.record(name)["calls"]
    asking.stored_is_reported(name, CASES, calls, through[name], thinker.url)


def test_the_reasoning_was_there(direct: dict[str, wire.Answer]) -> None:
    """Otherwise nothing above was put to the test."""
    assert direct["chat-reasoning"].json()["choices"][0]["message"]["reasoning"]
    assert b'"reasoning":"' not in direct["chat-quiet-stream"].body
