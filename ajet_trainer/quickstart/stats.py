"""The little statistics that the figures need: differences of means with their 95 % intervals.

`welch` compares two stretches of one run (their step means are taken as independent, which ignores that neighbours
share weights), `paired` compares runs of equal seed. Both use Student's t.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom."""
NORMAL_95 = 1.960


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of means and its 95 % interval; the bounds are infinite where the data cannot give them."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def t_95(freedom: float) -> float:
    """The two-sided 95 % quantile; between whole degrees of freedom the larger one, which is the careful side."""
    whole = math.floor(freedom + 1e-9)
    if whole < 1:
        return math.inf
    return T_95[whole - 1] if whole <= len(T_95) else T_95[-1]


def welch(first: Sequence[float], last: Sequence[float]) -> Difference:
    """``mean(last) - mean(first)``, variances not taken to be equal."""
    value = statistics.fmean(last) - statistics.fmean(first)
    if len(first) < 2 or len(last) < 2:
        return Difference(value, -math.inf, math.inf)
    a, b = statistics.variance(first) / len(first), statistics.variance(last) / len(last)
    if a + b == 0:
        return Difference(value, value, value)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(last) - 1))
    margin = t_95(freedom) * math.sqrt(a + b)
    return Difference(value, value - margin, value + margin)


def paired(control: Sequence[float], treatment: Sequence[float]) -> Difference:
    """The mean of ``treatment[i] - control[i]``."""
    differences = [t - c for c, t in zip(control, treatment, strict=True)]
    value = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(value, -math.inf, math.inf)
    margin = t_95(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(value, value - margin, value + margin)


def ends(rewards: Sequence[float]) -> tuple[list[float], list[float]]:
    """The first and the last third, at least one step each."""
    third = max(1, len(rewards) // 3)
    return list(rewards[:third]), list(rewards[-third:])


def smoothed(values: Sequence[float], reach: int = 2) -> list[float]:
    """The mean of each value and its neighbours up to `reach` away; at the ends of those that are there."""
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
