"""A disk that fails or waits when it is told to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.disk import Disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.heal()
    disk.release()
