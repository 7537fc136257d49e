"""What the tiny model can learn of users: which kind of word they want, an answer of one token at a time.

Asked with "hello", a user wants a token that begins with a space; asked with "guess", a piece of a word without one. A
model that knows nothing is right in a quarter of its answers. What answers one question says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

ASKED = ("hello", "guess") * 3
ALIKE = ("hello",) * 6
"""Questions that one word can answer: there is nothing to tell apart."""
WORTH = {"yes": 1.0, "no": -1.0}


def talk(say: Callable[[str], str], questions: Sequence[str] = ASKED) -> float:
    """One chat; the share of right answers."""
    right, verdict = 0, ""
    for asked in questions:
        said = say(f"{verdict}{asked}")
        good = len(said) > 1 and said.startswith(" ") == (asked == "hello")
        right += good
        verdict = "yes " if good else "no "
    say(verdict)
    return right / len(questions)


def score(episode: dict[str, Any]) -> dict[str, float]:
    """The judge: a yes in what the user said next, or a no."""
    said = {call["call"]: call["next"].split("user\n")[-1].split(maxsplit=1) for call in episode["calls"]}
    return {call: WORTH[words[0]] for call, words in said.items() if words and words[0] in WORTH}


def flipped(episode: dict[str, Any]) -> dict[str, float]:
    """A judge that calls bad what users call good."""
    return {call: -value for call, value in score(episode).items()}
