"""What every test stands on: which ones can run here, and the reason where one cannot."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

GPU_COMMAND = ".venv-engine/bin/python -m pytest -m gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this machine or this environment lacks, and says how to run it."""
    no_gpu = pytest.mark.skip(reason=f"needs an NVIDIA GPU; on a machine with one: {GPU_COMMAND}")
    no_engine = pytest.mark.skip(reason="needs .venv-engine: .venv-engine/bin/python -m pytest -m 'engine or e2e'")
    has_gpu = shutil.which("nvidia-smi") is not None
    has_engine = importlib.util.find_spec("torch") is not None
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(no_gpu)
        if "engine" in item.keywords and not has_engine:
            item.add_marker(no_engine)
