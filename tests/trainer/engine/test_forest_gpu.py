"""The engine over a forest on a GPU, by flex attention, against verl's own over flat rows.

They need a GPU and a process of their own: verl has one platform for each. Flat rows are computed by plain products of
matrices. Each test notes how far the two are apart in pytest's report (``--junitxml``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from verl.plugin.platform import get_platform

from ajet_trainer.batch import Row
from tests.kit import learner
from tests.trainer.engine.test_forest_engine import LIMIT, Seen, advantages, grown, one_row, saved, with_adapters
from tests.trainer.engine.test_gradient import FULL, VOCABULARY, close, gradient, step_data

pytestmark = pytest.mark.gpu
FLEX = "flex_attention"
SHAPES = [(1, 12, 20, 4096), (2, 60, 120, 16384), (3, 60, 120, 600), (4, 24, 400, 1500)]
"""A seed, a number of rows, the most that one adds, and the tokens of a micro-batch."""
Note = Callable[[str, object], None]


@pytest.fixture(scope="module", autouse=True)
def verl_here() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if get_platform().device_name == "cpu":
        pytest.skip("this process uses the CPU: pytest -m gpu")
    torch.set_float32_matmul_precision("highest")
    for name, value in (("recompile_limit", 64), ("fail_on_recompile_limit_hit", True)):  # of many models in a process
        setattr(torch._dynamo.config, name, value)
    with learner.verl_here("cuda"):
        yield


@pytest.fixture(
    scope="module", params=[{}, {"num_attention_heads": 6, "hidden_size": 96}], ids=["four heads", "six heads"]
)
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    """Six heads are no power of two: then transformers repeats keys instead of sharing them."""
    return saved(tmp_path_factory.mktemp("models") / "one", tiny, "llama", **request.param)


@pytest.fixture(scope="module")
def engines(model: Path) -> dict[str, Any]:
    """Over flat rows, and over a forest."""
    return {"flat": plain(learner.training_worker(model)), "forest": learner.forest_worker(model, FLEX)}


def plain(worker: Any) -> Any:
    """`worker` without fused attention, some of which rounds float32."""
    forward = worker.engine.forward_step
    worker.engine.forward_step = sdpa_kernel(SDPBackend.MATH)(forward)
    return worker


def logprobs(worker: Any, rows: list[Row], pack: int) -> np.ndarray[Any, Any]:
    return np.concatenate([one.cpu().numpy() for one in learner.old_logprobs(worker, rows, limit=pack)])


def gradients(workers: tuple[Any, Any], rows: list[Row], pack: int) -> tuple[Any, Any]:
    one, other = (gradient(worker, step_data(rows, advantages(rows), pack=pack), **FULL) for worker in workers)
    assert np.linalg.norm(one) > 1e-4
    return one, other


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logprobs_and_gradients(
    engines: dict[str, Any], shape: tuple[int, ...], record_property: Note
) -> None:
    seed, count, length, pack = shape
    rows, pair = grown(seed, count, length), (engines["flat"], engines["forest"])
    one, other = (logprobs(worker, rows, pack) for worker in pair)
    seen = Seen(engines["forest"])
    gradient_apart = close(*gradients(pair, rows, pack))
    record_property("logprobs", float(np.abs(one - other).max()))
    record_property("gradients", gradient_apart)
    record_property("tokens", seen.since())
    np.testing.assert_allclose(other, one, atol=LIMIT)
    assert gradient_apart < LIMIT


def test_a_long_prompt(engines: dict[str, Any], record_property: Note) -> None:
    pick = random.Random(1)
    prompt = [pick.randrange(VOCABULARY) for _ in range(6000)]
    answers = [[pick.randrange(VOCABULARY) for _ in range(40 + 30 * number)] for number in range(8)]
    rows = [one_row(pick, number, [*prompt, *answer]) for number, answer in enumerate(answers)]
    pair, pack = (engines["flat"], engines["forest"]), 8192
    one, other = (logprobs(worker, rows, pack) for worker in pair)
    apart = close(*gradients(pair, rows, pack))
    record_property("logprobs", float(np.abs(one - other).max()))
    record_property("gradients", apart)
    np.testing.assert_allclose(other, one, atol=LIMIT)
    assert apart < LIMIT


def test_checkpointing(engines: dict[str, Any], model: Path, record_property: Note) -> None:
    """Each layer is computed a second time for its gradient."""
    rows = grown(5, 40, 90)
    again = learner.forest_worker(model, FLEX, checkpointing=True)
    apart = close(*gradients((engines["flat"], again), rows, 2048))
    record_property("gradients", apart)
    assert apart < LIMIT


def test_bfloat16_rounds_as_flat_rows_do(
    engines: dict[str, Any], model: Path, record_property: Note
) -> None:
    """A forest is no farther from float32 than flat rows in bfloat16, up to chance."""
    rows = grown(6, 40, 90)
    exact, one = gradients((engines["flat"], learner.training_worker(model, dtype="bf16")), rows, 2048)
    _, other = gradients((engines["flat"], learner.forest_worker(model, FLEX, dtype="bf16")), rows, 2048)
    flat, forest = close(exact, one), close(exact, other)
    record_property("flat", flat)
    record_property("forest", forest)
    assert 1e-4 < forest < 1.5 * flat < 0.5


def test_adapters(model: Path, record_property: Note) -> None:
    """Of rank 16."""
    rows, found = grown(7, 40, 90), []
    for make in (learner.training_worker, partial(learner.forest_worker, attention=FLEX)):
        worker = with_adapters(make(model, lora=16))
        found.append(gradient(plain(worker), step_data(rows, advantages(rows), pack=2048), **FULL))
    apart = close(*found)
    record_property("gradients", apart)
    assert np.linalg.norm(found[0]) > 1e-4 and apart < LIMIT


def test_no_size_is_too_many(model: Path, monkeypatch: pytest.MonkeyPatch, record_property: Note) -> None:
    """Torch compiles flex attention a few times in all, however many sizes forests have. Past its limit it would make
    the mask of all pairs."""
    worker = learner.forest_worker(model, "flex_attention")
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # torch's own
    torch._dynamo.reset()
    seen, before = Seen(worker), counters["stats"]["unique_graphs"]
    for number in range(20):
        rows = grown(20 + number, 4 + 3 * number, 60)
        logprobs(worker, rows, 16384)
        gradient(worker, step_data(rows, advantages(rows), pack=16384), **FULL)
    record_property("sizes", sorted({*seen.since()}))
    record_property("compiled", counters["stats"]["unique_graphs"] - before)
    assert counters["stats"]["unique_graphs"] - before <= 6
