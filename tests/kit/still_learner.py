"""A learner that learns nothing, for runs in which verl and a model would only take time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.sampling import Rule


class StillLearner:
    """Counts its versions, for engines that stand alone. A test says what happens besides."""

    colocated = False
    rule = Rule(compares=False)
    version = 0
    batches: Mapping[str, Any] = {}

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        self.version += 1
        return {}

    def save(self, batches: Mapping[str, Any]) -> None: ...

    def tune(self, config: Config) -> None: ...

    def propose(self) -> None: ...

    def push(self) -> None: ...

    def upstreams(self) -> Sequence[str] | None:
        return None

    def compare(self) -> None: ...

    def check(self) -> None: ...

    def log(self, figures: Mapping[str, float], step: int) -> None: ...
