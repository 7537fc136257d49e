"""The forest of rows against a trie made node by node, and cuts against all ways to cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_trainer.forest import (
    Forest,
    Ints,
    Prices,
    blocks,
    cheaper,
    cut,
    dense,
    flat_exit,
    flatten,
    mask_mod,
    plant,
    prices,
    reading,
)

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=9)
"""Few tokens, so that rows share, repeat each other and begin each other."""
LARGE = 151_935


def arrays(rows: list[list[int]]) -> list[Ints]:
    return [np.array(row, dtype=np.int64) for row in rows]


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}


def paths(forest: Forest) -> list[tuple[int, ...]]:
    """Of each node, the tokens from its root to it."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(forest.ids.tolist(), forest.parent.tolist(), strict=True):
        assert parent < len(out)
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


@given(ROWS)
def test_each_prefix_is_one_node_and_rows_come_back(rows: list[list[int]]) -> None:
    forest = plant(arrays(rows))
    found = paths(forest)
    assert len(found) == len(set(found)) and set(found) == prefixes(rows)
    assert [row.tolist() for row in flatten(forest)] == rows
    assert all(row.dtype == np.int64 for row in flatten(forest))
    assert forest.depth.tolist() == [len(path) - 1 for path in found]
    assert forest.tokens == sum(map(len, rows)) and forest.seen == sum(map(len, found))


@given(ROWS)
def test_a_token_sees_its_own_path_alone(rows: list[list[int]]) -> None:
    forest = plant(arrays(rows))
    found = paths(forest)
    wanted = [[path[: len(other)] == other for other in found] for path in found]
    assert dense(forest.exit).tolist() == wanted
    place = np.arange(len(found))
    assert mask_mod(forest.exit)(None, None, place[:, None], place[None, :]).tolist() == wanted
    assert dense(forest.exit).sum() == forest.seen


@given(ROWS.filter(lambda rows: any(len(row) > 1 for row in rows)), st.data())
def test_each_token_is_read_once_at_the_one_before_it(rows: list[list[int]], data: st.DataObject) -> None:
    """Once at each temperature, and the tokens of prompts not at all."""
    rows = [row for row in rows if len(row) > 1]
    prompts = [data.draw(st.integers(1, len(row) - 1)) for row in rows]
    heats = [data.draw(st.sampled_from([0.5, 1.0])) for _ in rows]
    forest = plant(arrays(rows))
    found, read = paths(forest), reading(forest, prompts, heats)
    told = [*zip((found[node] for node in read.nodes), read.labels.tolist(), read.heat.tolist(), strict=True)]
    assert len(told) == len(set(told))
    places, wanted = iter(read.index.tolist()), set()
    for row, prompt, heat in zip(rows, prompts, heats, strict=True):
        for length in range(1, len(row) + 1):
            place = next(places)
            if prompt <= length < len(row):
                wanted.add((tuple(row[:length]), row[length], heat))
                assert told[place] == (tuple(row[:length]), row[length], heat)
            else:
                assert place == len(told)
    assert not [*places] and wanted == set(told)


@given(ROWS, st.integers(1, 5))
def test_blocks_are_those_of_the_dense_mask(rows: list[list[int]], size: int) -> None:
    mask = dense(plant(arrays(rows)).exit)
    some, every = blocks(plant(arrays(rows)).exit, size)
    count = -(-len(mask) // size)
    parts = [[mask[a * size : (a + 1) * size, b * size : (b + 1) * size] for b in range(count)] for a in range(count)]
    assert some.tolist() == [[bool(part.any()) for part in line] for line in parts]
    assert every.tolist() == [[bool(part.all()) for part in line] for line in parts]


def test_the_plain_cases() -> None:
    same = plant(arrays([[5, 6], [5, 6]]))
    assert same.ids.tolist() == [5, 6] and [one.tolist() for one in same.index] == [[0, 1], [0, 1]]
    begun = plant(arrays([[5, 6, 7], [5]]))
    assert begun.ids.tolist() == [5, 6, 7] and [one.tolist() for one in begun.index] == [[0, 1, 2], [0]]
    apart = plant(arrays([[9, 1], [8]]))
    assert apart.ids.tolist() == [8, 9, 1] and apart.parent.tolist() == [-1, -1, 1] and apart.exit.tolist() == [1, 3, 3]
    large = plant(arrays([[LARGE, 255], [LARGE, 256], [LARGE]]))
    assert large.ids.tolist() == [LARGE, 255, 256] and large.parent.tolist() == [-1, 0, 0]


def size_of(rows: list[list[int]], part: list[int]) -> int:
    return len(prefixes([rows[place] for place in part]))


def worth(rows: list[list[int]], parts: list[list[int]]) -> tuple[int, int, int]:
    sizes = [size_of(rows, part) for part in parts]
    return sum(sizes), len(parts), max(sizes)


@given(ROWS, st.integers(1, 30))
def test_the_cheapest_cut_of_all(rows: list[list[int]], limit: int) -> None:
    parts = cut(arrays(rows), limit)
    order = [place for part in parts for place in part]
    assert sorted(order) == list(range(len(rows))) and all(parts)
    assert all(len(part) == 1 or size_of(rows, part) <= limit for part in parts)
    found = []
    for count in range(len(rows)):
        for forks in combinations(range(1, len(rows)), count):
            ways = [order[a:b] for a, b in zip([0, *forks], [*forks, len(rows)], strict=True)]
            if all(len(part) == 1 or size_of(rows, part) <= limit for part in ways):
                found.append(worth(rows, ways))
    nodes, count, largest = min(found)
    assert worth(rows, parts)[:2] == (nodes, count)
    assert limit < max(map(len, rows)) or worth(rows, parts)[2] == largest


@given(ROWS, st.integers(1, 30), st.integers(0, 9))
def test_as_many_parts_as_are_agreed_on(rows: list[list[int]], limit: int, more: int) -> None:
    told = []

    def agree(count: int) -> int:
        told.append(count)
        return min(len(rows), count + more)

    parts = cut(arrays(rows), limit, agree=agree)
    assert told == [len(cut(arrays(rows), limit))] and len(parts) == min(len(rows), told[0] + more)
    assert sorted(place for part in parts for place in part) == list(range(len(rows)))
    assert all(len(part) == 1 or size_of(rows, part) <= limit for part in parts)


def test_cuts_go_where_little_is_shared() -> None:
    one, two = [1] * 50, [2] * 50
    rows = [[*start, *end] for end in ([3] * 9, [4] * 9) for start in (one, two)]
    assert cut(arrays(rows), 70) == [[0, 2], [1, 3]]
    assert cut(arrays(rows), 140) == [[0, 2, 1, 3]]


def test_what_a_form_costs() -> None:
    price = prices(parameters=1000.0, layers=2, width=64)
    assert price == Prices(2000.0, 512.0)
    assert price.of(flat_exit([3, 4]), whole=True) == 7 * 2000 + 49 * 512
    assert price.of(flat_exit([128, 128, 128]), whole=False) == 384 * 2000 + 3 * 128 * 128 * 512


@pytest.mark.parametrize("whole", [True, False])
def test_the_forest_is_taken_where_something_is_shared(whole: bool) -> None:
    price = prices(1000.0, 2, 64)
    shared = plant([np.array([1] * 500 + [last]) for last in (2, 3)])
    assert cheaper(shared, price, whole, limit=5000)
    apart = plant(arrays([[1, 2], [3, 4]]))
    assert not cheaper(apart, price, whole, limit=4) and cheaper(apart, price, whole, limit=3)
