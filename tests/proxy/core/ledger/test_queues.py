"""Seats, groups and looks at them, without a ledger."""

from __future__ import annotations

from itertools import count as numbers
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.groups import LATE, Group, Seat, dealt
from ajet_proxy.core.ledger.looks import choose, count
from ajet_proxy.core.ledger.model_queue import Demand
from ajet_proxy.core.ledger.progress import GroupKey
from ajet_proxy.core.ledger.queues import ReadyQueues
from ajet_sdk.routes import lane_of


def key_of(task: str) -> GroupKey:
    """The group key of a task that is played without a client."""
    return GroupKey(lane_of(task), task, "")


T = key_of("t")
NUMBERS = numbers()


def put(
    queues: ReadyQueues, episode: str, version: int = 0, *, model: str = "m", group_key: GroupKey = T, order: int = -1
) -> None:
    """`episode` is opened after all others, and is ready at once."""
    queues.sit(model, group_key, episode, len(queues.of(model).seats) if order < 0 else order)
    add(queues, episode, version, model=model, group_key=group_key)


def add(queues: ReadyQueues, episode: str, version: int = 0, *, model: str = "m", group_key: GroupKey = T) -> None:
    """`episode` is ready after all others."""
    queues.of(model).add(group_key, episode, next(NUMBERS), version)


def names(chosen: object) -> list[str]:
    assert chosen is not None
    return ["".join(members) for _, members in chosen[1]]  # type: ignore[index]


@given(st.permutations("abcdefgh"), st.integers(1, 5), st.integers(1, 4), st.integers(0, 8))
def test_neighbors_by_opening_are_a_group_whoever_ends_first(order: str, size: int, asked: int, ended: int) -> None:
    """Also where a lease wants another size than the groups have."""
    queues = ReadyQueues(size)
    for number, episode in enumerate("abcdefgh"):
        queues.sit("m", T, episode, number)
    for episode in order[:ended]:
        add(queues, episode)
    groups = ["abcdefgh"[at : at + asked] for at in range(0, 8, asked)]
    whole = [one for one in groups if len(one) == asked and set(one) <= set(order[:ended])]
    whole.sort(key=lambda one: max(map(order.index, one)))
    for wanted in range(1, 9):
        chosen = choose(queues, Demand(wanted, asked), "m")
        assert (chosen is None) == (len(whole) < wanted)
        assert chosen is None or names(chosen) == whole[:wanted]
    assert count(queues.of("m"), "m", Demand(1, asked)).total() == len(whole)


def test_the_seat_of_one_that_goes_is_the_next_ones() -> None:
    queues = ReadyQueues(2)
    for number, episode in enumerate("abcd"):
        queues.sit("m", T, episode, number)
    queues.of("m").leave("b")
    queues.forget("m", "b")
    for episode in "cda":
        add(queues, episode)
    queues.sit("m", T, "e", 4)
    assert names(choose(queues, Demand(1, 2), "m")) == ["cd"]
    assert choose(queues, Demand(2, 2), "m") is None
    add(queues, "e")
    assert names(choose(queues, Demand(2, 2), "m")) == ["cd", "ae"]


def test_who_is_named_late_sits_before_those_that_opened_after_it() -> None:
    queues = ReadyQueues(2)
    for number, episode in enumerate("bcdefg", 1):
        queues.sit("m", T, episode, number)
    add(queues, "c"), queues.of("m").late("e")
    queues.sit("m", T, "a", 0)
    groups = queues.of("m").groups
    assert [groups[number].members for number in sorted(groups)] == [
        {"b": "open", "a": "open"}, {"d": "open", "e": "late"}, {"f": "open", "c": "ready"}, {"g": "open"},
    ]  # fmt: skip
    queues.of("m").leave("b"), queues.forget("m", "b")
    queues.sit("m", T, "x", 1)
    assert sorted(groups[0].members) == ["a", "x"]


