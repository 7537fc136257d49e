"""One of two training processes: the gradient of its half of the rows, which both then have, in a file of its rank.

    RANK=0 python -m tests.trainer.engine.one_of_two MODEL DIR
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from ajet_trainer.verl_backend.cpu_worker import start_gloo
from ajet_trainer.verl_backend.worker import at_own_temperature
from tests.kit.learner import old_logprobs, training_worker
from tests.trainer.engine.test_gradient import gradient
from tests.trainer.engine.test_temperature import FOUR, data_of, four


def main(folder: Path, out: Path) -> None:
    import torch

    rank = int(os.environ["RANK"])
    start_gloo()
    worker = training_worker(folder)
    rows = four()[2 * rank : 2 * rank + 2]
    data = at_own_temperature(data_of(rows, FOUR))
    data["old_log_probs"] = torch.nested.as_nested_tensor(old_logprobs(worker, rows), layout=torch.jagged)
    np.save(out / f"{rank}.npy", gradient(worker, data, loss_agg_mode="token-mean"))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
