"""One real vLLM with the tiny model for the whole session: it takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.vllm_process import vllm_server


@dataclass(frozen=True, slots=True)
class Engine:
    """A running vLLM: its base URL, and the folder of the model it serves under the name ``tiny``."""

    url: str
    model: Path


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from tests.kit.tiny_model import build

    folder = tmp_path_factory.mktemp("vllm")
    model = build(folder / "tiny")
    with vllm_server(model, folder / "vllm.log") as url:
        yield Engine(url, model)