def test_what_is_left_while_nothing_is_open_is_put_together() -> None:
    queues = ReadyQueues(2)
    for number, episode in enumerate("abcd"):
        queues.sit("m", T, episode, number)
    queues.of("m").leave("a"), queues.of("m").leave("c")
    add(queues, "b")
    assert (queues.complete, queues.waiting) == (0, 1)
    add(queues, "d")
    assert (queues.complete, queues.waiting) == (1, 0)
    assert names(choose(queues, Demand(1, 2), "m")) == ["bd"]


def test_what_is_no_longer_fresh_comes_last_and_the_freshest_of_it_first() -> None:
    queues = ReadyQueues(2)
    for number, version in enumerate((5, 6, 2, 7, 4, 5, 9, 9)):
        put(queues, "abcdefgh"[number], version)
    for since, order in ((0, "ab cd ef gh"), (5, "ab gh ef cd"), (9, "gh ab ef cd")):
        assert names(choose(queues, Demand(4, 2), "m", fresh=lambda _, since=since: since)) == order.split()


def test_of_several_models_the_one_with_the_freshest_groups_comes_first() -> None:
    queues = ReadyQueues(1)
    for model, version in (("m", 1), ("n", 3), ("o", 5)):
        put(queues, model, version, model=model)
    for since, first in ((0, "m"), (2, "n"), (4, "o"), (6, "o")):
        assert choose(queues, Demand(1, 1), None, fresh=lambda _, since=since: since) == (first, (("t", (first,)),))


def test_no_more_is_looked_at_than_stands_in_the_way() -> None:
    """Of the old groups as of the fresh ones: what comes later may still be rewarded."""
    queues, asked = ReadyQueues(2), list[str]()
    for episode, version in zip("abcdefgh", (0, 0, 1, 1, 4, 4, 5, 5), strict=True):
        put(queues, episode, version)

    def fits(share: tuple[str, str]) -> bool:
        asked.append(share[1])
        return share[1] != "e"

    assert names(choose(queues, Demand(1, 2), "m", fits, fresh=lambda _: 3)) == ["gh"]
    assert set(asked) == {"e", "f", "g", "h"}


def test_a_place_outlives_a_lease_and_nothing_else() -> None:
    queues = ReadyQueues(1)
    for episode in "ab":
        put(queues, episode)
    queues.of("m").leave("a", dropped=True)
    add(queues, "a")
    assert names(choose(queues, Demand(2, 1), "m")) == ["a", "b"]
    queues.of("m").leave("a")
    queues.forget("m", "a"), queues.forget("m", "never seen")
    put(queues, "a", order=9)
    assert names(choose(queues, Demand(2, 1), "m")) == ["b", "a"]


def cut() -> ReadyQueues:
    """A group was taken without one that was late."""
    queues = ReadyQueues(3)
    put(queues, "a"), put(queues, "b")
    queues.sit("m", T, "late", 2), queues.of("m").late("late")
    for episode in "ab":
        queues.of("m").leave(episode, dropped=True)
    return queues


def test_who_is_late_is_compared_with_its_group_if_nobody_opens_any_more() -> None:
    queues = cut()
    add(queues, "late")
    assert queues.of("m").compared(["late"]) == ("a", "b")
    assert choose(queues, Demand(1, 3), "m") is None
    assert choose(queues, Demand(1, 3, early=True, least=4), "m") is None
    assert choose(queues, Demand(1, 3, early=True, least=3), "m") == ("m", (("t", ("late",)),))


def test_who_is_late_sits_down_with_those_that_open_now() -> None:
    queues = cut()
    for number, episode in enumerate("cd", 3):
        queues.sit("m", T, episode, number)
    add(queues, "late")
    for episode in "cd":
        add(queues, episode)
    assert choose(queues, Demand(1, 3), "m") == ("m", (("t", ("late", "c", "d")),))
    assert queues.of("m").compared(["late", "c", "d"]) == ()


