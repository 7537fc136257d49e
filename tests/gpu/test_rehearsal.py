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


def test_the_stand_in_for_flash_attn_is_as_exact_as_torch() -> None:
    """In a process of its own, since it changes a module of verl."""
    program = """
import torch
from tests.gpu.cross_entropy import PIECE, cross_entropy_loss
torch.manual_seed(0)
logits, labels = torch.randn(PIECE + 7, 50, requires_grad=True), torch.randint(50, (PIECE + 7,))
weights = torch.rand(PIECE + 7)
right_loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
(right,) = torch.autograd.grad((right_loss * weights).sum(), logits)
loss, _ = cross_entropy_loss(logits, labels)
(ours,) = torch.autograd.grad((loss * weights).sum(), logits)
assert torch.allclose(ours, right, atol=1e-6), (ours - right).abs().max()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
