"""The distance that engine and trainer may have: in an answer of the engine's own, and over what fresh weights
sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ajet_trainer.agreement import difference, fresh_kl, shown_by, tolerance
from ajet_trainer.batch import Row, to_row
from ajet_trainer.engines.vllm import Answer
from tests.trainer.making import sample


@pytest.mark.parametrize(
    ("dtypes", "nats"),
    [
        (("float32", "fp32"), 0.002), (("torch.float16", "float32"), 0.05), (("bfloat16", "float32"), 0.25),
        (("float32", "bf16"), 0.25), ((None, "fp32"), 0.25), (("fp8", "bf16"), 0.5),
    ],
)  # fmt: skip
def test_the_coarser_dtype_says_how_far_they_may_be_apart(dtypes: tuple[str | None, ...], nats: float) -> None:
    assert tolerance(dtypes, Answer((1,), (-1.0,))) == nats


def test_an_engine_that_is_far_from_itself_may_be_further_from_the_trainer() -> None:
    """As with tensor cores, which round the products of float32. But not so far that any other model would pass."""
    assert tolerance(("float32", "fp32"), Answer((1,), (-1.0,), (), (-1.001,))) == pytest.approx(0.02)
    assert tolerance(("float32", "fp32"), Answer((1,), (-1.0,), (), (-9.0,))) == 0.5


def rounded(values: list[list[float]], bits: int) -> tuple[tuple[float, ...], ...]:
    """The logprobs of places whose logits are rounded to so many bits, as 32-bit floats."""
    mantissa, exponent = np.frexp(np.array(values))
    logits = np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)
    found = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    return tuple(map(tuple, found.astype(float).tolist()))


@pytest.mark.parametrize("size", [0.3, 1.0, 20.0])
@pytest.mark.parametrize(("bits", "shown"), [(24, "float32"), (11, None), (8, None)])
def test_logits_show_whether_they_were_rounded_to_half_precision(size: float, bits: int, shown: str | None) -> None:
    values = (size * np.random.default_rng(1).uniform(0.5, 1.0, (32, 5))).tolist()
    answer = Answer((1,) * 32, (-1.0,) * 32, rounded(values, bits), (-1.0,) * 32)
    assert shown_by(answer) == shown


def test_nothing_is_shown_by_an_engine_that_is_far_from_itself_or_does_not_tell() -> None:
    places = rounded([[1.1, 1.3, 0.7]], 24)
    assert shown_by(Answer((1,), (-1.0,), places, (-1.0,))) == "float32"
    assert shown_by(Answer((1,), (-1.0,), places, (-1.01,))) is None
    assert shown_by(Answer((1,), (-1.0,), places)) is shown_by(Answer((1,), (-1.0,), (), (-1.0,))) is None


def test_what_is_no_number_is_infinitely_far() -> None:
    assert difference([-1.0, -2.0], [-1.5, -2.0]) == 0.25
    assert difference([-1.0], [float("nan")]) == difference([float("-inf")], [-1.0]) == float("inf")


def of(versions: list[int], engine: list[float]) -> Row:
    size = len(versions)
    made = Row("g", 0, 0, np.ones(1, np.int64), np.ones(size, np.int64), np.ones(size, np.int64),
               np.array(engine, np.float32), 0.0, 1, 0, 0)  # fmt: skip
    return replace(made, versions=np.array(versions))


def test_only_what_the_present_weights_sampled_is_compared() -> None:
    row = of([3, 2, -1, 3], [-1.0, -1.0, -1.0, -2.0])
    own = np.array([-1.0, -9.0, -9.0, -2.0], np.float32)
    assert fresh_kl([row], [own], 3) == (0.0, 2)
    kl, tokens = fresh_kl([row], [own], 2)
    assert tokens == 1 and kl == pytest.approx(np.exp(-8) - 1 + 8)
    assert fresh_kl([row], [own], 7) == fresh_kl([], [], 0) == (0.0, 0)
    assert fresh_kl([replace(row, versions=None)], [own], 3) == (0.0, 0)


def test_the_estimate_is_the_divergence_of_the_engine_from_the_trainer() -> None:
    """Over many tokens that the engine draws, it is the sum over the vocabulary."""
    draw = np.random.default_rng(0)
    engine, trainer = draw.dirichlet(np.ones(50)), draw.dirichlet(np.ones(50)) + 0.01
    trainer /= trainer.sum()
    ids = draw.choice(50, 200_000, p=engine)
    row = of([1] * len(ids), list(np.log(engine[ids])))
    kl, _ = fresh_kl([row], [np.log(trainer[ids]).astype(np.float32)], 1)
    assert kl == pytest.approx(float((engine * np.log(engine / trainer)).sum()), rel=0.02)


def test_a_row_tells_which_version_sampled_what_it_is_compared_for() -> None:
    one = sample(turns=2, facts=({"logprobs": "processed"}, {"logprobs": "processed", "top_p": 0.9}))
    one = replace(one, policy_versions=((4, 2), (5, 4)))
    assert to_row("g", 0, 0, 1.0, one).versions.tolist() == [4, 4, 5, -1, -1, -1, -1, -1]  # type: ignore[union-attr]
    unsure = replace(one, uncertain_tokens=1)
    assert set(to_row("g", 0, 0, 1.0, unsure).versions.tolist()) == {-1}  # type: ignore[union-attr]
    unstated = replace(one, sampling=())
    assert to_row("g", 0, 0, 1.0, unstated).versions.tolist() == [4, 4, 5, -1, -1, 5, 5, 5]  # type: ignore[union-attr]
