"""Agents that sample in every way, on real vLLMs, and verl's own logprobs of what they said.

For each way: the trainer's probabilities are as near to the engine's as at temperature 1; or the weights are p / q,
both written out by hand; or nothing of it is trained, and its reason is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ajet_trainer.link import Link
from ajet_trainer.sampling import Rule
from tests.e2e.conftest import Engine
from tests.kit import learner
from tests.kit.proxy_process import ProxyProcess
from tests.kit.shaped import RAW, SHAPES, ByHand, leased, play
from tests.kit.truth import Truth, measure

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NEAR = 1e-5
EXACT = {"temperature 1", "temperature 0.3", "temperature 0.7", "temperature 1.3"}
OF_RAW = {"temperature 1": "exact", "a grammar": "corrected", "greedy": "left out: greedy"}
"""The fate of calls with raw logprobs. The others are left out for these."""


@pytest.fixture(scope="module")
def by_hand(vllm: Engine) -> ByHand:
    return ByHand.of(vllm.model)


@pytest.fixture(scope="module")
def worker(vllm: Engine) -> Iterator[Any]:
    with learner.verl_here():
        yield learner.training_worker(vllm.model)


@pytest.fixture(scope="module")
def truths(
    vllm: Engine, shaped: Engine, worker: Any, by_hand: ByHand, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Truth]:
    """By engine and shape."""
    folder: Path = tmp_path_factory.mktemp("truth")
    found = {}
    for kind, engine, shapes in (("raw", vllm, RAW), ("processed", shaped, SHAPES)):
        with ProxyProcess(engine.url, folder / kind) as proxy, closing(Link(proxy.url)) as link:
            for shape in shapes:
                play(proxy.url, shape, model="tiny")
                found[kind, shape] = measure(worker, by_hand, leased(link, model="tiny"), Rule())
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_with_processed_logprobs_a_call_is_exact_or_weighted_by_p_over_q(
    truths: dict[tuple[str, str], Truth], shape: str
) -> None:
    truth = truths["processed", shape]
    if shape == "greedy":
        assert truth.verdict == "left out: greedy"
        return
    assert truth.verdict == ("exact" if shape in EXACT else "corrected")
    assert truth.engine_error < NEAR and truth.weight_error < 20 * NEAR
    assert truth.after is not None
    assert (truth.after.logprob < NEAR) == (shape in EXACT)
    assert (truth.before.logprob < NEAR) == (shape == "temperature 1")


@pytest.mark.parametrize("shape", RAW)
def test_with_raw_logprobs_only_what_they_are_of_is_trained(truths: dict[tuple[str, str], Truth], shape: str) -> None:
    truth = truths["raw", shape]
    assert truth.verdict == OF_RAW.get(shape, "left out: raw_logprobs")
    if truth.after is not None:
        assert truth.engine_error < NEAR and truth.weight_error < 20 * NEAR
