"""Agents of several paces at a real ledger, by a scripted clock: what advantage an episode has by how long it took.

    python -m tests.kit.paces
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from ajet_proxy.core.ledger.state import LedgerSettings
from tests.kit.ledger_rig import LedgerRig

SIZE = 8
LASTS = {"quick": 20.0, "slow": 60.0, "stuck": 900.0}
"""Seconds."""
EARNS = {"quick": 0.05, "slow": 0.75, "stuck": 0.95}
"""Their mean rewards."""
NOISE = 0.1


@dataclass
class Figures:
    """By pace, each advantage that was trained: a reward less the mean of its group."""

    advantages: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def mean(self, pace: str) -> tuple[float, float]:
        """The mean, and its standard error."""
        found = self.advantages[pace]
        mean = math.fsum(found) / len(found)
        square = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
        return mean, math.sqrt(square / len(found))


def came_of(
    mix: Mapping[str, float], episodes: int, *, at_once: int = 2 * SIZE, stream: bool = False, lost: float = 0.0,
    seed: int = 0,
) -> Figures:
    """The outcome of `episodes` of paces in these proportions, of which a share is `lost` to the world, and played
    again. Each task is open so many times `at_once`, and then the next one is. In a `stream` there is one task, which
    is opened again whenever an episode of it ends. A trainer takes groups as soon as it can."""
    dice, figures = random.Random(seed), Figures()
    rig = LedgerRig(LedgerSettings(idle_timeout=1e6, wall_timeout=1e6, group_size=SIZE))
    paces, rewards, ends = dict[str, str](), dict[str, float](), list[tuple[float, str]]()
    ask: dict[str, Any] = {"groups": 1, "group_size": SIZE, "min_group_size": 2, "group_wait_s": 60.0}

    def begin(task: str) -> None:
        name = rig.open(task=task, model="m")
        (pace,) = dice.choices(list(mix), list(mix.values()))
        paces[name], rewards[name] = pace, EARNS[pace] + dice.uniform(-NOISE, NOISE)
        heappush(ends, (rig.at + LASTS[pace] * dice.uniform(0.8, 1.2), name))

    def train() -> None:
        rig.expire()
        while (batch := rig.lease(**ask)) is not None:
            known = rig.state.batches[batch]
            for _, names in known.groups:
                earlier = getattr(known, "earlier", {}).get(names[0], ())
                base = math.fsum(rewards[name] for name in (*names, *earlier)) / len((*names, *earlier))
                for name in names:
                    figures.advantages[paces[name]].append(rewards[name] - base)
            rig.ack(batch)

    for number in range(1 if stream else episodes // at_once):
        for _ in range(at_once):
            begin(f"t{number}")
        while ends:
            rig.at, name = heappop(ends)
            train()
            if dice.random() < lost:
                rig.abort(name)
                begin(f"t{number}")
            else:
                rig.call(name)
                rig.reward(name, rewards[name])
                if stream and len(paces) < episodes:
                    begin("t0")
            train()
        rig.at += 61.0
        train()
    for name, pace in paces.items():
        figures.lost[pace] += rig.state.episodes.known(name).reason == "incomplete_group"
    return figures


def at_random(mix: Mapping[str, float], pace: str) -> float:
    """The mean advantage of a pace in groups that are drawn at random."""
    whole = math.fsum(mix.values())
    return (1 - 1 / SIZE) * (EARNS[pace] - math.fsum(share / whole * EARNS[one] for one, share in mix.items()))


HALF, STUCK = {"quick": 0.5, "slow": 0.5}, {"quick": 0.485, "slow": 0.485, "stuck": 0.03}
CASES: Mapping[str, tuple[Mapping[str, float], dict[str, Any]]] = {
    "tasks open 16 times": (HALF, {}),
    "the same, 1 of 10 lost and played again": (HALF, {"lost": 0.1}),
    "the same, 3 of 100 stuck": (STUCK, {}),
    "tasks open 8 times, 3 of 100 stuck": (STUCK, {"at_once": 8}),
    "one task, opened again and again, 3 of 100 stuck": (STUCK, {"stream": True}),
}

if __name__ == "__main__":
    for case, (mix, how) in CASES.items():
        found = came_of(mix, 8000, **how)
        for pace in mix:
            mean, error = found.mean(pace) if found.advantages[pace] else (math.nan, math.nan)
            row = (case, pace, f"{at_random(mix, pace):+.3f}", f"{mean:+.3f}", f"{error:.3f}", str(found.lost[pace]))
            print("| " + " | ".join(row) + " |")  # noqa: T201
