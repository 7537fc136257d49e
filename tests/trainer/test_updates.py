from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ajet_trainer.updates import deal

SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=12)


def named(sizes: list[int]) -> list[str]:
    return [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]


@given(SIZES, st.integers(1, 6), st.sampled_from([1, 2, 8]), st.booleans())
def test_an_update_has_whole_groups_and_is_filled_up_to_the_largest(
    sizes: list[int], updates: int, processes: int, lonely: bool
) -> None:
    groups = named(sizes)
    dealt = deal(groups, updates, processes, lonely=lonely)
    padding = dealt.rows * dealt.updates - len(groups)
    places = dealt.places([*groups, *[None] * padding])
    assert sorted(place for one in places for place in one) == list(range(len(groups) + padding))
    assert {len(one) for one in places} == {dealt.rows} and dealt.rows % processes == 0
    seen = [{groups[place] for place in one if place < len(groups)} for one in places]
    assert len(seen) == min(updates, len(sizes)) and all(seen)
    assert sum(map(len, seen)) == len(sizes)
    assert lonely or padding != 1
    loads = [sum(sizes[int(name[1:])] for name in one) for one in seen]
    for one, load in zip(seen, loads, strict=True):
        smallest = min(sizes[int(name[1:])] for name in one)
        assert load - smallest <= min(loads), "another update would be better off with this group"


def simulated(pick: random.Random) -> list[int]:
    """A step's groups: eight episodes each, of which some split into up to three rows and some were refused."""
    return [sum(pick.choice([0, 1, 1, 1, 2, 3]) for _ in range(8)) or 1 for _ in range(pick.randint(8, 16))]


def test_no_update_is_under_half_of_the_largest() -> None:
    """Many such steps had one when rows were cut in order."""
    pick = random.Random(1)
    cut_in_order = 0
    for _ in range(2000):
        sizes, updates, processes = simulated(pick), pick.choice([2, 3, 4]), 8
        groups = named(sizes)
        dealt = deal(groups, updates, processes)
        loads = [0] * dealt.updates
        for group in groups:
            loads[dealt.update[group]] += 1
        assert min(loads) >= max(loads) / 2
        share = -(-len(groups) // updates // processes) * processes or processes
        last = len(groups) % share or share
        cut_in_order += last < share / 2
    assert cut_in_order > 200
