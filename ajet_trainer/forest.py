"""Rows as a forest: tokens that rows share from their first one on are there once.

The forest is the trie of the rows' prefixes, in depth-first order. So the whole attention mask is one number a token:
token ``i`` sees token ``j`` exactly where ``j <= i < exit[j]``. A token's position is its depth. Its logprob is read at
its parent, since that is the token before it in each row that it is a part of.

`Forest.index` leads back from the forest to the rows. What a model computed for the nodes is gathered by it. What is
summed over rows then is as it would be without a forest.

Sorted rows are a trie already: of each, the part that it shares with the one before it is there. Where a forest is
larger than a limit, `cut` says which rows go together, so that the whole costs the least.

The tree of a frame (`ajet_sdk.tree`) is that of all samples of a group, as bytes. This one is made for each
micro-batch, of rows, and has what a model needs (`ajet_trainer.backends.verl.forest_engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = Callable[[Any, Any, Any, Any], Any]
BLOCK = 128
"""Tokens on each side of a block of flex attention's mask."""
LAUNCH = 1e7
"""The cost of a micro-batch in a layer, however few tokens that has, in multiplications and additions of a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """``N`` nodes in depth-first order, and for each row the nodes of its tokens."""

    ids: Ints  # [N], tokens
    parent: Ints  # [N], -1 for roots
    depth: Ints  # [N], from 0
    exit: Ints  # [N], where the node's subtree ends
    index: tuple[Ints, ...]  # of each row

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return sum(map(len, self.index))

    @property
    def seen(self) -> int:
        """The pairs of a token and one that it sees."""
        return int(self.depth.sum()) + len(self.depth)


def forest_of(rows: Sequence[Ints]) -> Forest:
    """The forest of `rows`; none may be empty."""
    order, shared = _sorted(rows)
    lengths = np.array([len(rows[place]) for place in order], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths - shared)))
    total = int(starts[-1])
    ids, parent, depth = (np.empty(total, dtype=np.int64) for _ in range(3))
    exit_ = np.full(total, total, dtype=np.int64)
    index: list[Ints] = [np.empty(0, dtype=np.int64)] * len(rows)
    path = np.empty(0, dtype=np.int64)
    for number, place in enumerate(order):
        begin, end, common = int(starts[number]), int(starts[number + 1]), int(shared[number])
        exit_[path[common:]] = begin
        path = np.concatenate((path[:common], np.arange(begin, end)))
        ids[begin:end] = rows[place][common:]
        above = path[common - 1 : common] if common else [-1]
        parent[begin:end] = np.concatenate((above, path[common:]))[: end - begin]
        depth[begin:end] = np.arange(common, len(path))
        index[place] = path
    return Forest(ids, parent, depth, exit_, tuple(index))


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """``L`` logprobs that rows ask for, each of them once: what a node's logits say of a child's token, at one
    temperature. And for each of the ``T`` tokens of all rows, one row after the other, which of them is the next
    token's."""

    nodes: Ints  # [L]
    labels: Ints  # [L], tokens
    heat: NDArray[np.float32]  # [L], temperatures
    index: Ints  # [T]; L where nobody asks


def reading(forest: Forest, prompts: Sequence[int], heats: Sequence[float]) -> Reading:
    """Indices that read what a model computes for `forest` back into its rows. Each row has a temperature, and begins
    with a prompt of so many tokens, at least one, about which nobody asks."""
    kinds, kind = np.unique(np.asarray(heats, dtype=np.float32), return_inverse=True)
    asked = [places[start:] for places, start in zip(forest.index, prompts, strict=True)]
    names = np.concatenate([places * len(kinds) + one for places, one in zip(asked, kind, strict=True)])
    found, where = np.unique(names, return_inverse=True)
    children, index = found // len(kinds), np.full(forest.tokens, len(found), dtype=np.int64)
    ends = np.cumsum([len(places) for places in forest.index])
    before = [np.arange(end - len(places) - 1, end - 1) for end, places in zip(ends, asked, strict=True)]
    index[np.concatenate(before)] = where
    return Reading(forest.parent[children], forest.ids[children], kinds[found % len(kinds)], index)


def spans(forest: Forest) -> Iterator[tuple[int, int, Ints]]:
    """Nodes from a start to an end, each the child of the one before it, and which nodes are above the first of them.
    They see these and each other. There are at most as many as rows."""
    ends = np.flatnonzero(forest.parent != np.arange(len(forest.ids)) - 1)
    for start, end in pairwise([0, *ends[ends > 0].tolist(), len(forest.ids)]):
        yield start, end, np.flatnonzero(forest.exit[:start] > start)


def mask_mod(exit_: Any) -> Mask:
    """The mask as flex attention asks for it, of a tensor ``exit``."""

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < exit_[key])

    return sees


