"""Real vLLMs with the tiny model, one of each kind for the whole session: one takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import record_tapes
from tests.kit.proxy_process import ProxyProcess
from tests.kit.vllm_process import vllm_server


@dataclass(frozen=True, slots=True)
class Engine:
    """A running vLLM: its base URL, and the folder of the model it serves under the name ``tiny``."""

    url: str
    model: Path


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, and a proxy before it."""

    engine: Engine
    proxy: ProxyProcess


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from tests.kit.tiny_model import build

    folder = tmp_path_factory.mktemp("vllm")
    model = build(folder / "tiny")
    with vllm_server(model, folder / "vllm.log") as url:
        yield Engine(url, model)


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One with a reasoning parser."""
    from tests.kit.tiny_model import THINK, build

    folder = tmp_path_factory.mktemp("thinker")
    model = build(folder / "tiny", more=THINK)
    with vllm_server(model, folder / "vllm.log", options=record_tapes.REASONING) as url:
        yield Engine(url, model)


OWN = {"temperature": 0.7, "top_p": 0.9}
"""The defaults of the model of `shaped`."""


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with defaults of its model, and with processed logprobs."""
    from tests.kit.tiny_model import build

    folder = tmp_path_factory.mktemp("shaped")
    model = build(folder / "tiny", defaults=OWN)
    options = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    with vllm_server(model, folder / "vllm.log", options=options) as url:
        yield Engine(url, model)


@pytest.fixture(scope="module")
def pairs(vllm: Engine, thinker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Pair]]:
    """The plain engine and the one that reasons, each behind a proxy of its own."""
    folder = tmp_path_factory.mktemp("pairs")
    with ProxyProcess(vllm.url, folder / "plain") as plain, ProxyProcess(thinker.url, folder / "thinker") as thinking:
        yield Pair(vllm, plain), Pair(thinker, thinking)
        assert "Traceback" not in plain.errors() + thinking.errors()
