"""The users of the tutorial say in words what the judge reads out of them, and the bench's tiny game does likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from integrations.tutorials.traffic import judge
from integrations.tutorials.traffic.users import HIGHEST, LOWEST, talk
from tests.bench.traffic import words

Say = Callable[[str], str]


def judged(chat: Callable[[Say], float], app: Say, score: Callable[..., dict[str, float]]) -> tuple[float, list[float]]:
    """The users' knowledge of a chat, and the value that the judge gives for its answers."""
    heard: list[str] = []

    def say(text: str) -> str:
        heard.append(text)
        return app(text)

    known = chat(say)
    calls = [{"call": str(place), "next": f"\nuser\n{text}\nassistant\n"} for place, text in enumerate(heard[1:])]
    given = score({"calls": [*calls, {"call": "last", "next": ""}]})
    assert "last" not in given, "after it nobody says anything"
    return known, [given[str(place)] for place in range(len(calls))]


def halving() -> Say:
    low, high, said = LOWEST, HIGHEST, 0

    def app(text: str) -> str:
        nonlocal low, high, said
        if text == "Higher.":
            low = said + 1
        elif text == "Lower.":
            high = said - 1
        said = (low + high) // 2
        return f"Is it {said}?"

    return app


@pytest.mark.parametrize("secret", range(LOWEST, HIGHEST + 1))
def test_an_app_that_halves_is_never_blamed(secret: int) -> None:
    known, given = judged(lambda say: talk(secret, say), halving(), judge.score)
    assert set(given) <= {0.0, 1.0}
    assert known == 1.0 if 1.0 in given else known > 0.7


@pytest.mark.parametrize(("answers", "given", "known"), [
    (("I am sorry",) * 4, [-1.0] * 4, 0.0), (("1 or 2", "13"), [-1.0, 1.0], 1.0),
    (("10", "10", "20", "5"), [0.0, -0.5, 0.0, -0.5], 0.2665), (("21", "0", "12", "14"), [-0.5, -0.5, 0.0, 0.0], 1.0),
])  # fmt: skip
def test_an_answer_that_cannot_be_right_is_worth_less_than_one_that_can(
    answers: Sequence[str], given: list[float], known: float
) -> None:
    said = iter([*answers, "", ""])
    assert judged(lambda say: talk(13, say), lambda text: next(said), judge.score) == (
        pytest.approx(known, abs=1e-4), given
    )  # fmt: skip


@pytest.mark.parametrize(("hello", "guess", "known"), [
    (" the", "the", 1.0), (" the", " the", 0.5), ("the", " the", 0.0), (" ", "t", 0.0), ("", "", 0.0)
])  # fmt: skip
def test_the_tiny_game(hello: str, guess: str, known: float) -> None:
    right, given = judged(words.talk, lambda text: hello if text.endswith("hello") else guess, words.score)
    assert right == known
    assert (sum(given) / len(given) + 1) / 2 == known
