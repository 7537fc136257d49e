"""One of two training processes: saves its part of a checkpoint whose weights are 1.5 times those of the model.

    RANK=0 python -m tests.trainer.engine.one_of_two_saves MODEL CHECKPOINT
"""

from __future__ import annotations

import sys
from pathlib import Path

from ajet_trainer.backends.verl.cpu_worker import start_gloo
from tests.kit.learner import training_worker
from tests.trainer.engine.saving import save

if __name__ == "__main__":
    start_gloo()
    save(training_worker(Path(sys.argv[1])), Path(sys.argv[2]), 1.5)
