"""How a model's attention computes a forest: each token sees its own path, and what it does not see is not computed.

Flex attention takes a mask of blocks, and skips those that nobody sees. It needs a GPU.

Torch's own attention (``sdpa``) takes a whole mask and computes all of it. So it is not asked about the whole forest,
but about one span after the other: nodes that follow each other, and the path that ends with them. Of a span that
begins at a root it computes half, and of others a little more than is seen. It is given to transformers under a name of
its own, `SPANS` (see https://huggingface.co/docs/transformers/attention_interface). For such a name transformers makes
no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
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
class Piece:
    """Queries that go together."""

    start: int
    end: int
    seen: int  # keys up to the last query
    causal: bool  # they are all that there is: nothing comes before the first one


@dataclass(frozen=True, slots=True)
class Spans:
    """What `by_spans` has to know of a forest, on its device."""

    paths: torch.Tensor  # [sum of K], int64: the nodes that each span sees, one span after the other
    lengths: list[int]  # K of each
    pieces: list[list[Piece]]  # of each
    bias: torch.Tensor  # [PIECE, W + PIECE], floats: for query i and key j 0 where j <= i + W, otherwise -inf


def spans_of(forest: Forest, device: Any, kind: torch.dtype) -> Spans:
    """`forest` for a model that computes attention in numbers of this `kind`."""
    paths, pieces = [], []
    for start, end, above in spans(forest):
        before = len(above)
        paths.append(np.concatenate((above, np.arange(start, end))))
        cuts = [*range(start, end, PIECE), end] if before else [start, end]
        pieces.append([Piece(a, b, before + b - start, not before) for a, b in pairwise(cuts)])
    width = max((piece.seen for mine in pieces for piece in mine if not piece.causal), default=0)
    bias = torch.full((PIECE, width + PIECE), -torch.inf, dtype=kind, device=device).triu_(width + 1)
    return Spans(torch.from_numpy(np.concatenate(paths)).to(device), [len(path) for path in paths], pieces, bias)


def by_spans(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *,
    forest_spans: Spans, **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention ``[1, N, heads, width]`` of `query` ``[1, heads, N, width]`` and of as many keys and values. They may
    have fewer heads. `forest_spans` comes with a call of the model, and `more` from its layers."""
    keys, values = (part.index_select(2, forest_spans.paths).split(forest_spans.lengths, 2) for part in (key, value))
    bias, found = forest_spans.bias, []
    width = bias.shape[1] - PIECE
    for pieces, near, content in zip(forest_spans.pieces, keys, values, strict=True):
        for piece in pieces:
            count, seen = piece.end - piece.start, piece.seen
            mask = None if piece.causal else bias[None, None, :count, width - seen + count : width + count]
            asked = query[:, :, piece.start : piece.end]
            out, _ = sdpa_attention_forward(module, asked, near[:, :, :seen], content[:, :, :seen], mask, **more)
            found.append(out)
    return torch.cat(found, 1), None


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
