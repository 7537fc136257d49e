"""Texts as a tree, against a set of all their beginnings; and every tree that is none."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.tree import Tree, tree_of

Ids = tuple[int, ...]


def packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpacked(data: bytes) -> Ids:
    return tuple(memoryview(data).cast("i"))


@st.composite
def forked(draw: st.DrawFn) -> list[Ids]:
    """Texts that begin alike, in any order: forks, texts that end within others, equal ones, empty ones."""
    texts: list[Ids] = []
    for _ in range(draw(st.integers(0, 12))):
        before = draw(st.sampled_from(texts)) if texts and draw(st.booleans()) else ()
        news = draw(st.lists(st.sampled_from([0, 1, 256, -1, 2**31 - 1]), max_size=5))
        texts.append(before[: draw(st.integers(0, len(before)))] + tuple(news))
    return draw(st.permutations(texts))


def beginnings(texts: Sequence[Ids]) -> set[Ids]:
    return {text[:length] for text in texts for length in range(1, len(text) + 1)}


@given(forked())
def test_each_beginning_is_one_node_and_each_text_is_a_path(texts: list[Ids]) -> None:
    data, runs, ends = tree_of(list(map(packed, texts)))
    tree = Tree(unpacked(data), runs)
    paths = [tree.path(node) for node in range(len(unpacked(data)))]
    assert len(paths) == len(set(paths)) and set(paths) == beginnings(texts)
    assert [tree.path(end) for end in ends] == texts
    assert [tree.length(end) for end in ends] == list(map(len, texts))


@given(forked())
def test_nodes_are_in_depth_first_order_and_runs_are_as_long_as_they_can_be(texts: list[Ids]) -> None:
    data, runs, _ = tree_of(list(map(packed, texts)))
    parents: list[int] = []
    for length, parent in runs:
        assert parent == -1 or parent < len(parents) - 1
        parents += [parent, *range(len(parents), len(parents) + length - 1)]
    open_nodes: list[int] = []
    for node, parent in enumerate(parents):
        while open_nodes and open_nodes[-1] != parent:
            open_nodes.pop()
        assert parent == -1 or open_nodes
        open_nodes.append(node)
    assert len(parents) == len(unpacked(data))


@given(forked(), st.randoms(use_true_random=False))
def test_the_tree_depends_on_the_set_of_texts_alone(texts: list[Ids], dice: object) -> None:
    tree = tree_of(list(map(packed, texts)))[:2]
    assert tree_of(list(map(packed, reversed(texts))))[:2] == tree
    assert tree_of(list(map(packed, set(texts))))[:2] == tree


def test_a_tree_looks_like_this() -> None:
    data, runs, ends = tree_of(list(map(packed, [(1, 2, 3), (1, 2), (), (1, 4, 5), (9,)])))
    assert unpacked(data) == (1, 2, 3, 4, 5, 9)
    assert runs == [(3, -1), (2, 0), (1, -1)]
    assert ends == [2, 1, -1, 4, 5]


@pytest.mark.parametrize(
    ("tokens", "runs", "says"),
    [
        ((1, 2), [(1, -1), (1, 1)], r"run 1 has 1 nodes from node 1 on, the first a child of 1: .* before its child"),
        ((1, 2), [(2, 0)], "run 0 .* a child of 0"),
        ((1, 2), [(1, -1), (1, -2)], "run 1 .* a child of -2"),
        ((1, 2), [(2, -1), (0, 0)], "run 1 has 0 nodes"),
        ((1, 2), [(3, -1), (-1, 0)], "run 1 has -1 nodes"),
        ((1, 2), [(1, -1)], "its runs have 1 nodes, and there are 2 tokens"),
        ((1, 2), [(3, -1)], "its runs have 3 nodes, and there are 2 tokens"),
        ((1, 2), [(1, -1), (2, 0)], "have 3 nodes"),
        ((1, 2, 2), [(2, -1), (1, 0)], "node 2 repeats token 2 after node 0"),
        ((1, 2, 3, 2, 3), [(1, -1), (1, 0), (1, 0), (1, 0), (1, 3)], "node 3 repeats token 2 after node 0"),
        ((1, 1), [(1, -1), (1, -1)], "node 1 repeats token 1 after node -1"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_place(tokens: Ids, runs: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tree(tokens, runs)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 6)), max_size=5))
def test_there_is_no_way_to_tell_a_cycle(runs: list[tuple[int, int]]) -> None:
    """A parent is before its child, so each path ends at the root."""
    nodes = sum(length for length, _ in runs)
    try:
        tree = Tree(tuple(range(nodes)), runs)
    except ValueError:
        return
    for node in range(nodes):
        path = tree.path(node)
        assert path[-1] == node and list(path) == sorted(set(path))


def test_a_run_may_go_on_where_the_one_before_it_ends() -> None:
    assert Tree((1, 2, 2), [(1, -1), (1, 0), (1, 1)]).path(2) == (1, 2, 2)


@pytest.mark.parametrize("end", [-2, 2, 10**12])
def test_an_end_is_a_node(end: int) -> None:
    with pytest.raises(ValueError, match=f"end {end} is none of the tree's 2 nodes"):
        Tree((1, 2), [(2, -1)]).length(end)
