"""How a model's attention computes a forest: each token sees its own path, and what it does not see is not computed.

Flex attention takes a mask of blocks, and skips those that nobody sees. It needs a GPU.

Torch's own attention (``sdpa``) takes a whole mask and computes all of it. So it is not asked about the whole forest,
but about one span after the other: nodes that follow each other, and the path that ends with them. Of a span that
begins at a root it computes half, and of others a little more than is seen. It is given to transformers under a name of
its own, `SPANS` (see https://huggingface.co/docs/transformers/attention_interface). For such a name transformers makes
no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ajet_trainer.forest import BLOCK, Forest, Ints, blocks, mask_mod, spans

SPANS = "ajet_spans"
"""The name under which transformers has `by_spans`."""
PIECE = 256
"""So many queries of a branch are computed at once. Their mask has as many rows, and is the same for all of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Queries from `start` to `end`. Of a branch, the nodes ``[K]`` that the last of them sees: its path from a root. A
    span that begins at a root has no path but itself."""

    start: int
    end: int
    path: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Spans:
    """What `by_spans` has to know of a forest, on its device."""

    all: list[Span]  # in the order of their nodes
    bias: torch.Tensor  # [PIECE, W + PIECE], floats: for query i and key j 0 where j <= i + W, otherwise -inf

    @property
    def branches(self) -> list[Span]:
        return [one for one in self.all if one.path is not None]


def spans_of(forest: Forest, device: Any, kind: torch.dtype) -> Spans:
    """`forest` for a model that computes attention in numbers of this `kind`."""
    found, width = [], 0
    for start, end, above in spans(forest):
        path = torch.from_numpy(np.concatenate((above, np.arange(start, end)))).to(device) if len(above) else None
        found.append(Span(start, end, path))
        width = max(width, 0 if path is None else len(path))
    return Spans(found, torch.full((PIECE, width + PIECE), -torch.inf, dtype=kind, device=device).triu_(width + 1))


def by_spans(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *,
    forest_spans: Spans, **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention ``[1, N, heads, width]`` of `query` ``[1, heads, N, width]`` and of as many keys and values. They may
    have fewer heads. `forest_spans` comes with a call of the model, and `more` from its layers."""
    bias = forest_spans.bias
    parts = [part.to(bias.dtype) for part in (query, key, value)]

    def attend(*given: Any) -> torch.Tensor:
        return sdpa_attention_forward(module, *given, **more)[0]

    lengths = [one.end - one.start for one in forest_spans.all]
    each = zip(forest_spans.all, *(part.split(lengths, 2) for part in parts), strict=True)
    found = [attend(*mine, None) if one.path is None else None for one, *mine in each]
    if forest_spans.branches:
        rest = iter(Branches.apply(*parts, partial(of_branch, attend, bias), forest_spans.branches))
        found = [next(rest) if out is None else out for out in found]
    return torch.cat(found, 1), None


def of_branch(
    attend: Callable[..., torch.Tensor], bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of a branch's queries and its path."""
    found, total, before = [], query.shape[2], key.shape[2] - query.shape[2]
    width = bias.shape[1] - PIECE
    for start in range(0, total, PIECE):
        end = min(start + PIECE, total)
        seen = before + end
        mask = bias[None, None, : end - start, width - seen + end - start : width + end - start]
        found.append(attend(query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], mask))
    return torch.cat(found, 1)


class Branches(torch.autograd.Function):
    """Attention of all branches. A path is a copy of keys and values, and many branches may have a long one. So no copy
    is kept: backward makes it again, and computes the branch again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        *parts, ctx.attend, ctx.branches = given
        ctx.save_for_backward(*parts)
        return tuple(ctx.attend(*gathered(parts, one)) for one in ctx.branches)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = ctx.saved_tensors
        sums = [torch.zeros_like(part) for part in parts]
        for one, grad in zip(ctx.branches, grads, strict=True):
            leaves = [part.requires_grad_() for part in gathered([part.detach() for part in parts], one)]
            with torch.enable_grad():
                out = ctx.attend(*leaves)
            mine, *others = torch.autograd.grad(out, leaves, grad)
            sums[0][:, :, one.start : one.end] = mine
            for total, other in zip(sums[1:], others, strict=True):
                total.index_add_(2, one.path, other)
        return *sums, None, None


def gathered(parts: Sequence[torch.Tensor], one: Span) -> list[torch.Tensor]:
    """The queries of a branch, and the keys and values of its path."""
    query, *others = parts
    return [query[:, :, one.start : one.end], *(part.index_select(2, one.path) for part in others)]


AttentionInterface.register(SPANS, by_spans)


def block_mask(exit_: Ints, device: Any) -> BlockMask:
    """Flex attention's: blocks that see in part, which it asks `mask_mod` about, and blocks that see wholly."""
    some, every = blocks(exit_)

    def listed(which: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """How many blocks of keys each block of queries has, and which ones: these come first."""
        mask = torch.from_numpy(which).to(device)
        counts, order = mask.sum(-1), (~mask).to(torch.int8).argsort(dim=-1, stable=True)
        return counts.to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=BLOCK, mask_mod=mask_mod(torch.from_numpy(exit_).to(device)),
        seq_lengths=(len(exit_), len(exit_)),
    )  # fmt: skip
