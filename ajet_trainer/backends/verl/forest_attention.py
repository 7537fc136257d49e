"""The attention of a model over a forest: each token sees its own path, and what it does not see is not computed.

On GPUs it is flex attention, which takes a mask of blocks and skips those that nobody sees.

On CPUs that has no gradient. Torch's other attention (``sdpa``) takes a whole mask and computes all of it. So it is not
asked about the whole forest, but about one span after the other: nodes that follow each other, and the path that ends
with them. It is given to transformers under a name of its own, `SPANS` (see
https://huggingface.co/docs/transformers/attention_interface). For such a name transformers makes no mask.
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
"""So many queries of a span are computed at once. Their mask has as many rows, and is the same for all of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Queries from `start` to `end`, and the nodes ``[K]`` that the last of them sees: its path from a root."""

    start: int
    end: int
    path: torch.Tensor

    @property
    def far(self) -> bool:
        """More is above the span than in it."""
        return len(self.path) > 2 * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Spans:
    """The numbers that `by_spans` needs of a forest, on its device."""

    all: list[Span]  # in the order of their nodes
    bias: torch.Tensor  # [PIECE, W + PIECE], floats: for query i and key j 0 where j <= i + W, otherwise -inf


def spans_of(forest: Forest, device: Any, kind: torch.dtype) -> Spans:
    """`forest` for a model that computes attention in numbers of this `kind`."""
    found, width = [], 0
    for start, end, above in spans(forest):
        path = np.concatenate((above, np.arange(start, end)))
        found.append(Span(start, end, torch.from_numpy(path).to(device)))
        width = max(width, len(path) if len(above) else 0)
    return Spans(found, torch.full((PIECE, width + PIECE), -torch.inf, dtype=kind, device=device).triu_(width + 1))


def by_spans(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *,
    forest_spans: Spans, **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention ``[1, N, heads, width]`` of `query` ``[1, heads, N, width]`` and of as many keys and values. They may
    have fewer heads. `forest_spans` comes with a call of the model, and `more` from its layers.

    A span needs a copy of its path's keys and values. It is kept for backward where the span is at least as long as
    what is above it. So what is kept is at most twice the forest's.
    """
    parts = [part.to(forest_spans.bias.dtype) for part in (query, key, value)]
    attend = partial(of_span, partial(sdpa_attention_forward, module, **more), forest_spans.bias)
    near, far = ([one for one in forest_spans.all if one.far is far] for far in (False, True))
    paths = torch.cat([one.path for one in near])
    copies = (part.index_select(2, paths).split([len(one.path) for one in near], 2) for part in parts[1:])
    asked = parts[0].split([one.end - one.start for one in forest_spans.all], 2)
    mine = (queries for queries, one in zip(asked, forest_spans.all, strict=True) if not one.far)
    of_near = map(attend, mine, *copies)
    of_far = iter(FarSpans.apply(*parts, attend, far) if far else ())
    return torch.cat([next(of_far if one.far else of_near) for one in forest_spans.all], 1), None


def of_span(
    attend: Callable[..., Any], bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of a span's queries to its path, ``[1, T, heads, width]``. `query`, `key` and `value` are
    ``[1, heads, T, width]``, and of keys and values the last T are the span's own. `bias` hides what comes later."""
    total, before = query.shape[2], key.shape[2] - query.shape[2]
    if not before:
        return attend(query, key, value, None)[0]  # type: ignore[no-any-return]
    found, width = [], bias.shape[1] - PIECE
    for start in range(0, total, PIECE):
        end = min(start + PIECE, total)
        seen = before + end
        mask = bias[None, None, : end - start, width - seen + end - start : width + end - start]
        found.append(attend(query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], mask)[0])
    return torch.cat(found, 1)


class FarSpans(torch.autograd.Function):
    """Attention of spans with much above them. Of their paths no copy is kept: many may have a long one. Backward makes
    it again, and computes the span again. A row alone would compute all that is above it, which is more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        *parts, ctx.attend, ctx.spans = given
        ctx.save_for_backward(*parts)
        return tuple(ctx.attend(*gathered(parts, one)) for one in ctx.spans)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = ctx.saved_tensors
        sums = [torch.zeros_like(part) for part in parts]
        for one, grad in zip(ctx.spans, grads, strict=True):
            leaves = [part.requires_grad_() for part in gathered([part.detach() for part in parts], one)]
            with torch.enable_grad():
                out = ctx.attend(*leaves)
            mine, *others = torch.autograd.grad(out, leaves, grad)
            sums[0][:, :, one.start : one.end] = mine
            for total, other in zip(sums[1:], others, strict=True):
                total.index_add_(2, one.path, other)
        return *sums, None, None


def gathered(parts: Sequence[torch.Tensor], one: Span) -> list[torch.Tensor]:
    """The queries of a span, and the keys and values of its path: ``[1, heads, T, width]`` each."""
    query, *others = parts
    return [query[:, :, one.start : one.end], *(part.index_select(2, one.path) for part in others)]


AttentionInterface.register(SPANS, by_spans)


def block_mask(exit_: Ints, device: Any) -> BlockMask:
    """Flex attention's mask of a tree: blocks that see in part, which it asks `mask_mod` about, and blocks that see
    wholly. Behind a token, those below it end before its `exit_` (int64 ``[T]``)."""
    some, every = blocks(exit_)

    def listed(which: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts the blocks of keys of each block of queries, and says which they are: these come first."""
        mask = torch.from_numpy(which).to(device)
        counts, order = mask.sum(-1), (~mask).to(torch.int8).argsort(dim=-1, stable=True)
        return counts.to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=BLOCK, mask_mod=mask_mod(torch.from_numpy(exit_).to(device)),
        seq_lengths=(len(exit_), len(exit_)),
    )  # fmt: skip
