"""Micro-batches of padded rows, whose limit counts the padding: verl's own count tokens alone.

One long row next to many short ones would take many times the memory that the limit stands for. So rows of about the
same length go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from ajet_trainer.backends.verl.forest_engine import agreed, ours


def side_by_side(lengths: Sequence[int], limit: int, agree: Callable[[int], int]) -> list[list[int]]:
    """The places of rows in parts that have, padded, at most `limit` tokens each, unless a row alone is longer. `agree`
    gives the number of parts, which is at least the one that it is asked about, and at most that of the rows."""
    parts: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= limit:
            parts[-1].append(place)
        else:
            parts.append([place])
    for _ in range(agree(len(parts)) - len(parts)):
        largest = max(parts, key=len)
        parts.append([largest.pop()])
    return parts


def micro_batches(
    data: TensorDict, dp_group: Any = None, same_micro_num_in_dp: bool = True
) -> tuple[list[TensorDict], list[list[int]]]:
    """In the place of verl's: `data` in parts, and the places of their rows. All processes of `dp_group` make as many
    parts; they have equally many rows."""
    lengths = data["input_ids"].offsets().diff().tolist()
    agree = partial(agreed, dp_group if same_micro_num_in_dp else None)
    parts = side_by_side(lengths, int(data["max_token_len_per_gpu"]), agree)
    return [tu.index_select_tensor_dict(data, part) for part in parts], parts


def of_padded(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An engine's work, by `theirs`, in such micro-batches."""
    with ours(transformer_impl, "prepare_micro_batches", micro_batches):
        return theirs(*args, **kwargs)
