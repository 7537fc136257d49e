"""The tutorials that need what other people wrote, with that: opencode from npm, and reasoning-gym."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.stage import python_of
from tests.tutorials.test_tutorials import MENDED, played, table

pytestmark = [pytest.mark.integrations, pytest.mark.slow]


def test_coding_with_the_real_opencode(tmp_path: Path) -> None:
    assert python_of("node")
    assert table(played("coding", tmp_path, "--opencode"), "task") == MENDED


def test_puzzles_with_the_real_reasoning_gym(tmp_path: Path) -> None:
    """The story knows the answers of some items; the trainer makes its eight steps of the 256 episodes."""
    assert python_of("reasoning-gym")
    shown = played("puzzles", tmp_path)
    assert re.search(r"^256 episodes: 256 rewarded, mean reward 0\.\d+", shown, re.MULTILINE)
    assert len(re.findall(r"^ +\d +32 +[\d.]+$", shown, re.MULTILINE)) == 8
