"""Rows as a forest: tokens that rows share from their first one on are there once.

The forest is the trie of the rows' prefixes, in depth-first order. So the whole attention mask is one number a token:
token ``i`` sees token ``j`` exactly where ``j <= i < exit[j]``. A token's position is its depth. Its logprob is read at
its parent, since that is the token before it in each row that it is a part of.

`Forest.index` leads back from the forest to the rows. What a model computed for the nodes is gathered by it. What is
summed over rows then is as it would be without a forest.

Sorted rows are a trie already: of each, the part that it shares with the one before it is there. Where a forest is
larger than a limit, `cut` says which rows go together, so that the least is computed twice.

Next: ajet_trainer/verl_backend/forest_engine.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = Callable[[Any, Any, Any, Any], Any]
VENDOR = "ajet_forest"
"""Under which verl's registry has the engines that compute forests: the value of ``VERL_ENGINE_VENDOR``."""
BLOCK = 128
"""Tokens on each side of a block of flex attention's mask."""


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


def plant(rows: Sequence[Ints]) -> Forest:
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


def flatten(forest: Forest) -> list[Ints]:
    """The rows that `forest` was planted with."""
    return [forest.ids[places] for places in forest.index]


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
    """How to read what a model computes for `forest` back into its rows. Each row has a temperature, and begins with a
    prompt of so many tokens, at least one, about which nobody asks."""
    kinds, kind = np.unique(np.asarray(heats, dtype=np.float32), return_inverse=True)
    asked = [places[start:] for places, start in zip(forest.index, prompts, strict=True)]
    names = np.concatenate([places * len(kinds) + one for places, one in zip(asked, kind, strict=True)])
    found, where = np.unique(names, return_inverse=True)
    children, index = found // len(kinds), np.full(forest.tokens, len(found), dtype=np.int64)
    ends = np.cumsum([len(places) for places in forest.index])
    before = [np.arange(end - len(places) - 1, end - 1) for end, places in zip(ends, asked, strict=True)]
    index[np.concatenate(before)] = where
    return Reading(forest.parent[children], forest.ids[children], kinds[found % len(kinds)], index)


def flat_exit(lengths: Sequence[int] | Ints) -> Ints:
    """``exit`` of rows of these `lengths` one after the other, which share nothing."""
    return np.repeat(np.cumsum(lengths), lengths)


def dense(exit_: Ints) -> NDArray[np.bool_]:
    """The mask ``[N, N]``: which token (row) sees which (column)."""
    place = np.arange(len(exit_))
    return (place[None, :] <= place[:, None]) & (place[:, None] < exit_[None, :])


def mask_mod(exit_: Any) -> Mask:
    """The mask as flex attention asks for it, of a tensor ``exit``."""

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < exit_[key])

    return sees


def blocks(exit_: Ints, size: int = BLOCK) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which blocks of ``size`` queries (rows) and as many keys (columns) have a pair that sees, and which have no
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


def cut(rows: Sequence[Ints], limit: int, agree: Callable[[int], int] = int) -> list[list[int]]:
    """Which rows go together. No part's forest has more than `limit` nodes, unless it is of one row.

    Of all ways to cut the depth-first order, it is the one with the fewest nodes in total. A part has its whole path
    from the root, so a cut costs the tokens that the rows on its sides share. Among equal ones it has the fewest parts,
    and among these the smallest largest part.

    `agree` is told the number of parts, and says how many are wanted: at most one a row. More forks are cut for these,
    the cheapest first.
    """
    order, shared = _sorted(rows)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)[order]
    found, forks = _forks(lengths, shared, limit)
    low, high = int(lengths.max()), limit
    while low < high:
        middle = (low + high) // 2
        if (less := _forks(lengths, shared, middle))[0] == found:
            high, forks = middle, less[1]
        else:
            low = middle + 1
    spare = sorted(set(range(1, len(order))) - set(forks), key=lambda number: (int(shared[number]), number))
    forks = sorted([*forks, *spare[: agree(len(forks) + 1) - len(forks) - 1]])
    return [order[a:b] for a, b in zip([0, *forks], [*forks, len(order)], strict=True)]


def _forks(lengths: Ints, shared: Ints, limit: int) -> tuple[tuple[int, int], list[int]]:
    """What the cheapest cuts cost, in nodes over the uncut forest and in parts, and the rows before which they are.

    ``best[b]`` is the least that the rows before ``b`` cost over the uncut forest, in nodes and in parts. A part from
    ``a`` to ``b`` has ``shared[a] + new[b] - new[a]`` nodes, which only falls with ``a``. So the places where the last
    part may begin are a window. The least of a window is kept at the front of a queue.
    """
    new = np.concatenate(([0], np.cumsum(lengths - shared))).tolist()
    again = [int(one) for one in shared]
    best, begin = [(0, 0)], [0]
    queue: deque[int] = deque()
    for end in range(1, len(new)):
        start = end - 1
        worth = best[start][0] + again[start], best[start][1]
        while queue and (best[queue[-1]][0] + again[queue[-1]], best[queue[-1]][1]) >= worth:
            queue.pop()
        queue.append(start)
        while queue[0] < start and again[queue[0]] + new[end] - new[queue[0]] > limit:
            queue.popleft()
        nodes, parts = best[queue[0]]
        best.append((nodes + again[queue[0]], parts + 1))
        begin.append(queue[0])
    forks, place = [], begin[-1]
    while place:
        forks.append(place)
        place = begin[place]
    return best[-1], forks[::-1]


# Which form is cheaper -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prices:
    """What a model computes forward, in multiplications and additions: for a token, and for a pair in attention."""

    token: float
    pair: float

    def of(self, exit_: Ints, whole: bool) -> float:
        """The price of tokens with this mask. Attention computes all pairs if it takes a `whole` mask, else those of
        the blocks in which a pair sees."""
        pairs = len(exit_) ** 2 if whole else int(blocks(exit_)[0].sum()) * BLOCK**2
        return self.token * len(exit_) + self.pair * pairs


def prices(parameters: float, layers: int, width: int) -> Prices:
    """A parameter is multiplied and added once for each token. In each layer a pair takes two products of vectors, of
    `width` numbers over all heads: one for the score, one for the value."""
    return Prices(2.0 * parameters, 4.0 * layers * width)


def cheaper(forest: Forest, price: Prices, whole: bool, limit: int) -> bool:
    """Whether the forest is predicted to cost less than its rows one after the other, or these exceed `limit`."""
    flat = flat_exit([len(places) for places in forest.index])
    return len(flat) > limit or price.of(forest.exit, whole) < price.of(flat, whole)
