"""One of two training processes: the gradient of its half of the rows, which both then have, in a file of its rank.

    RANK=0 python -m tests.trainer.engine.one_of_two MODEL DIR [LOSS]

With a LOSS of the user's own, the rows have an advantage for each call.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ajet_trainer.verl_backend.cpu_worker import start_gloo
from ajet_trainer.verl_backend.worker import at_own_temperature
from tests.kit.learner import old_logprobs, training_worker
from tests.trainer.engine.test_functions import by_turn, data_of_turns
from tests.trainer.engine.test_gradient import gradient
from tests.trainer.engine.test_temperature import FOUR, data_of, four


def main(folder: Path, out: Path, loss: str | None) -> None:
    import torch
    from verl.workers.config import PolicyLossConfig

    rank = int(os.environ["RANK"])
    start_gloo()
    worker = training_worker(folder)
    mine, options = slice(2 * rank, 2 * rank + 2), dict[str, Any]()
    if loss is None:
        rows = four()[mine]
        data = at_own_temperature(data_of(rows, FOUR))
        data["old_log_probs"] = torch.nested.as_nested_tensor(old_logprobs(worker, rows), layout=torch.jagged)
    else:
        data = data_of_turns(worker, by_turn()[mine])
        options["policy_loss"] = PolicyLossConfig(loss_mode=loss)
    np.save(out / f"{rank}.npy", gradient(worker, data, loss_agg_mode="token-mean", **options))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