def test_the_seats_of_those_with_whom_the_rest_is_compared_are_kept() -> None:
    queues = cut()
    add(queues, "late")
    put(queues, "c"), put(queues, "d")
    assert queues.of("m").compared(["late"]) == ("a", "b")
    for episode in "ab":
        add(queues, episode)
    group = queues.of("m").groups[0]
    assert (group.free, group.earlier) == (0, [])
    assert choose(queues, Demand(1, 3), "m") == ("m", (("t", ("a", "b", "late")),))


def test_a_new_run_compares_nothing_with_another_runs() -> None:
    queues = cut()
    add(queues, "late")
    assert queues.needed() == {"a", "b"}
    queues.of("m").part()
    assert queues.of("m").compared(["late"]) == () and not queues.needed()


def test_groups_of_another_size_have_the_same_order() -> None:
    queues = ReadyQueues(2)
    for episode in "abc":
        put(queues, episode)
    put(queues, "d", group_key=key_of("u"))
    assert (queues.complete, queues.waiting) == (1, 1)
    queues.arrange(3, {})
    assert (queues.complete, queues.waiting) == (1, 1)
    queues.arrange(2, {"m": 1})
    assert (queues.of("m").size, queues.of("n").size) == (1, 2)
    assert names(choose(queues, Demand(4, 1), "m")) == ["a", "b", "c", "d"]


def test_a_free_seat_stays_between_those_that_it_is_between() -> None:
    seats = {name: Seat(0, number) for number, name in enumerate("abcd")}
    groups = [Group(T, 0, 4, {"a": "open", "b": "open"}, ["x"]), Group(T, 1, 3, {"c": "open", "d": LATE})]
    assert [[*one.members] for one in dealt(groups, 2, seats, 7)] == [["a", "b"], ["c"], ["d"]]
    assert [one.earlier for one in dealt(groups, 4, seats, 7)] == [["x"], []]
    assert [one.number for one in dealt(groups, 2, seats, 7)] == [7, 8, 9]


def test_a_look_that_finds_too_few_groups_goes_through_none() -> None:
    queues = ReadyQueues(8)
    for number in range(70):
        put(queues, str(number), 5, group_key=key_of(f"t{number // 7}"))
    queue = queues.of("m")
    with mock.patch.object(queue, "groups", None), mock.patch.object(queue, "seatings", None):
        assert choose(queues, Demand(1, 8), "m") is None
        assert choose(queues, Demand(1, 8), None) is None
        assert choose(queues, Demand(11, 7), "m") is None
        assert choose(queues, Demand(1, 1), "n") is None
        assert queue.older(5) == queues.of("n").older(9) == []
        assert (queues.complete, queues.waiting) == (0, 10)
    assert choose(queues, Demand(10, 7), None) is not None


def test_groups_that_are_whole_but_for_what_is_unusable_are_not_chosen() -> None:
    queues = ReadyQueues(2)
    put(queues, "a"), put(queues, "b")
    assert choose(queues, Demand(1, 2), "m", lambda share: share != ("m", "a")) is None
    assert names(choose(queues, Demand(1, 2), "m")) == ["ab"]
    assert names(choose(queues, Demand(1, 2, early=True), "m", out={("m", "a")})) == ["b"]


def test_groups_that_teach_nothing_are_left_where_they_are() -> None:
    """In the order of readiness, and where the freshest come first."""
    queues = ReadyQueues(2)
    for number, episode in enumerate("abcdef"):
        put(queues, episode, number)
    for fresh in (None, lambda _: 9):
        only = ("m", ("c", "d"))
        chosen = choose(queues, Demand(1, 2), "m", teaches=lambda *group: group == only, fresh=fresh)  # noqa: B023
        assert chosen == ("m", (("t", ("c", "d")),))
        assert choose(queues, Demand(1, 2), "m", teaches=lambda model, names: False, fresh=fresh) is None


def test_a_group_that_nobody_is_in_is_not_touched() -> None:
    queues = ReadyQueues(2)
    put(queues, "a")
    assert dict(queues.of("m").touched({"a"}))
    queues.of("m").leave("a")
    assert queues.of("m").touched({"a"}) == {}
