"""A stub engine for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.stub_engine import StubEngine, stub_engine


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[StubEngine]:
    """A module says more of it as ``ENGINE``."""
    with stub_engine(**getattr(request.module, "ENGINE", {})) as made:
        yield made
