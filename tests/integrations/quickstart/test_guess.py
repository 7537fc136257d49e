from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from integrations.quickstart.guess import HIGHEST, LOWEST, TURNS, Ask, number_in, play


def scripted(*replies: str) -> tuple[Ask, list[list[dict[str, str]]]]:
    """An `ask` that gives `replies` in turn, and what it was asked."""
    left: Iterator[str] = iter(replies)
    asked: list[list[dict[str, str]]] = []

    def ask(messages: list[dict[str, str]]) -> str:
        asked.append(list(messages))
        return next(left)

    return ask, asked


def test_a_right_guess_ends_the_game_with_full_score() -> None:
    ask, asked = scripted("10", "13")
    assert play(13, ask) == 1.0
    assert [message["content"] for message in asked[1]][2:] == ["10", "Higher."]


def test_four_unusable_replies_score_nothing() -> None:
    ask, asked = scripted("Let me see", "1, 2, 3", "", "21 or 12")
    assert play(7, ask) == 0.0
    assert len(asked) == TURNS
    assert asked[1][-1] == {"role": "user", "content": "Say one number."}


def test_halving_scores_more_than_counting() -> None:
    halving, _ = scripted("10", "15", "18", "16")
    counting, _ = scripted("1", "2", "3", "4")
    span = math.log(HIGHEST - LOWEST + 1)
    assert play(17, halving) == pytest.approx(1.0 - math.log(1) / span)
    assert play(17, counting) == pytest.approx(1 - math.log(16) / span)


def test_a_guess_outside_what_is_known_rules_nothing_out_again() -> None:
    ask, _ = scripted("10", "3", "400", "5")
    assert play(15, ask) == pytest.approx(1 - math.log(10) / math.log(20))


@pytest.mark.parametrize(
    ("reply", "number"),
    [("12", 12), (" 12.\n", 12), ("is it 7?", 7), ("1 2", None), ("", None), ("twelve", None), ("٣", None)],
)
def test_a_reply_counts_if_it_holds_exactly_one_number(reply: str, number: int | None) -> None:
    assert number_in(reply) == number
