"""Rows into TransferQueue, in the fields and tags by which verl's workers and replay buffer know a finished session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from ajet_trainer.batch import Row

PARTITION = "train"


def put(rows: Sequence[Row], step: int) -> None:
    """Stores `rows` as trajectories and their groups as finished, so that verl's sampler takes them at once."""
    fields = list_of_dict_to_tensordict([row_fields(row) for row in rows])
    tags = [row_tag(row, step) for row in rows]
    tq.kv_batch_put(keys=[row.key for row in rows], fields=fields, tags=tags, partition_id=PARTITION)
    groups = list(dict.fromkeys(row.group for row in rows))
    finished = [{"is_prompt": True, "status": "finished", "global_steps": step} for _ in groups]
    tq.kv_batch_put(keys=groups, tags=finished, partition_id=PARTITION)


def row_fields(row: Row) -> dict[str, Any]:
    """One row as verl's trajectory: 1-D tensors without padding. The reward stands at the response's last token."""
    prompt, response, mask = torch.from_numpy(row.prompt), torch.from_numpy(row.response), torch.from_numpy(row.mask)
    scores = torch.zeros(len(response))
    scores[-1] = row.reward
    return {
        "prompts": prompt,
        "responses": response,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(row.tokens),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.from_numpy(row.logprobs),
        "rm_scores": scores,
        "uid": row.group,
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": {}},
        "num_turns": row.turns,
        "__num_turns__": row.turns,
    }


def row_tag(row: Row, step: int) -> dict[str, Any]:
    """What verl balances and reports by: lengths in tokens, and the policy versions that generated the row."""
    return {
        "status": "success",
        "prompt_len": len(row.prompt),
        "response_len": len(row.response),
        "seq_len": row.tokens,
        "global_steps": step,
        "min_global_steps": row.min_version,
        "max_global_steps": row.max_version,
    }


def plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics as floats; what is no single number is left out."""
    out = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):
            out[name] = float(value)
    return out
