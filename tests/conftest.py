"""Which tests run where: folders decide the environment; what cannot run here is skipped with the command that does.

`tests/e2e`, `tests/gpu` and `tests/trainer/engine` need `.venv-engine` (torch, vLLM, verl); `tests/proxy` needs the
daemon's Python.
Plain ``pytest`` in either environment therefore runs what that environment can; ``make test`` runs each test once.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.kit.fixtures"]

settings.register_profile(  # a busy machine is no failure
    "ajet", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ajet")

HERE = Path(__file__).parent
ENGINE_FOLDERS = ("e2e", "gpu", "trainer/engine")
HAS_ENGINE = importlib.util.find_spec("torch") is not None

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as in a shell's background or under nohup; children inherit it
        signal.signal(number, usual)

collect_ignore = [*([] if HAS_ENGINE else ENGINE_FOLDERS), *([] if sys.version_info >= (3, 12) else ["proxy"])]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under coverage, notes whose test file runs a line (see `tests.kit.own_coverage`)."""
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage else None
    if running:
        running.switch_context(item.path.relative_to(HERE).as_posix())
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(
        reason="needs an NVIDIA GPU with vLLM and verl; there: .venv-engine/bin/python -m pytest -m gpu"
    )
    not_asked = pytest.mark.skip(reason="needs the libraries of .venv-integrations: make test-integrations")
    asked = "integrations" in config.option.markexpr
    has_gpu = shutil.which("nvidia-smi") is not None
    items.sort(key=lambda item: "vllm" in getattr(item, "fixturenames", ()))  # it starts when all the rest is done
    for item in items:
        folder = item.path.relative_to(HERE).as_posix()
        if folder.startswith(ENGINE_FOLDERS):
            item.add_marker("engine")
        if folder.startswith("e2e/"):
            item.add_marker("e2e")
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("integrations") and not asked:
            item.add_marker(not_asked)
