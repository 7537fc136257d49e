"""verl in this process, on a CPU: no Ray, one training worker, a tiny real model in float32.

What verl, torch and vLLM warn about is not ours to fix, so warnings are no errors in this folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.conftest import HAS_ENGINE
from tests.kit import learner
from tests.kit.ports import free_port
from tests.kit.source import ROOT
from tests.kit.tiny_model import build

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model "m" is not looked for


def pytest_configure(config: pytest.Config) -> None:
    """Imports verl, which asks for its platform then: a CPU, unless nothing but tests on a GPU is asked for."""
    platform = "nvidia" if config.option.markexpr == "gpu" and shutil.which("nvidia-smi") else "cpu"
    with patch.dict(os.environ, VERL_PLATFORM=platform, VERL_LOGGING_LEVEL="ERROR"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("cpu_worker", "learner", "loggers", "export") if HAS_ENGINE else ():
            import_module(f"ajet_trainer.backends.verl.{name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def verl_here() -> Iterator[None]:
    with learner.verl_here():
        yield


@pytest.fixture(scope="session")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which two training processes have written what `one_of_two` says."""
    out = tmp_path_factory.mktemp("two")
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.engine.one_of_two", str(tiny), str(out)], cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "VERL_PLATFORM": "cpu", "VERL_LOGGING_LEVEL": "ERROR"},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [process.wait(600) for process in started] == [0, 0]
    return out


@pytest.fixture(scope="session")
def worker(tiny: Path, verl_here: None) -> Any:
    return learner.training_worker(tiny)
