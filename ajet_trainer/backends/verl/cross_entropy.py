"""Logprobs from logits in float32, a piece at a time, where flash-attn is not installed.

Without flash-attn, verl 0.9 takes them row by row, and for bfloat16 logits in bfloat16. With it, verl calls one kernel
that reads the logits once and counts in float32. This module stands in for that one function, as exact and with as few
calls, in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import verl.utils.torch_functional as theirs

PIECE = 1024


class Loss(torch.autograd.Function):
    """The negative logprob of each label: logits (rows, vocabulary) and labels (rows,) to float32 (rows,)."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, inplace: bool) -> Any:
        loss, total = (torch.empty(len(labels), dtype=torch.float32, device=logits.device) for _ in range(2))
        for start in range(0, len(labels), PIECE):
            part = slice(start, start + PIECE)
            some = logits[part].float()
            total[part] = some.logsumexp(-1)
            loss[part] = total[part] - some.gather(-1, labels[part, None]).squeeze(-1)
        ctx.save_for_backward(logits, labels, total)
        ctx.inplace = inplace
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        logits, labels, total = ctx.saved_tensors
        out = logits if ctx.inplace else torch.empty_like(logits)
        for start in range(0, len(labels), PIECE):
            part = slice(start, start + PIECE)
            some = (logits[part].float() - total[part, None]).exp_()
            some.scatter_add_(-1, labels[part, None], torch.full_like(labels[part, None], -1, dtype=some.dtype))
            out[part] = some.mul_(grad[part, None]).to(out.dtype)
        return out, None, None


def cross_entropy_loss(logits: Any, labels: Any, inplace_backward: bool = False, **_: Any) -> Any:
    """As flash-attn's: losses, and a z-loss of zeros."""
    loss = Loss.apply(logits, labels, inplace_backward)
    return loss, torch.zeros_like(loss)


def stand_in() -> None:
    """Has verl call `cross_entropy_loss` in this process."""
    theirs.cross_entropy_loss = cross_entropy_loss
    theirs.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True  # verl's own spelling
