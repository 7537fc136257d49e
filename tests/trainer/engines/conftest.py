"""A second stub engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.stub_engine import StubEngine, stub_engine


@pytest.fixture
def other() -> Iterator[StubEngine]:
    with stub_engine() as made:
        yield made