def blocks(exit_: Ints, size: int = BLOCK) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Finds which blocks of ``size`` queries (rows) and as many keys (columns) have a pair that sees, and which have no
    other. The last ones may be smaller. Nothing larger than the answer is made for it."""
    total, count = len(exit_), -(-len(exit_) // size)
    first = np.arange(count) * size
    last = np.minimum(first + size, total) - 1
    nearest, farthest = (np.array([least(exit_[a : b + 1]) for a, b in zip(first, last, strict=True)], dtype=np.int64)
                         for least in (np.min, np.max))  # fmt: skip
    before = np.tri(count, k=-1, dtype=bool)
    some = (before & (farthest[None, :] > first[:, None])) | np.eye(count, dtype=bool)
    every = before & (nearest[None, :] > last[:, None])
    alone = first == last
    every[alone, alone.nonzero()[0]] = True
    return some, every


def _sorted(rows: Sequence[Ints]) -> tuple[list[int], Ints]:
    """The order of `rows` by their tokens, and how many tokens each shares with the one before it."""
    names = [np.asarray(row).astype(">u8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda place: (names[place], place))
    shared = [_common(rows[before], rows[here]) for before, here in pairwise(order)]
    return order, np.array([0, *shared], dtype=np.int64)


def _common(one: Ints, other: Ints) -> int:
    """The length of the longest common prefix."""
    length = min(len(one), len(other))
    differs = np.asarray(one[:length]) != np.asarray(other[:length])
    return int(differs.argmax()) if differs.any() else length


# Cutting -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prices:
    """The costs of a model, forward, in multiplications and additions: for each token, for each logprob that is read,
    and for each pair in attention that sees. A micro-batch takes `part` besides. (Backward takes twice as much of
    each.)"""

    token: float
    logprob: float
    pair: float
    part: float

    def of(self, tokens: Any, logprobs: Any, pairs: Any) -> Any:
        """The price of a micro-batch with so many of each."""
        return self.token * tokens + self.logprob * logprobs + self.pair * pairs + self.part


def prices(body: int, head: int, layers: int, width: int) -> Prices:
    """A parameter is multiplied and added once for each token: those of the `body`, and for a logprob those of the
    `head`. In each layer a pair takes two products of vectors, of `width` numbers over all heads: one for the score,
    one for the value. A layer of a micro-batch takes `LAUNCH` besides."""
    return Prices(2.0 * body, 2.0 * head, 4.0 * layers * width, LAUNCH * layers)


def cut(
    rows: Sequence[Ints], prompts: Sequence[int], heats: Sequence[float], limit: int, price: Prices,
    agree: Callable[[int], int] = int,
) -> list[list[int]]:
    """Decides which rows go together. No part's forest has more than `limit` nodes, nor is it asked for more logprobs,
    unless it is of one row.

    Of all ways to cut the depth-first order, it is the one that costs least by `price`. A part has its whole path from
    the root, so a cut costs the tokens that the rows on its sides share. What has room is never cut. `prompts` and
    `heats` are those of `reading`. A logprob counts once for rows that follow each other and ask for it at one
    temperature. So they are never counted too low.

    `agree` is told the number of parts, and says how many are wanted: at most one a row. More forks are cut for these,
    those first where the least is shared.
    """
    order, shared = _sorted(rows)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)[order]
    prompt, heat = np.asarray(prompts, dtype=np.int64)[order], np.asarray(heats)[order]
    same = np.concatenate(([False], heat[1:] == heat[:-1]))
    both = np.where(same, np.maximum(shared - np.maximum(prompt, np.roll(prompt, 1)), 0), 0)
    forks = _forks((lengths, lengths - prompt, _seen(lengths)), (shared, both, _seen(shared)), limit, price)
    spare = sorted(set(range(1, len(order))) - set(forks), key=lambda number: (int(shared[number]), number))
    forks = sorted([*forks, *spare[: agree(len(forks) + 1) - len(forks) - 1]])
    return [order[a:b] for a, b in zip([0, *forks], [*forks, len(order)], strict=True)]


Counts = tuple[Ints, Ints, Ints]
"""Of rows: tokens, logprobs that are asked for, and pairs in attention that see."""


def _forks(mine: Counts, again: Counts, limit: int, price: Prices) -> list[int]:
    """The rows before which the cheapest cuts are. Each row has `mine`, and of that `again` what it shares with the one
    before it.

    ``best[b]`` is the least that the rows before ``b`` cost. What each row has that the one before it has not adds up.
    A part that begins with row ``a`` has what ``a`` shares with the one before it besides. Its counts only fall with
    ``a``, so the places where the last part may begin are a window.
    """
    fresh = [np.concatenate(([0], np.cumsum(one - other))) for one, other in zip(mine, again, strict=True)]
    best, begin, first = np.zeros(len(mine[0]) + 1), [0], 0
    for end in range(1, len(best)):
        while first < end - 1 and any(
            more[first] + new[end] - new[first] > limit for more, new in zip(again[:2], fresh[:2], strict=True)
        ):
            first += 1
        window = slice(first, end)
        counts = (more[window] + new[end] - new[window] for more, new in zip(again, fresh, strict=True))
        worth = best[window] + price.of(*counts)
        begin.append(first + int(worth.argmin()))
        best[end] = worth.min()
    forks, place = [], begin[-1]
    while place:
        forks.append(place)
        place = begin[place]
    return forks[::-1]


def _seen(ends: Ints) -> Ints:
    """The pairs that see, of rows up to their `ends`."""
    return ends * (ends + 1) // 2
