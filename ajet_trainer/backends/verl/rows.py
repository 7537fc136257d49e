"""Rows in TransferQueue, which is verl's data plane: how they are put there, and what a step has added to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from ajet_trainer.backends.verl.worker import ROW_TEMPERATURE
from ajet_trainer.batch import Row
from ajet_trainer.trained_rows import TrainedRow

PARTITION = "train"
OF_TURNS = "turn_advantages"
"""The field of the advantages of tokens, in rows that bring them along."""

KEPT = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights")
"""The fields of a row that are kept for reading, in the order of `TrainedRow`. The last one is not always there."""


def put_rows(rows: Sequence[Row], step: int, temperature: float = 1.0) -> None:
    """Rows into TransferQueue: trajectories and groups that are finished, so that verl's sampler takes them at once.
    They have temperatures of their own only if some row's is not the learner's `temperature`."""
    fields = list_of_dict_to_tensordict([row_fields(row) for row in rows])
    if any(row.temperature != temperature for row in rows):
        fields[ROW_TEMPERATURE] = torch.tensor([row.temperature for row in rows])
    tags = [row_tag(row, step) for row in rows]
    tq.kv_batch_put(keys=[row.key for row in rows], fields=fields, tags=tags, partition_id=PARTITION)
    groups = list(dict.fromkeys(row.group for row in rows))
    finished = [{"is_prompt": True, "status": "finished", "global_steps": step} for _ in groups]
    tq.kv_batch_put(keys=groups, tags=finished, partition_id=PARTITION)


def row_fields(row: Row) -> dict[str, Any]:
    """One row as verl's trajectory: 1-D tensors without padding. The reward stands at the response's last token, and
    ``calls`` numbers the call that sampled a token."""
    prompt, response, mask = torch.from_numpy(row.prompt), torch.from_numpy(row.response), torch.from_numpy(row.mask)
    scores = torch.zeros(len(response))
    scores[-1] = row.reward
    calls = torch.zeros(len(response), dtype=torch.int64)
    for number, (_, start, end) in enumerate(row.spans, 1):
        calls[start:end] = number
    told = {} if row.advantages is None else {OF_TURNS: torch.from_numpy(row.advantages)}
    return told | {
        "prompts": prompt,
        "responses": response,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(row.tokens),
        "response_mask": mask,
        "loss_mask": mask,
        "calls": calls,
        "rollout_log_probs": torch.from_numpy(row.logprobs),
        "rm_scores": scores,
        "uid": row.group,
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": {}},
        "num_turns": row.turns,
        "__num_turns__": row.turns,
    }


def row_tag(row: Row, step: int) -> dict[str, Any]:
    """The tag by which verl balances and reports: lengths in tokens, and the policy versions that generated the row."""
    return {
        "status": "success",
        "prompt_len": len(row.prompt),
        "response_len": len(row.response),
        "seq_len": row.tokens,
        "global_steps": step,
        "min_global_steps": row.min_version,
        "max_global_steps": row.max_version,
    }


def trained(rows: Sequence[Row], partition: str) -> list[TrainedRow]:
    """`rows` with what TransferQueue holds of each: the fields of `KEPT` that there are."""
    stored = tq.kv_batch_get(keys=[row.key for row in rows], partition_id=partition, select_fields=list(KEPT))
    known = [name for name in KEPT if name in stored.keys()]  # noqa: SIM118  # a TensorDict says so itself
    values = {name: [one.float().numpy() for one in stored[name].unbind()] for name in known}
    return [
        TrainedRow(row, values["response_mask"][place][: len(row.response)].astype(np.int64), *(
            values[name][place][: len(row.response)] for name in known[1:]
        ))
        for place, row in enumerate(rows)
    ]
