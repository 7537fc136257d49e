"""Salts of the prefix cache: each policy version has its own, and so has each caller that had one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.salt import MAX_LENGTH, salted

owns = st.none() | st.text(min_size=1, max_size=MAX_LENGTH) | st.sampled_from(["#1", "a#1", "#", "a", "a" * MAX_LENGTH])
versions = st.integers(1, 3) | st.integers(1, 10**9)


@given(owns, versions, owns, versions)
def test_two_requests_share_a_salt_only_if_they_shared_one_and_have_one_version(
    own: str | None, version: int, other: str | None, later: int
) -> None:
    assert (salted(own, version) == salted(other, later)) == ((own, version) == (other, later))


@given(owns, versions)
def test_a_salt_keeps_to_the_engines_limit(own: str | None, version: int) -> None:
    salt = salted(own, version)
    assert salt is not None
    assert len(salt) <= MAX_LENGTH


@pytest.mark.parametrize("own", ["", "a" * (MAX_LENGTH + 1), 7, [], {}, False])
def test_what_the_engine_refuses_it_refuses_in_its_own_words(own: Any) -> None:
    assert salted(own, 3) is None


def test_before_the_first_update_there_is_nothing_to_tell_apart() -> None:
    assert salted(None, 0) is None
    assert salted("own", 0) is None
