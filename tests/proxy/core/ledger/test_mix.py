"""Whose turn it is: against the shares after every turn, with lanes that have nothing, and what they have lent."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.mix import Mix, QueueCredit, Turns

LANES = "abcdefgh"


def everybody(lane: str) -> bool:
    return True


def dealt(shares: dict[str, float], turns: int, credit: QueueCredit | None = None) -> list[str]:
    """Whose turns they are, where every lane has groups."""
    mine, out = Turns(shares, QueueCredit() if credit is None else credit, 4), list[str]()
    for _ in range(turns):
        lane = mine.next(everybody)
        assert lane is not None
        mine.take(lane)
        out.append(lane)
    return out


def off(shares: dict[str, float], turns: list[str]) -> Fraction:
    """By how much a lane's turns differ from its share of them at most, after any turn."""
    exact = {lane: Fraction(str(share)) for lane, share in shares.items()}
    whole = sum(exact.values())
    return max(
        abs(turns[:number].count(lane) - share / whole * number)
        for number in range(1, len(turns) + 1) for lane, share in exact.items()
    )


@st.composite
def mixes(draw: st.DrawFn) -> dict[str, float]:
    weights = draw(st.lists(st.integers(1, 50), min_size=1, max_size=len(LANES)))
    return {lane: weight / sum(weights) for lane, weight in zip(LANES, weights, strict=False)}


@given(mixes(), st.integers(1, 120))
@example({"a": 0.1, "b": 0.2, "c": 0.7}, 60)
@example(dict.fromkeys(LANES, 0.125), 64)
def test_after_every_turn_each_lane_is_within_one_group_of_its_share(shares: dict[str, float], turns: int) -> None:
    assert off(shares, dealt(shares, turns)) < 1


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.5}, {"a": 0.6, "b": 0.4}, {"a": 0.2, "b": 0.3, "c": 0.5}])
def test_no_order_of_turns_does_better_than_the_bound_of_theory_by_which_ours_is_chosen(
    shares: dict[str, float]
) -> None:
    """All orders are tried: ours stays within 1 - 1/(2k - 2), and none stays within less than the best of them."""
    best = min(off(shares, list(order)) for order in product(shares, repeat=8))
    assert best <= off(shares, dealt(shares, 8)) <= 1 - Fraction(1, 2 * len(shares) - 2)


def test_turns_go_on_from_one_lease_to_the_next() -> None:
    shares, credit = {"a": 0.3, "b": 0.7}, QueueCredit()
    apart = [lane for number in (1, 4, 2, 3) for lane in dealt(shares, number, credit)]
    assert apart == dealt(shares, 10)
    assert credit.leased == {"a": 3, "b": 7}
    assert credit.owed == {}


def test_a_lane_without_a_share_has_no_turn() -> None:
    assert set(dealt({"a": 1.0, "b": 0.0}, 9)) == {"a"}


def played(shares: dict[str, float], having: list[str], most: int = 4) -> tuple[str, QueueCredit]:
    """Who takes each turn, if only these lanes have groups at it, and nobody is waited for."""
    credit, taken = QueueCredit(), ""
    for lanes in having:
        turns = Turns(shares, credit, most, lends=lambda lane: True)
        lane = turns.next(lanes.__contains__)
        assert lane is not None
        turns.take(lane)
        taken += lane
    return taken, credit


def test_a_lane_that_has_nothing_lends_its_turns_and_has_them_back() -> None:
    taken, credit = played({"a": 0.5, "b": 0.5}, ["b"] * 4 + ["ab"] * 6)
    assert taken == "bbbb" + "aaaa" + "ab"
    assert credit.owed == {}
    assert off({"a": 0.5, "b": 0.5}, list(taken)) == 2


def test_it_lends_at_most_one_batch() -> None:
    taken, credit = played({"a": 0.5, "b": 0.5}, ["b"] * 20 + ["ab"] * 8, most=3)
    assert taken[20:] == "aaaaaaab"
    assert credit.owed == {}


def test_turns_are_lent_to_the_lane_that_is_furthest_behind() -> None:
    taken, _ = played({"a": 0.5, "b": 0.25, "c": 0.25}, ["bc"] * 8)
    assert (taken.count("b"), taken.count("c")) == (4, 4)


def test_only_a_lane_that_has_borrowed_pays() -> None:
    """The turns that c is dealt are its own: b alone has taken those of a."""
    shares = {"a": 0.4, "b": 0.4, "c": 0.2}
    taken, credit = played(shares, ["b"] * 2 + ["abc"] * 8)
    assert taken.count("c") == 2
    assert credit.owed == {}


def test_where_a_lane_is_waited_for_nobody_takes_its_turn() -> None:
    turns = Turns({"a": 0.5, "b": 0.5}, QueueCredit(), 4)
    assert turns.next("b".__contains__) is None
    assert Turns({"a": 0.5, "b": 0.5}, QueueCredit(), 4, lends=lambda lane: True).next(lambda lane: False) is None


@given(mixes(), st.lists(st.sets(st.sampled_from(LANES), min_size=1), max_size=60), st.integers(1, 5))
def test_what_lanes_owe_adds_up_and_stays_within_a_batch(
    shares: dict[str, float], having: list[set[str]], most: int
) -> None:
    credit, count = QueueCredit(), 0
    for lanes in having:
        turns = Turns(shares, credit, most, lends=lambda lane: True)
        lane = turns.next(lanes.__contains__)
        assert (lane is None) == (not lanes & shares.keys())
        if lane is not None:
            assert lane in lanes
            turns.take(lane)
            count += 1
        assert sum(credit.owed.values()) == 0
        assert all(number and number <= most for number in credit.owed.values())
        assert sum(credit.leased.values()) == sum(credit.dealt.values()) == count
    order = dealt(shares, count)
    assert credit.dealt == {lane: order.count(lane) for lane in dict.fromkeys(order)}


def test_the_room_of_a_lane_is_its_share_of_what_may_be_ahead() -> None:
    mix = Mix({"a": 0.75, "b": 0.2, "c": 0.05, "d": 0.0}, ahead=8, group_size=4)
    assert [mix.room(lane, 2) for lane in "abcdx"] == [28, 12, 8, 0, 0]
    assert [Mix({"a": 0.75, "b": 0.25}, ahead=8).room(lane, 2) for lane in "abc"] == [12, 4, 0]
    assert Mix(ahead=3).room("x", 2) == 6
    assert Mix({"a": 1.0}).room("a", 2) is None


@given(mixes(), st.integers(1, 12), st.integers(0, 100))
def test_a_lane_has_room_for_all_that_a_batch_deals_it(shares: dict[str, float], groups: int, before: int) -> None:
    turns = dealt(shares, before + groups)[before:]
    mix = Mix(shares, ahead=groups)
    assert all(turns.count(lane) <= (mix.room(lane, 1) or 0) for lane in shares)


def test_weights_are_the_decimal_numbers_that_are_meant() -> None:
    """Not what a float makes of them: after ten turns 0.1 is exactly one."""
    for many in combinations_with_replacement((1, 2, 3), 3):
        shares = {lane: weight / 10 for lane, weight in zip("abc", many, strict=True)}
        shares["d"] = round(1 - sum(shares.values()), 1)
        turns = dealt(shares, 10)
        for lane, share in shares.items():
            assert turns.count(lane) == round(10 * share)
