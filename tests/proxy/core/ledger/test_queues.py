"""Queues of ready episodes against a list that is sorted anew each time."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.pots import Pot
from ajet_proxy.core.ledger.queues import Demand, LeasedBatch, ReadyQueues

T = Pot.of_task("t")
Share = tuple[str, str, str]
"""Model, task, episode."""


def put(queues: ReadyQueues, share: Share, version: int) -> None:
    model, task, episode = share
    queues.add(model, Pot.of_task(task), episode, version)


def slow_choice(
    ready: list[Share], groups: int, size: int, model: str | None, unusable: set[str], since: int = 0
) -> tuple[str, list[tuple[str, list[str]]]] | None:
    """`ready` stands in the order of first readiness. Groups with a version older than `since` come last, the freshest
    of them first."""
    best: dict[str, list[tuple[int, int, str, list[str]]]] = {}
    for name, task in sorted({(name, task) for name, task, _ in ready}):
        mine = [(at, e) for at, (m, t, e) in enumerate(ready) if (m, t) == (name, task) and e not in unusable]
        while len(mine) >= size and model in (None, name):
            group, mine = mine[:size], mine[size:]
            late = max(0, *(since - oldest((name, task, episode)) for _, episode in group))
            best.setdefault(name, []).append((late, group[-1][0], task, [episode for _, episode in group]))
    whole = [(sorted(found)[:groups], name) for name, found in best.items() if len(found) >= groups]
    if not whole:
        return None
    found, name = min(whole, key=lambda item: item[0][-1][:2])
    return name, [(task, episodes) for _, _, task, episodes in found]


shares = st.lists(
    st.tuples(st.sampled_from(["m", "n"]), st.sampled_from(["s", "t"]), st.integers(0, 30).map(str)),
    max_size=14, unique_by=lambda share: (share[0], share[2]),
)


def oldest(share: Share) -> int:
    """A version for a share."""
    return int(share[2]) % 5


@given(
    shares, st.lists(st.booleans(), min_size=14, max_size=14), st.randoms(use_true_random=False), st.integers(1, 3),
    st.integers(1, 3), st.sampled_from([None, "m", "n"]), st.sets(st.integers(0, 30).map(str), max_size=3),
)
def test_the_groups_that_were_complete_first(
    order: list[Share], away: list[bool], dice: object, groups: int, size: int, model: str | None, unusable: set[str]
) -> None:
    queues = ReadyQueues(group_size=2)
    for share in order:
        put(queues, share, oldest(share))
    gone = [share for share, is_away in zip(order, away, strict=False) if is_away]
    for share in gone:
        queues.remove(share[0], Pot.of_task(share[1]), share[2])
    ready = [share for share in order if share not in gone]
    back = gone[: len(gone) // 2]
    dice.shuffle(back)  # type: ignore[attr-defined]
    for share in back:
        put(queues, share, oldest(share))
    ready = [share for share in order if share in ready or share in back]

    chosen = queues.choose(Demand(groups, size), model, lambda share: share[1] not in unusable)
    expected = slow_choice(ready, groups, size, model, unusable)
    if expected is None:
        assert chosen is None
    else:
        assert chosen == (expected[0], tuple((task, tuple(episodes)) for task, episodes in expected[1]))
    assert sorted(queues.ready()) == sorted((m, e) for m, _, e in ready)
    assert sorted(queues.models()) == sorted({m for m, _, _ in ready})
    for name in "mn":
        old = sorted((oldest(share), share[2]) for share in ready if share[0] == name and oldest(share) < 3)
        assert queues.older(name, 3) == [episode for _, episode in old]
    lengths = [sum((m, t) == key for m, t, _ in ready) for key in {(m, t) for m, t, _ in ready}]
    assert queues.complete == sum(length // 2 for length in lengths)
    assert queues.waiting == sum(length == 1 for length in lengths)


@given(
    shares, st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, "m", "n"]), st.integers(0, 6),
    st.sets(st.integers(0, 30).map(str), max_size=4), st.sets(st.integers(0, 30).map(str), max_size=4), st.booleans(),
)
def test_what_is_no_longer_fresh_comes_last_and_the_freshest_of_it_first(
    order: list[Share], groups: int, size: int, model: str | None, since: int, out: set[str], misfits: set[str],
    restored: bool,
) -> None:
    """As by the slow choice, without what is out and what was found in the way; also after a start from a snapshot."""
    queues, refused = ReadyQueues(group_size=2), set[str]()
    for share in order:
        put(queues, share, oldest(share))
    if restored:
        queues.regroup(2)

    def fits(share: tuple[str, str]) -> bool:
        assert share[1] not in out
        refused.update({share[1]} & misfits)
        return share[1] not in misfits

    gone = {(name, episode) for name in "mn" for episode in out}
    chosen = queues.choose(Demand(groups, size), model, fits, out=gone, fresh=lambda name: since + (name == "n"))
    by_model = {name: slow_choice(order, groups, size, name, out | refused, since + (name == "n")) for name in "mn"}
    found = {name: choice for name, choice in by_model.items() if choice is not None and model in (None, name)}
    assert (chosen is None) == (not found)
    if chosen is not None:
        name, taken = chosen
        assert found[name] == (name, [(task, list(episodes)) for task, episodes in taken])


def test_of_several_models_the_one_with_the_freshest_groups_comes_first() -> None:
    queues = ReadyQueues(group_size=1)
    for model, version in (("m", 1), ("n", 3), ("o", 5)):
        queues.add(model, T, model, version)
    for since, first in ((0, "m"), (2, "n"), (4, "o"), (6, "o")):
        assert queues.choose(Demand(1, 1), None, fresh=lambda _, since=since: since) == (first, (("t", (first,)),))


def test_no_more_is_looked_at_than_stands_in_the_way() -> None:
    """Of the old groups as of the fresh ones: what comes later may still be rewarded."""
    queues, asked = ReadyQueues(group_size=2), list[str]()
    for episode, version in zip("abcdefgh", (0, 0, 1, 1, 4, 4, 5, 5), strict=True):
        queues.add("m", T, episode, version)

    def fits(share: tuple[str, str]) -> bool:
        asked.append(share[1])
        return share[1] != "e"

    assert queues.choose(Demand(1, 2), "m", fits, fresh=lambda _: 3) == ("m", (("t", ("f", "g")),))
    assert set(asked) == {"e", "f", "g", "h"}
    asked.clear()
    assert queues.choose(Demand(2, 2), "m", fits, out={("m", "e"), ("m", "f")}, fresh=lambda _: 3) == (
        "m", (("t", ("g", "h")), ("t", ("c", "d"))),
    )  # fmt: skip
    assert asked == ["g", "h", "c", "d"]


def test_an_episode_that_is_forgotten_has_no_old_place() -> None:
    queues = ReadyQueues(group_size=1)
    for episode in ("a", "b"):
        queues.add("m", T, episode, 0)
    queues.remove("m", T, "a")
    queues.forget("m", "a")
    queues.forget("m", "never seen")
    queues.add("m", T, "a", 0)
    assert queues.choose(Demand(2, 1), "m") == ("m", (("t", ("b",)), ("t", ("a",))))


def test_a_batch_lists_its_episodes() -> None:
    batch = LeasedBatch("b", "m", 0.0, 1, (("t", ("x", "y")), ("u", ("z",))))
    assert list(batch.episodes()) == ["x", "y", "z"]
    assert batch.state == "leased"


def test_groups_are_counted_again_by_another_size() -> None:
    queues = ReadyQueues(2)
    for episode in "abc":
        queues.add("m", T, episode, 0)
    queues.add("m", Pot.of_task("u"), "d", 0)
    assert (queues.complete, queues.waiting) == (1, 1)
    queues.regroup(3)
    assert (queues.group_size, queues.complete, queues.waiting) == (3, 1, 1)
    queues.regroup(1)
    assert (queues.complete, queues.waiting) == (4, 0)


def test_a_look_that_finds_too_few_groups_goes_through_no_queue() -> None:
    queues = ReadyQueues(group_size=8)
    for number in range(70):
        queues.add("m", Pot.of_task(f"t{number // 7}"), str(number), 5)
    before = queues.changes
    with mock.patch.object(queues, "_queues", None):
        assert queues.choose(Demand(1, 8), "m") is None
        assert queues.choose(Demand(11, 7), None) is None
        assert queues.choose(Demand(1, 1), "n") is None
        assert queues.older("m", 5) == queues.older("n", 9) == []
        assert (queues.complete, queues.waiting) == (0, 10)
    assert queues.changes == before
    assert queues.choose(Demand(10, 7), None) is not None


def test_groups_that_are_whole_but_for_what_is_unusable_are_not_chosen() -> None:
    queues = ReadyQueues(group_size=2)
    for episode in "ab":
        queues.add("m", T, episode, 0)
    assert queues.choose(Demand(1, 2), "m", lambda share: share != ("m", "a")) is None
    assert queues.choose(Demand(1, 2), "m") == ("m", (("t", ("a", "b")),))


def test_groups_that_teach_nothing_are_left_where_they_are() -> None:
    """In the order of readiness, and where the freshest come first."""
    queues = ReadyQueues(2)
    for number, episode in enumerate("abcdef"):
        queues.add("m", T, episode, number)
    for fresh in (None, lambda _: 9):
        only = ("m", ("c", "d"))
        chosen = queues.choose(Demand(1, 2), "m", teaches=lambda *group: group == only, fresh=fresh)  # noqa: B023
        assert chosen == ("m", (("t", ("c", "d")),))
        assert queues.choose(Demand(1, 2), "m", teaches=lambda model, names: False, fresh=fresh) is None
