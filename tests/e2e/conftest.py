"""Real vLLMs with the tiny model, one of each kind for the whole session: one takes half a minute to start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit import record_tapes
from tests.kit.proxy_process import PROXY, ProxyProcess
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


@contextmanager
def served(folder: Path, options: Sequence[str] = (), **model: Any) -> Iterator[Engine]:
    """An engine with these options, and a tiny model that is built so."""
    from tests.kit.tiny_model import build

    made = build(folder / "tiny", **model)
    with vllm_server(made, folder / "vllm.log", options=options) as url:
        yield Engine(url, made)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with served(tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One with a reasoning parser."""
    with served(tmp_path_factory.mktemp("thinker"), record_tapes.REASONING, more=("<think>", "</think>")) as engine:
        yield engine


OWN = {"temperature": 0.7, "top_p": 0.9}
"""The defaults of the model of `shaped`."""


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with defaults of its model, and with processed logprobs."""
    options = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    with served(tmp_path_factory.mktemp("shaped"), options, defaults=OWN) as engine:
        yield engine


def doctor(url: str, folder: Path, *options: str) -> list[dict[str, str]]:
    """The findings of ``ajet-proxy doctor`` about an engine, after a check that a fault fails it."""
    done = subprocess.run(
        [str(PROXY), "doctor", "--json", "--upstream", url, "--data-dir", str(folder / "none"), "--listen",
         "127.0.0.1:0", *options], capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    assert done.returncode == any(item["level"] == "fault" for item in found), found
    return found


@pytest.fixture(scope="module")
def pairs(vllm: Engine, thinker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Pair]]:
    """The plain engine and the one that reasons, each behind a proxy of its own."""
    folder = tmp_path_factory.mktemp("pairs")
    with ProxyProcess(vllm.url, folder / "plain") as plain, ProxyProcess(thinker.url, folder / "thinker") as thinking:
        yield Pair(vllm, plain), Pair(thinker, thinking)
        assert "Traceback" not in plain.errors() + thinking.errors()
