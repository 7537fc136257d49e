"""Rewards of held-out traffic by policy version: they tell whether users are served worse than before.

Idea: the chats of one version are a span. Where there are few of a version, its neighbors belong to the span, until it
has `ENOUGH`. The latest two that have it are compared.

Invariant: nothing that is trained counts here, so no version has learned from what it is measured by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

ENOUGH = 20
MOST_SPANS = 16
"""Spans of a model, the latest."""
SURE = 1.96
"""Standard errors on each side of a difference: 95 % of a normal distribution."""


@dataclass(slots=True)
class Span:
    """The chats that the versions `first` to `last` answered: how many, their rewards added up, and the squares of
    these."""

    first: int
    last: int
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        """The square of the mean's standard error; of two chats or more."""
        return max(0.0, self.squares - self.count * self.mean**2) / (self.count - 1) / self.count

    def __str__(self) -> str:
        named = f"version {self.first}" if self.first == self.last else f"versions {self.first} to {self.last}"
        return f"{self.mean:.3f} at {named} ({self.count} chats)"

    def to_json(self) -> dict[str, Any]:
        return {"policy_versions": [self.first, self.last], "episodes": self.count, "mean": self.mean}


class Holdouts:
    """The spans of each model."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[Span, ...]] = {}

    def add(self, model: str, version: int, reward: float) -> None:
        """A chat that `version` of `model` answered last has earned `reward`. It does not count if its span is gone."""
        spans = self.spans.get(model, ())
        if not spans or (version > spans[-1].last and spans[-1].count >= ENOUGH):
            new = Span(spans[-1].last + 1 if spans else version, version)
            spans = self.spans[model] = (*spans, new)[-MOST_SPANS:]
        spans[-1].last = max(spans[-1].last, version)
        for span in spans:
            if span.first <= version <= span.last:
                span.count, span.total, span.squares = span.count + 1, span.total + reward, span.squares + reward**2

    def serves(self, model: str, version: int) -> None:
        """`version` serves `model`. What was later is of a run that has ended, or was taken back."""
        if model in self.spans:
            self.spans[model] = tuple(span for span in self.spans[model] if span.last <= version)

    def alerts(self) -> dict[str, str]:
        """The lines for an operator about models that have become worse, by subject."""
        out = dict[str, str]()
        for model, spans in self.spans.items():
            for before, now in pairwise([span for span in spans if span.count >= ENOUGH][-2:]):
                if now.mean - before.mean + SURE * math.sqrt(before.error + now.error) < 0:
                    out[f"holdout of {model!r}"] = (
                        f"held-out chats with {model!r} earned less than before: {now}, and {before}. Is what it "
                        "learns of users what they want? An earlier checkpoint is still there"
                    )
        return out

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        return {model: [span.to_json() for span in spans] for model, spans in self.spans.items() if spans}
