"""Salts of the prefix cache: all weights have their own, and so has each caller that had one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.cache_salt import FORBIDDEN, MAX_LENGTH, salted

texts = st.text(min_size=1, max_size=MAX_LENGTH)
owns = st.none() | texts | st.sampled_from(["#1.0", "a#1.0", "#", "a", "a" * MAX_LENGTH])
weights = st.tuples(st.integers(1, 3) | st.integers(1, 10**9), st.sampled_from([0.0, 1.0, 1.001, 1763771234.567]))


@given(owns, weights, owns, weights)
def test_two_requests_share_a_salt_only_if_they_shared_one_and_have_the_same_weights(
    own: str | None, these: tuple[int, float], other: str | None, those: tuple[int, float]
) -> None:
    assert (salted(own, *these) == salted(other, *those)) == ((own, these) == (other, those))


@given(owns, weights)
def test_a_salt_is_one_for_the_engine_if_it_was(own: str | None, these: tuple[int, float]) -> None:
    salt = salted(own, *these)
    assert salt is not None
    assert len(salt) <= MAX_LENGTH
    assert set(salt) & set(FORBIDDEN) == set(own or "") & set(FORBIDDEN)


@pytest.mark.parametrize("own", ["", "a" * (MAX_LENGTH + 1), 7, [], {}, False])
def test_what_the_engine_refuses_it_refuses_in_its_own_words(own: Any) -> None:
    assert salted(own, 3, 1.5) is None


def test_before_the_first_update_there_is_nothing_to_tell_apart() -> None:
    assert salted(None, 0, 0.0) is None
    assert salted("own", 0, 0.0) is None
