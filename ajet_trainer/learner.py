"""The seam between a run and what trains: see `ajet_trainer.backends` for who stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.sampling import Rule


class Learner(Protocol):
    """All that a run asks of its backend."""

    @property
    def version(self) -> int:
        """The number of its steps, which is the policy version of its weights."""
        ...

    @property
    def colocated(self) -> bool:
        """True when the engine gives up its devices for the time of `train`."""
        ...

    @property
    def batches(self) -> Mapping[str, Any]:
        """The state of `TrainedBatches` in the checkpoint that it started from; empty without one."""
        ...

    @property
    def rule(self) -> Rule:
        """All that it says of what it can train, and how. The rest of the rule is the run's to say."""
        ...

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        """One step on `rows`; raises `version` by one. Returns the learner's own metrics and ``timing_s/…``. Raises
        `NoUpdate`, and stays as it was, where no optimizer update was made."""
        ...

    def save(self, batches: Mapping[str, Any]) -> None:
        """A checkpoint of `version` with `batches` (see `TrainedBatches`) in its folder, complete when this returns."""
        ...

    def push(self) -> None:
        """Has the engine serve `version`. Raises when that takes too long."""
        ...

    def propose(self) -> None:
        """Has the candidate's engines serve `version`, and sees that they still do where they were given it before.
        Raises `EngineLost`."""
        ...

    def compare(self) -> None:
        """Has each engine answer, and raises if it does not compute what the learner does."""
        ...

    def upstreams(self) -> Sequence[str] | None:
        """Base URLs of the engines launched here, or None when others look after them."""
        ...

    def check(self) -> None:
        """Raises when an engine has died or serves another model. Asked while no batch is ready, since a dead engine
        makes none, and before each step."""
        ...

    def tune(self, config: Config) -> None:
        """Trains by `config` from the next step on. Nothing but keys of `ajet_sdk.runs.LIVE` and shares of lanes has
        changed in it. Raises `ConfigError`, and goes on as before, if that takes a restart here."""
        ...

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Passes the figures of a step on to the loggers that were asked for. None of them can end a run."""
        ...
