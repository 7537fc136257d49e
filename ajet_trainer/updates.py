"""Deals a step's rows into optimizer updates: by whole groups, and about equally many rows each.

verl cuts a batch into updates of equally many rows, and fills up what is missing with padding. Filled up at the end,
the last update might have one real row among padding, and that row would weigh as much as a whole update elsewhere. So
each update gets whole groups: always the largest group that is left, for the update that has the fewest rows. Each is
then filled up by itself to the size of the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dealt:
    """`update` says to which update a group's rows go. Each update has `rows` rows, padding included."""

    update: Mapping[str, int]
    updates: int
    rows: int

    def places(self, groups: Sequence[str | None]) -> list[list[int]]:
        """The places of each update's rows in a batch whose rows have these `groups`; None is a row of padding."""
        out: list[list[int]] = [[] for _ in range(self.updates)]
        padding = []
        for place, group in enumerate(groups):
            if group is None:
                padding.append(place)
            else:
                out[self.update[group]].append(place)
        for places in out:
            missing = self.rows - len(places)
            places += padding[:missing]
            padding = padding[missing:]
        return out


def together(places: Sequence[int], keys: Sequence[str], parts: int) -> list[list[int]]:
    """`places` in equally large parts, in the order of their `keys`: so rows of one group are in few of them."""
    order = sorted(places, key=lambda place: keys[place])
    size = len(order) // parts
    return [order[size * part : size * (part + 1)] for part in range(parts)]


def deal(groups: Sequence[str], updates: int, processes: int, *, lonely: bool = True) -> Dealt:
    """Deals rows of these `groups` into at most so many `updates`. So many `processes` can share each of them equally.

    Without `lonely`, the batch is never one row short, because some estimator takes no padding that is alone.
    """
    sizes = Counter(groups)
    loads = [0] * min(updates, len(sizes))
    update = {}
    for group, size in sizes.most_common():
        update[group] = loads.index(min(loads))
        loads[update[group]] += size
    rows = -(-max(loads) // processes) * processes
    if not lonely and rows * len(loads) - len(groups) == 1:
        rows += processes
    return Dealt(update, len(loads), rows)
