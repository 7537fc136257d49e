"""Texts of token ids as a tree: what they share from their first token on is there once.

Idea: a node is one distinct beginning of a text, and its token is the last of that beginning. Nodes are in depth-first
order, so most are children of the node before them. A `Run` is a stretch of such nodes; it says how long it is, and
whose child its first node is (-1: nobody's). A text is given by the node of its last token: its tokens are the path
from the root. The empty text ends at -1.

Sorted texts are a trie already: of each, the part that it shares with the one before it is there. So planting costs a
sort of byte strings, and a path costs the runs that it goes through.

Invariant: the tree depends on the set of texts alone, and `Tree.path` of a text's end is that text. A `Tree` that
exists has only nodes whose parents are before them, so it has no cycle. No two children of one node have one token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

WIDTH = 4
"""Bytes of a packed token id."""
Run = tuple[int, int]
"""The number of nodes, and the parent of the first."""


def common_prefix(a: bytes, b: bytes) -> int:
    """Counts the leading tokens that `a` and `b` share."""
    low, high = 0, min(len(a), len(b)) // WIDTH
    if a[: high * WIDTH] == b[: high * WIDTH]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * WIDTH : middle * WIDTH] == b[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


def tree_of(texts: Sequence[bytes]) -> tuple[bytes, list[Run], list[int]]:
    """The tree of packed `texts`: its nodes' tokens, its runs, and the node at which each text ends."""
    parts, runs, ends = list[bytes](), list[Run](), [-1] * len(texts)
    path = list[tuple[int, int]]()  # of each stretch on the way to the last node: its first depth and its first node
    before, total = b"", 0
    for place in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[place]
        shared = common_prefix(before, text)
        while path and path[-1][0] >= shared:
            path.pop()
        parent = path[-1][1] + shared - 1 - path[-1][0] if path else -1
        new = len(text) // WIDTH - shared
        if runs and parent == total - 1:
            runs[-1] = runs[-1][0] + new, runs[-1][1]
        elif new:
            runs.append((new, parent))
            path.append((shared, total))
        parts.append(text[shared * WIDTH :])
        total += new
        ends[place] = total - 1 if text else -1
        before = text
    return b"".join(parts), runs, ends


class Tree:
    """A tree, given by the tokens of its nodes and by its runs. `ValueError` says where they are none."""

    def __init__(self, tokens: tuple[int, ...], runs: Sequence[Run]) -> None:
        self._tokens = tokens
        self._starts, self._parents, self._depths = list[int](), list[int](), list[int]()
        nodes = 0
        for number, (length, parent) in enumerate(runs):
            if length < 1 or not -1 <= parent < nodes:
                raise ValueError(
                    f"run {number} has {length} nodes from node {nodes} on, the first a child of {parent}: "
                    "a run has a node, and a parent is before its child, or -1"
                )
            self._depths.append(self._depth(parent))
            self._starts.append(nodes)
            self._parents.append(parent)
            nodes += length
        if nodes != len(tokens):
            raise ValueError(f"its runs have {nodes} nodes, and there are {len(tokens)} tokens")
        self._refuse_twins()

    def length(self, end: int) -> int:
        """Counts the tokens of the path to a node; `ValueError` if there is no such node."""
        if not -1 <= end < len(self._tokens):
            raise ValueError(f"end {end} is none of the tree's {len(self._tokens)} nodes, nor -1")
        return self._depth(end)

    def path(self, end: int) -> tuple[int, ...]:
        """The tokens from the root to a node."""
        parts = []
        while end >= 0:
            run = self._run(end)
            parts.append(self._tokens[self._starts[run] : end + 1])
            end = self._parents[run]
        if len(parts) == 1:
            return parts[0]
        tokens: list[int] = []
        for part in reversed(parts):
            tokens += part
        return tuple(tokens)

    def _depth(self, node: int) -> int:
        """Tokens on the path to `node`, its own included."""
        run = self._run(node)
        return self._depths[run] + node - self._starts[run] + 1 if node >= 0 else 0

    def _run(self, node: int) -> int:
        return bisect_right(self._starts, node) - 1

    def _refuse_twins(self) -> None:
        """Only the first node of a run can be a second child."""
        heads, known = set(self._starts), set[tuple[int, int]]()
        for start, parent in zip(self._starts, self._parents, strict=True):
            child, next_to = (parent, self._tokens[start]), parent + 1
            if child in known or (next_to not in heads and self._tokens[next_to] == self._tokens[start]):
                raise ValueError(f"node {start} repeats token {self._tokens[start]} after node {parent}")
            known.add(child)
