"""The worth of an answer, by what the user said next. `ajet judge --with judge.py:score` calls it for each chat."""

from __future__ import annotations

from typing import Any

WORTH = {"Yes!": 1.0, "Higher.": 0.0, "Lower.": 0.0, "I said ": -0.5, "Say one number.": -1.0}


def score(episode: dict[str, Any]) -> dict[str, float]:
    """The value of each answer after which the user said something."""
    return {
        call["call"]: value for call in episode["calls"] for words, value in WORTH.items() if words in call["next"]
    }
