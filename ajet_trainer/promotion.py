"""Decides whether a candidate may serve: its evaluation beside that of the weights that serve, task by task.

Both have played the same tasks. Episodes of one task are pairs, in the order of their places. A candidate is promoted
if, with `CERTAINTY`, the mean difference of a pair's rewards is above minus the margin, if its answers are neither
less than half as long as those of the other nor more than twice as long, and if it has no reward much more often.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

CERTAINTY = 0.9
LONGEST = 2.0
MOST_SILENT = 0.1
"""The share of its plays that may lack a reward, beyond those of what serves. One always may. What lacks one is in no
mean."""
Played = Mapping[str, Any]
"""An episode of an evaluation as the daemon tells it: its ``task``, its ``reward`` or None, and ``tokens``, how many
were sampled in it, a call."""


class Verdict(NamedTuple):
    """``why`` says it in words. ``difference`` is the mean over ``pairs``, candidate less incumbent, and ``lowest`` the
    lower end of its interval. ``length`` is how many times as long its answers are."""

    promoted: bool
    why: str
    difference: float
    lowest: float
    length: float
    pairs: int


def decide(candidate: Sequence[Played], incumbent: Sequence[Played], margin: float) -> Verdict | None:
    """The verdict on `candidate`; None where less than half of what it played has a pair of which both have a reward,
    or there are less than 2, unless that is for want of its own rewards."""
    both, least = list(_pairs(candidate, incumbent)), max(2.0, len(candidate) / 2)
    pairs = [pair for pair in both if None not in (pair[0]["reward"], pair[1]["reward"])]
    own, other = (sum(pair[which]["reward"] is None for pair in both) for which in (0, 1))
    silent = own - other > max(1.0, MOST_SILENT * len(both))
    said = f"{own} of its {len(both)} plays have no reward, and {other} of what serves"
    if len(pairs) < least:
        return Verdict(False, said, 0.0, 0.0, 1.0, len(pairs)) if silent and len(both) >= least else None
    differences = [one["reward"] - other["reward"] for one, other in pairs]
    mean = math.fsum(differences) / len(pairs)
    variance = math.fsum((value - mean) ** 2 for value in differences) / (len(pairs) - 1)
    lowest = mean - NormalDist().inv_cdf(CERTAINTY) * math.sqrt(variance / len(pairs))
    ours, theirs = (math.fsum(one[which]["tokens"] for one in pairs) for which in (0, 1))
    length = ours / theirs if theirs else math.inf if ours else 1.0
    good, similar = lowest > -margin, 1 / LONGEST <= length <= LONGEST
    why = f"{mean:+.3f} over {len(pairs)} pairs, at least {lowest:+.3f}, and answers {length:.2f} times as long"
    why += f"; {said}" if silent else ""
    return Verdict(good and similar and not silent, why, mean, lowest, length, len(pairs))


def _pairs(candidate: Sequence[Played], incumbent: Sequence[Played]) -> list[tuple[Played, Played]]:
    """Pairs of plays of one task, one by the candidate and one by what serves."""
    of_task = defaultdict[str, list[Played]](list)
    for one in reversed(incumbent):
        of_task[one["task"]].append(one)
    return [(one, of_task[one["task"]].pop()) for one in candidate if of_task[one["task"]]]
