"""verl in this process, on a CPU: no Ray, one training worker, a tiny real model in float32.

What verl, torch and vLLM warn about is not ours to fix, so warnings are no errors in this folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import learner
from tests.kit.tiny_model import build

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model "m" is not looked for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def verl_here() -> Iterator[None]:
    with learner.verl_here():
        yield


@pytest.fixture(scope="session")
def worker(tiny: Path, verl_here: None) -> Any:
    return learner.training_worker(tiny)
