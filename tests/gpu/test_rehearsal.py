"""The programs for a GPU machine, rehearsed without a GPU: they follow the house, and find what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.slow
STEPS = 2


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


@pytest.mark.parametrize("placement", ["hybrid", "attached"])
def test_the_game_is_played_and_reported(placement: str, tmp_path: Path) -> None:
    done = run("tests.gpu.game", placement, str(tmp_path / "run"), "--steps", str(STEPS))
    assert done.returncode == 0, done.stdout
    assert f"{STEPS} steps, rewards " in done.stdout
    assert "rollout_probs_diff_mean" in done.stdout


def test_the_machine_is_looked_at() -> None:
    done = run("tests.gpu.machine")
    assert done.returncode == 0, done.stdout
    assert "ajet_trainer.backends.verl.trainer: imported" in done.stdout
