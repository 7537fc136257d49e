"""Importance correction over sequences, where a sequence is a call.

verl multiplies the ratios of a row, and rejects rows. A row here is a merged timeline, so its product would run over
all its calls, and say something else for every way of merging. What the engine sampled in one go, and what the agent
then acted by, is a call. So the tokens are laid out as one row a call, verl computes on these, and each token gets back
what its call was given.

Invariant: no weight and no rejection depends on how calls are merged, split into rows or filled up with padding.

Advantages are computed before, over all that was sampled. A reward stands at the last token of a row. It is not lost to
the other calls if the last one is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

READ = ("old_log_probs", "rollout_log_probs", "response_mask")
"""The fields of which verl computes a correction."""


def over_sequences(correction: DictConfig | None) -> bool:
    """True if `correction` multiplies or averages ratios over a sequence. What goes by tokens alone is left to verl."""
    if correction is None:
        return False
    return correction.rollout_is == "sequence" or "seq_" in (correction.rollout_rs or "")


@contextmanager
def left_out(correction: DictConfig) -> Iterator[None]:
    """verl's own advantage step computes no correction meanwhile."""
    correction.bypass_mode = True
    try:
        yield
    finally:
        correction.bypass_mode = False


def figures(padded: TensorDict, correction: DictConfig) -> dict[str, Any]:
    """verl's metrics of a correction by tokens, by name. `padded` has ``[B, T]`` tensors, of which rows without a
    sampled token are left out: verl's own figures count padding."""
    mask = padded["loss_mask"]
    rows = {name: padded["loss_mask" if name == "response_mask" else name][mask.any(dim=-1)] for name in READ}
    found: dict[str, Any] = compute_rollout_correction_and_add_to_batch(DataProto.from_single_dict(rows), correction)[1]
    return found


def by_call(padded: TensorDict, correction: DictConfig) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """``({"response_mask", "rollout_is_weights"?}, metrics)``: ``[B, T]`` each, the mask without what is rejected, and
    the weights if there are any, in the dtype of verl's.

    `padded` has ``[B, T]`` tensors: what verl reads, and ``calls`` (int), the number of each token's call in its row.
    """
    mask = padded["response_mask"]
    rows, places = mask.nonzero(as_tuple=True)
    names = torch.stack((rows, padded["calls"][rows, places]))
    _, call, sizes = torch.unique_consecutive(names, return_inverse=True, return_counts=True, dim=1)
    at = torch.arange(len(call)) - (sizes.cumsum(0) - sizes)[call]
    laid_out = {name: padded[name].new_zeros((len(sizes), int(sizes.max()))) for name in READ}
    for name, values in laid_out.items():
        values[call, at] = padded[name][rows, places]
    data, metrics = compute_rollout_correction_and_add_to_batch(DataProto.from_single_dict(laid_out), correction)
    out = {}
    for name in ("response_mask", "rollout_is_weights"):
        if name in data.batch:
            found = data.batch[name][call, at]
            out[name] = torch.zeros(mask.shape, dtype=mask.dtype if name == "response_mask" else found.dtype)
            out[name][rows, places] = found.to(out[name].dtype)
    return out, metrics
