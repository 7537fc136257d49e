"""The tutorial with a coding agent, with the opencode that npm installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.stage import python_of
from tests.tutorials.test_tutorials import MENDED, played, table

pytestmark = [pytest.mark.integrations, pytest.mark.slow]


def test_coding_with_the_real_opencode(tmp_path: Path) -> None:
    assert python_of("node")
    assert table(played("coding", tmp_path, "--opencode"), "task") == MENDED
