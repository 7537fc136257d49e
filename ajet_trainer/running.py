"""The baseline of calls whose episode is alone: the running mean of their lane.

This is `algorithm.adv_estimator = "ajet_running"`. Where two episodes or more are compared, it is credit by turn
(`ajet_trainer.turns`). Where one is alone, call t of a session has ``G(t) = R + sum of gamma^(k - t) * r(k) over k >=
t`` and the advantage ``A(t) = (G(t) - b) / s``, within ±`MOST`.

- `b` and `s` are the mean and the deviation of G over the calls of the lane that earlier steps have trained, of all
  episodes. A call counts half as much as the one that came `HALF_LIFE` calls after it. `s` is `LEAST` at least.
- While fewer than `FEW` calls of a lane are known, `b` is the mean over the calls of other episodes of the lane in this
  step, and `s` the deviation over all of the lane. Without another episode the advantages are 0.
- Calls that no reward reaches count nowhere. Those of an episode that is alone are left out of training.

Invariant: an episode's rewards have no part in its own `b`, which thus adds nothing to the expected gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ajet_sdk.rounding import slack
from ajet_sdk.sample import Group
from ajet_trainer.turns import ByTurn, returns_to_go, turn_sessions, unjudged

HALF_LIFE = 256
KEPT = 0.5 ** (1 / HALF_LIFE)
"""The share of its weight that a call keeps when the next one comes."""
FEW = 16
LEAST = 0.1
MOST = 4.0


class Known(NamedTuple):
    """The figures of a lane: the number of its calls, the sum of their weights, and of their returns the weighted mean
    and the weighted sum of squares about it."""

    calls: int = 0
    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, returns: Iterable[float]) -> Known:
        """The figures after calls with these `returns`."""
        calls, weight, mean, squares = self
        for value in returns:
            off = value - mean
            weight = KEPT * weight + 1.0
            mean += off / weight
            squares = KEPT * squares + off * (value - mean)
            calls += 1
        return Known(calls, weight, mean, squares)


Lanes = Mapping[str, Known]
"""The figures of each lane."""


Return = tuple[str, str, float]
"""An episode, a call of it, and the call's return."""


def of_step(groups: Iterable[Group], how: ByTurn, lanes: Lanes) -> tuple[ByTurn, Lanes]:
    """The credit of the calls of a step on `groups`, and what is known once it has made an update."""
    found = defaultdict[str, list[Return]](list)
    for group in groups:
        found[group.lane] += _returns(group, how.gamma)
    alone, after = dict[str, float](), dict(lanes)
    for lane, returns in found.items():
        known = lanes.get(lane, Known())
        alone |= zip((call for _, call, _ in returns), _advantages(returns, known), strict=True)
        after[lane] = known.after(value for _, _, value in returns)
    return replace(how, alone=alone), after


def _returns(group: Group, gamma: float) -> Iterator[Return]:
    """The returns of the calls that a reward reaches."""
    without = {one.episode: unjudged(one, gamma) for one in group.episodes}
    for session in (session for mine in turn_sessions(group) for session in mine if session.episode in without):
        gains = returns_to_go([turn.reward for turn in session.turns], gamma)
        for turn, gain in zip(session.turns, gains, strict=True):
            if turn.call not in without[session.episode]:
                yield session.episode, turn.call, session.reward + gain


def _advantages(returns: Sequence[Return], known: Known) -> Iterator[float]:
    """The advantage of each call of a lane, were its episode alone."""
    values = [value for _, _, value in returns]
    if known.calls < FEW:
        bases, variance = list(_of_others(returns)), float(np.var(values))
    else:
        bases, variance = [known.mean] * len(values), known.squares / known.weight
    scale, by = max(math.sqrt(variance), LEAST), slack(map(abs, values))
    for value, base in zip(values, bases, strict=True):
        yield 0.0 if abs(value - base) <= by else max(-MOST, min(MOST, (value - base) / scale))


def _of_others(returns: Sequence[Return]) -> Iterator[float]:
    """For each the mean of those of other episodes; itself where there are none."""
    mine = defaultdict[str, list[float]](list)
    for episode, _, value in returns:
        mine[episode].append(value)
    whole = math.fsum(value for _, _, value in returns)
    for episode, _, value in returns:
        others = len(returns) - len(mine[episode])
        yield (whole - math.fsum(mine[episode])) / others if others else value
