"""Micro-batches that are not divided as verl does it: those of rows that are no part of a step, and of padded rows.

verl's own limit counts tokens alone. With padding, one long row next to many short ones would take many times the
memory that the limit stands for. So rows of about the same length go together, and the padding is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp import transformer_impl

Divide = Callable[[TensorDict, int, Callable[[int], int]], list[list[int]]]
"""Divides rows into parts of so many tokens at most. It asks how many parts are agreed on, as `side_by_side` does."""


def nested(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`parts`, ``[T]`` each, as a jagged ``[B, T]``."""
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def batch_of(rows: Sequence[tuple[torch.Tensor, torch.Tensor]], *, packed: bool, **options: Any) -> TensorDict:
    """`rows`, each a prompt and its answer (int64 ``[T]``), as one micro-batch of verl's at temperature 1, with these
    `options`. Its tensors are jagged ``[B, T]``."""
    whole, mask = [torch.cat(row) for row in rows], nested([torch.ones_like(answer) for _, answer in rows])
    return tu.get_tensordict(
        {
            "input_ids": nested(whole), "position_ids": nested([torch.arange(len(one)) for one in whole]),
            "prompts": nested([prompt for prompt, _ in rows]), "responses": nested([answer for _, answer in rows]),
            "response_mask": mask, "loss_mask": mask,
        },
        {
            "temperature": 1.0, "pad_token_id": 0, "use_remove_padding": packed, "use_dynamic_bsz": True,
            "use_fused_kernels": False, "max_token_len_per_gpu": sum(map(len, whole)), **options,
        },
    )  # fmt: skip


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


def of_padded(data: TensorDict, limit: int, agree: Callable[[int], int]) -> list[list[int]]:
    """The parts of padded rows."""
    return side_by_side(data["input_ids"].offsets().diff().tolist(), limit, agree)


def divided(divide: Divide, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The `work` of an engine of verl's, in micro-batches as we `divide` rows."""
    with ours(transformer_impl, "prepare_micro_batches", partial(micro_batches, divide)):
        return work(*args, **kwargs)


def micro_batches(
    divide: Divide, data: TensorDict, dp_group: Any = None, same_micro_num_in_dp: bool = True
) -> tuple[list[TensorDict], list[list[int]]]:
    """In the place of verl's: `data` in parts, and the places of their rows. All processes of `dp_group` make as many
    parts; they have equally many rows."""
    agree = partial(agreed, dp_group if same_micro_num_in_dp else None)
    parts = divide(data, int(data["max_token_len_per_gpu"]), agree)
    return [tu.index_select_tensor_dict(data, part) for part in parts], parts


def agreed(group: Any, count: int) -> int:
    """The largest `count` of the processes of `group`, if there are several."""
    if group is None:
        return count
    most = torch.tensor([count], device=get_device_name())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most.item())


@contextmanager
def ours(module: Any, name: str, function: Any) -> Iterator[None]:
    """`module` has our `function` of this `name` inside."""
    theirs = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, theirs)
