"""The equality of rewards: one definition for the daemon, which leases groups, and the trainer, which compares.

A reward is a sum of doubles, and each order of summing has its own rounding: 0.1 + 0.1 + 0.1 is not 0.3. What two sums
differ by for that reason says nothing about the policy. A sum of n doubles is off by at most ``n * 2^-53`` of the sum
of their magnitudes. So rewards that differ by less than `ROUNDING` of that are equal, which is the bound for 9,000
numbers. Below a magnitude of 1 the bound stays where it is. No estimator tells 1e-12 from 0: those that divide by a
deviation add 1e-6 to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ROUNDING = 1e-12
"""A share of the magnitude of what was given; and of 1, if that is more."""


def magnitude(given: Iterable[float]) -> float:
    """The size of the numbers that a reward was added up from."""
    return math.fsum(map(abs, given))


def slack(magnitudes: Iterable[float]) -> float:
    """By how much sums of these `magnitudes` may differ and still be equal."""
    return ROUNDING * max((1.0, *magnitudes))


def differ(values: Sequence[float], by: float) -> bool:
    """True if two of `values` are further apart than `by`."""
    return max(values) - min(values) > by


def leveled(values: Sequence[float], by: float) -> list[float]:
    """`values`, where each that is at most `by` above a smaller one is made equal to it."""
    level, of = -math.inf, dict[float, float]()
    for value in sorted(set(values)):
        if value - level > by:
            level = value
        of[value] = level
    return [of[value] for value in values]
