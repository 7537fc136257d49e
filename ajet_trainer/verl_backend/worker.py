"""verl's workers, which compute each row's logprobs at that row's own temperature where rows have one.

verl's engines take one temperature for all rows, or a tensor with one for each. Its trainer sends the first kind, and
TransferQueue writes that over a field of this name. So rows bring theirs under another, and it is put in place here,
for old, reference and new logprobs alike. Rows that verl pads a batch with are copies of a real one, and have its own.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

ROW_TEMPERATURE = "row_temperature"


class RowWorker(TrainingWorker):  # type: ignore[misc]
    """verl's training worker, inside the actor or the reference."""

    def infer_batch(self, data: TensorDict) -> Any:
        return super().infer_batch(at_own_temperature(data))

    def train_mini_batch(self, data: TensorDict) -> Any:
        return super().train_mini_batch(at_own_temperature(data))


class ActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's actor, rollout and reference worker."""

    actor_worker_cls = ref_worker_cls = RowWorker


def at_own_temperature(data: TensorDict) -> TensorDict:
    """`data` with the temperatures of its rows in the place of the one for all, if they have their own."""
    if ROW_TEMPERATURE in data:
        data["temperature"] = data.pop(ROW_TEMPERATURE)
    return data
