"""Checkpoints as a run writes them: verl's worker saves its part, then comes `data.pt`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ajet_trainer.backends.verl.checkpoints import DTYPE


def save(worker: Any, checkpoint: Path, factor: float = 1.0, dtype: str = "float32") -> Path:
    """Saves the weights of `worker`, which are multiplied by `factor` first."""
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.mul_(factor)
    worker.save_checkpoint(str(checkpoint / "actor"), global_step=1)
    if os.environ["RANK"] == "0":
        torch.save({DTYPE: dtype, "saved": []}, checkpoint / "data.pt")
    return checkpoint
