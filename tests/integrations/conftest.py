"""One stage for all recipes: they differ by their tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.stage import Stage, stage


@pytest.fixture(scope="session")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("recipes")) as running:
        yield running
