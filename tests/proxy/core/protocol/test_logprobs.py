"""Which lists are logprobs: numbers that are no more than 0 but for rounding, and finite in 32 bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.logprobs import logprobs_of


@given(st.lists(st.floats(-9999.0, 9e-4)))
def test_what_engines_really_tell_stays_as_it_is(values: list[float]) -> None:
    told = logprobs_of(values)
    assert told == tuple(values) and repr(told) == repr(tuple(values))


@pytest.mark.parametrize("value", [-1, 0.0, -0.0, 1e-7, 9e-4, -9999.0, -3.4e38])
def test_whole_numbers_rounding_and_the_unlikely_are_logprobs(value: float) -> None:
    assert logprobs_of([value]) == (value,)


@pytest.mark.parametrize(
    "value",
    [
        0.5, 1.1e-3, 1e300, -1e300, 3.5e38, -3.5e38, math.inf, -math.inf, math.nan, True, "-1.0", None, [], {},
        pytest.param(10**400, id="huge"),
    ],
)
def test_what_cannot_be_is_none_wherever_it_stands(value: Any) -> None:
    for values in ([value], [-1.0, value], [value, -1.0], [-1.0, value, 0.0]):
        assert logprobs_of(values) is None


@pytest.mark.parametrize("values", [None, 7, "x", {"a": 1}])
def test_what_is_no_list_is_none(values: Any) -> None:
    assert logprobs_of(values) is None
    assert logprobs_of([]) == ()
