"""The forest of rows against a trie made node by node, and cuts against all ways to cut."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ajet_trainer.forest import (
    LAUNCH,
    Forest,
    Ints,
    Prices,
    blocks,
    cut,
    forest_of,
    mask_mod,
    prices,
    reading,
    spans,
)
from tests.kit.forests import dense

ROWS = st.lists(st.lists(st.sampled_from([0, 256, 151_935]), min_size=1, max_size=8), min_size=1, max_size=9)
"""Few tokens, so that rows share, repeat each other and begin each other; some take more than a byte."""


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
    forest = forest_of(arrays(rows))
    found = paths(forest)
    assert len(found) == len(set(found)) and set(found) == prefixes(rows)
    back = [forest.ids[places] for places in forest.index]
    assert [row.tolist() for row in back] == rows
    assert all(row.dtype == np.int64 for row in back)
    assert forest.depth.tolist() == [len(path) - 1 for path in found]
    assert forest.tokens == sum(map(len, rows)) and forest.seen == sum(map(len, found))


@given(ROWS)
def test_a_token_sees_its_own_path_alone(rows: list[list[int]]) -> None:
    forest = forest_of(arrays(rows))
    found = paths(forest)
    wanted = [[path[: len(other)] == other for other in found] for path in found]
    assert dense(forest.exit).tolist() == wanted
    place = np.arange(len(found))
    assert mask_mod(forest.exit)(None, None, place[:, None], place[None, :]).tolist() == wanted
    assert dense(forest.exit).sum() == forest.seen


@given(ROWS)
def test_a_span_sees_its_path(rows: list[list[int]]) -> None:
    """Spans are all nodes, one after the other. What a span's nodes see is above it, or in it and not behind."""
    forest = forest_of(arrays(rows))
    found, wanted, place = [*spans(forest)], dense(forest.exit), 0
    assert len(found) <= len(rows)
    for start, end, above in found:
        assert start == place < end
        place = end
        for node in range(start, end):
            assert [*above.tolist(), *range(start, node + 1)] == np.flatnonzero(wanted[node]).tolist()
    assert place == len(forest.ids)


@given(ROWS.filter(lambda rows: any(len(row) > 1 for row in rows)), st.data())
def test_each_token_is_read_once_at_the_one_before_it(rows: list[list[int]], data: st.DataObject) -> None:
    """Once at each temperature, and the tokens of prompts not at all."""
    rows = [row for row in rows if len(row) > 1]
    prompts = [data.draw(st.integers(1, len(row) - 1)) for row in rows]
    heats = [data.draw(st.sampled_from([0.5, 1.0])) for _ in rows]
    forest = forest_of(arrays(rows))
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
    mask = dense(forest_of(arrays(rows)).exit)
    some, every = blocks(forest_of(arrays(rows)).exit, size)
    count = -(-len(mask) // size)
    parts = [[mask[a * size : (a + 1) * size, b * size : (b + 1) * size] for b in range(count)] for a in range(count)]
    assert some.tolist() == [[bool(part.any()) for part in line] for line in parts]
    assert every.tolist() == [[bool(part.all()) for part in line] for line in parts]


PRICES = st.builds(Prices, *[st.sampled_from([0.0, 0.5, 1.0, 8.0])] * 4)


def plain(rows: list[list[int]]) -> list[int]:
    return [1] * len(rows)


def warm(rows: list[list[int]]) -> list[float]:
    return [1.0] * len(rows)


def nodes(rows: list[list[int]], part: list[int]) -> int:
    return len(prefixes([rows[place] for place in part]))


def asks(rows: list[list[int]], prompts: list[int], heats: list[float], part: list[int]) -> int:
    """The logprobs of `part` as `cut` counts them: those of a row for which the one before it does not ask too."""
    names = [
        {(*rows[place][:length], heats[place]) for length in range(prompts[place] + 1, len(rows[place]) + 1)}
        for place in part
    ]
    return sum(len(mine - before) for mine, before in zip(names, [set[Any](), *names], strict=False))


def worth(
    rows: list[list[int]], prompts: list[int], heats: list[float], parts: list[list[int]], price: Prices
) -> float:
    """The price of `parts`: tokens and pairs counted node by node, logprobs as `cut` says."""
    total = 0.0
    for part in parts:
        seen = sum(map(len, prefixes([rows[place] for place in part])))
        size, asked = nodes(rows, part), asks(rows, prompts, heats, part)
        total += price.token * size + price.logprob * asked + price.pair * seen + price.part
    return total


@given(ROWS, st.integers(1, 30), PRICES, st.data())
def test_the_cheapest_cut_of_all(rows: list[list[int]], limit: int, price: Prices, data: st.DataObject) -> None:
    prompts = [data.draw(st.integers(1, len(row))) for row in rows]
    heats = [data.draw(st.sampled_from([0.5, 1.0])) for _ in rows]

    def fits(part: list[int]) -> bool:
        return len(part) == 1 or max(nodes(rows, part), asks(rows, prompts, heats, part)) <= limit

    parts = cut(arrays(rows), prompts, heats, limit, price)
    order = [place for part in parts for place in part]
    assert sorted(order) == list(range(len(rows))) and all(parts) and all(map(fits, parts))
    for part in parts:
        some = [[values[place] for place in part] for values in (arrays(rows), prompts, heats)]
        asked = len(reading(forest_of(some[0]), *some[1:]).nodes)
        assert asked <= asks(rows, prompts, heats, part) and (len(part) == 1 or asked <= limit)
    found = []
    for count in range(len(rows)):
        for forks in combinations(range(1, len(rows)), count):
            ways = [order[a:b] for a, b in zip([0, *forks], [*forks, len(rows)], strict=True)]
            if all(map(fits, ways)):
                found.append(worth(rows, prompts, heats, ways, price))
    assert worth(rows, prompts, heats, parts, price) == min(found)


@given(ROWS, st.integers(1, 30), PRICES, st.integers(0, 9))
def test_as_many_parts_as_are_agreed_on(rows: list[list[int]], limit: int, price: Prices, more: int) -> None:
    told = []

    def agree(count: int) -> int:
        told.append(count)
        return min(len(rows), count + more)

    parts = cut(arrays(rows), plain(rows), warm(rows), limit, price, agree)
    assert told == [len(cut(arrays(rows), plain(rows), warm(rows), limit, price))]
    assert len(parts) == min(len(rows), told[0] + more)
    assert sorted(place for part in parts for place in part) == list(range(len(rows)))
    assert all(len(part) == 1 or nodes(rows, part) <= limit for part in parts)


@given(ROWS, PRICES)
def test_what_has_room_is_never_cut(rows: list[list[int]], price: Prices) -> None:
    """A forest has no more of anything than its rows have alone, so it is never dearer."""
    parts = cut(arrays(rows), plain(rows), warm(rows), 10_000, price)
    assert len(parts) == 1


def test_what_is_priced() -> None:
    price = prices(body=1000, head=300, layers=2, width=64)
    assert price == Prices(2000.0, 600.0, 512.0, 2 * LAUNCH)
    assert price.of(7, 3, 20) == 7 * 2000 + 3 * 600 + 20 * 512 + 2 * LAUNCH
