"""The mix and the pace of each of several models: one trainer's never hold up what others learn from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import LanesLacking
from ajet_sdk.errors import Conflict
from ajet_sdk.routes import Lease
from tests.kit.ledger_rig import LedgerRig, of_two, picture
from tests.kit.refused import refused

BOTH = {"plans": "m", "codes": "n"}


def counts(rig: LedgerRig, lane: str = "default") -> list[int]:
    return [rig.state.mixes.table[model].counts.of(lane) for model in ("m", "n")]


def test_each_model_has_a_mix_of_its_own_and_the_first_that_of_before(rig: LedgerRig) -> None:
    rig.announce("m", 1)
    rig.mix(shares={"a": 1.0}, ahead=4)
    rig.announce("n", 1)
    assert (rig.mix(model="m", group_size=3), rig.mix(model="m", group_size=3), rig.mix(model="n")) == (1, 0, 0)
    rig.mix(model="n", shares={"b": 1.0})
    shown = [views.mix(rig.state, model) for model in ("m", "n", "o")]
    assert [(one["shares"], one["ahead"], one["group_size"]) for one in shown] == [
        ({"a": 1.0}, 4, 3), ({"b": 1.0}, 0, 2), ({}, 0, 2),
    ]  # fmt: skip
    rig.run(rig.commands.leases.drop_mix("n", at=rig.at))
    assert rig.commands.leases.drop_mix("n", at=rig.at) == ()
    assert (views.mix(rig.state, "n")["shares"], views.mix(rig.state, "m")["shares"]) == ({}, {"a": 1.0})


def test_who_names_no_model_means_the_only_one_or_is_told_to(rig: LedgerRig) -> None:
    rig.announce("m", 1)
    rig.mix(model="m", ahead=2)
    rig.mix(shares={"a": 1.0})
    assert [views.mix(rig.state, model)["shares"] for model in ("m", None, "n")] == [{"a": 1.0}, {"a": 1.0}, {}]
    rig.announce("n", 1)
    for ask in (
        lambda: rig.mix(ahead=1), lambda: rig.commands.leases.drop_mix(at=rig.at), lambda: views.mix(rig.state)
    ):
        with refused(Conflict, "several_models"):
            ask()


def test_a_team_is_held_once_each_of_its_models_has_as_much_as_it_may() -> None:
    rig = of_two()
    rig.mix(model="m", ahead=1)
    rig.mix(model="n", ahead=2)
    for _ in range(2):
        rig.open(task="t", members=BOTH)
    assert (rig.full(model="m"), rig.full(members=BOTH), rig.full(model="n"), rig.full()) == (
        True, False, False, False,
    )  # fmt: skip
    assert views.wanted(rig.state) == {"lanes": {"default": 2}, "other": 4}
    rig.open(task="t", model="n")
    rig.open(task="t", model="n")
    assert rig.full(model="n") and rig.full(members=BOTH) and rig.full()
    assert not rig.full(members=BOTH, eval=True)
    assert views.wanted(rig.state) == {"lanes": {"default": 0}, "other": 4}
    rig.mix(model="n", ahead=0)
    assert (views.wanted(rig.state), rig.full(model="n"), rig.full(members=BOTH)) == ({}, False, False)
    assert rig.full(model="m")


def test_what_one_has_trained_does_not_count_against_it_while_the_others_share_waits() -> None:
    rig = of_two()
    for model in ("m", "n"):
        rig.mix(model=model, ahead=1)
    rig.ready(members=BOTH), rig.ready(members=BOTH)
    assert rig.full(members=BOTH)
    batch = rig.lease(model="n")
    assert batch is not None and counts(rig) == [2, 0]
    rig.nack(batch)
    assert counts(rig) == [2, 2]
    rig.ack(rig.batch(model="n"))
    assert (counts(rig), rig.full(members=BOTH), rig.full(model="n"), rig.full(model="m")) == (
        [2, 0], False, False, True,
    )  # fmt: skip
    assert [(row["lane"], row["ready"]) for row in views.overview(rig.state, rig.at)["lanes"]] == [("default", 2)]
    rig.ready(model="n")
    assert [(row["model"], row["ready"]) for row in views.overview(rig.state, rig.at)["lanes"]] == [("m", 2), ("n", 1)]


def test_a_member_that_nobody_trains_is_waited_for_by_nobody(rig: LedgerRig) -> None:
    rig.announce("m", 1)
    rig.mix(model="m", ahead=1)
    for _ in range(2):
        rig.open(task="t", members={"student": "m", "teacher": "judge"})
    assert rig.full(members={"student": "m", "teacher": "judge"})
    assert not rig.full(members={"teacher": "judge"})


def test_whose_an_episode_is_follows_from_its_first_call_where_nothing_was_said() -> None:
    rig = of_two()
    for model in ("m", "n"):
        rig.mix(model=model, ahead=1)
    episode, evaluation = rig.open(task="t"), rig.open(task="t", eval=True)
    assert counts(rig) == [1, 1]
    for name in (episode, evaluation):
        rig.begin(name, model="n")
    assert counts(rig) == [0, 1]
    rig.begin(episode, model="m")
    assert counts(rig) == [0, 1]


def test_an_episode_of_the_only_model_is_anothers_once_it_calls_that(rig: LedgerRig) -> None:
    rig.announce("m", 1)
    rig.mix(model="m", ahead=1, group_size=1)
    episode = rig.open(task="t")
    assert rig.full()
    rig.begin(episode, model="n")
    assert not rig.full()


def test_what_no_announced_model_learns_is_counted_apart(rig: LedgerRig) -> None:
    rig.open(task="t"), rig.open(task="t", model="n"), rig.ready(model="o")
    rig.mix(ahead=2)
    for model, playing in ((None, [2]), ("m", [1, 1]), ("n", [1, 0, 1])):
        if model is not None:
            rig.announce(model, 1)
        known = [rig.state.mixes.table[name].counts for name in ("", "m", "n")[: len(playing)]]
        assert [counts.playing["default"] for counts in known] == playing
    assert [rig.state.mixes.table[model].mix.ahead for model in ("", "m", "n")] == [None, 2, None]


def test_groups_are_counted_anew_by_the_sizes_that_hold() -> None:
    rig = of_two()
    rig.mix(model="m", ahead=1, group_size=3)
    rig.mix(model="n", ahead=1)
    rig.state.derive()
    assert [rig.state.mixes.table[model].counts.size for model in ("m", "n")] == [3, 2]


def test_each_models_turns_follow_its_own_shares() -> None:
    rig = of_two()
    rig.mix(model="m", shares={"a": 1.0, "b": 0.0}, lane_wait_s=0.0)
    rig.mix(model="n", shares={"a": 0.0, "b": 1.0}, lane_wait_s=0.0)
    for task in ("a/1", "b/1"):
        for model in ("m", "n"):
            rig.ready(task, model=model)
    for model, task in (("m", "a/1"), ("n", "b/1")):
        batch = rig.batch(model=model, group_size=1)
        assert [group for group, _ in rig.state.batches[batch].groups] == [task]
    rig.mix(model="m", shares={"a": 0.5, "b": 0.5})
    assert [bool(rig.state.mixes.of(model).credit.leased) for model in ("m", "n")] == [False, True]


def test_a_lane_lends_by_what_was_ready_of_this_model() -> None:
    rig = of_two()
    for model in ("m", "n"):
        rig.mix(model=model, shares={"a": 0.5, "b": 0.5}, lane_wait_s=30.0)
    for task in ("a/1", "a/2"):
        rig.ready(task, model="m")
    assert rig.lease(model="m", groups=2, group_size=1) is None
    rig.at += 29.0
    rig.ready("b/1", model="n")
    assert rig.commands.leases.next_end(Lease(model="m"), at=rig.at) == 1.0
    assert rig.commands.leases.next_end(Lease(), at=rig.at) == 1.0
    rig.at += 1.0
    assert rig.lease(model="m", groups=2, group_size=1) is not None
    rig.restart()
    assert (rig.state.mixes.table["m"].since, rig.state.mixes.of("m").credit.ready_at) == (rig.at, {})


def test_who_is_held_at_another_models_gate_holds_up_nobody_for_long() -> None:
    rig = of_two()
    for model in ("m", "n"):
        rig.mix(model=model, ahead=1, shares={"default": 0.5, "x": 0.5})
    episodes = [rig.open(task="t", members=BOTH) for _ in range(2)]
    for episode in episodes:
        rig.begin(episode, model="n", agent="codes")
    rig.gate_close("n")
    rig.at += 60.0
    assert rig.lacking(model="n") == []
    assert (rig.lacking(model="m"), rig.lacking(model="m")) == ([("m", ("default",))], [])
    assert (rig.full(model="m"), rig.full(model="n")) == (False, True)
    assert rig.commands.leases.next_end(Lease(model="m", group_wait_s=7.0), at=rig.at) == 7.0
    rig.restart()
    assert not rig.full(model="m")
    train_of = rig.ready(model="m"), rig.ready(model="m")
    assert rig.lease(model="m") is not None and not rig.full(model="m") and train_of


def test_who_leases_of_any_model_waits_for_the_lanes_of_each() -> None:
    rig = of_two()
    for model in ("m", "n"):
        rig.mix(model=model, ahead=1)
        rig.open(task="t", model=model), rig.open(task="t", model=model)
    rig.at += 60.0
    assert rig.lacking() == [("m", ("default",)), ("n", ("default",))]


PLAYS = st.lists(
    st.tuples(st.sampled_from(["open", "ready", "team", "lease", "ack"]), st.sampled_from("mn")), max_size=25
)


def rooms(steps: Sequence[tuple[str, str]], others: bool) -> list[bool]:
    """Tell whether an episode of `m` alone would be held after each step; without what only concerns `n`, unless
    `others` act too."""
    rig, seen = of_two(watch=others), list[bool]()
    for model in ("m", "n"):
        rig.mix(model=model, ahead=2)
    for what, model in steps:
        if others or model == "m" or what == "team":
            held = [name for name, batch in rig.state.batches.leased.items() if batch.model == model]
            if what == "open":
                rig.open(task="t", model=model)
            elif what == "ready":
                rig.ready(model=model)
            elif what == "team":
                rig.ready(members=BOTH)
            elif what == "lease":
                rig.lease(model=model)
            elif held:
                rig.ack(held[0])
        seen.append(rig.full(model="m"))
    if others:
        before, again = picture(rig.state), LedgerRig()
        again.run(rig.events)
        assert picture(again.state) == before
        rig.state.derive()
        assert picture(rig.state) == before
    return seen


@settings(max_examples=60, deadline=None)
@given(PLAYS)
def test_the_pace_of_a_model_is_held_up_by_nothing_that_others_do(steps: Sequence[tuple[str, str]]) -> None:
    assert rooms(steps, others=True) == rooms(steps, others=False)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_trainer_that_never_comes_holds_up_nobody_elses(data: st.DataObject) -> None:
    """Agents play as teams and alone, whatever there is room for. Who asks is served, and no lane has to be opened that
    a trainer has waited for in vain."""
    rig = of_two(watch=False)
    ahead, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    shares = data.draw(st.sampled_from([None, {"a": 0.5, "b": 0.5}, {"a": 0.75, "b": 0.25}]))
    rig.mix(model="m", ahead=ahead, group_size=size, shares=shares)
    rig.mix(model="n", ahead=data.draw(st.integers(1, 4)), group_size=data.draw(st.integers(1, 3)), shares=shares)
    chance = random.Random(data.draw(st.integers(0, 99)))
    kinds: list[dict[str, Any]] = data.draw(
        st.lists(st.sampled_from([{"members": BOTH}, {"model": "m"}, {"model": "n"}, {}]), min_size=1, max_size=4)
        .filter(lambda some: some != [{"model": "n"}] * len(some))
    )  # fmt: skip
    task = dict.fromkeys("ab", 0)

    def play() -> None:
        while kind := [(one, lane) for one in kinds for lane in "ab" if not rig.full(task=f"{lane}/t", **one)]:
            body, lane = kind[chance.randrange(len(kind))]
            task[lane] += 1
            episode = rig.open(task=f"{lane}/{task[lane] // 6}", **body)
            models = BOTH.items() if "members" in body else [("", body.get("model", "mn"[chance.randrange(2)]))]
            for agent, model in models:
                rig.call(episode, model=model, agent=agent)
            rig.reward(episode, chance.random())

    for _ in range(6):
        play()
        batch = rig.id("batch")
        asked = Lease(groups=1, group_size=size, model="m", min_group_size=1, group_wait_s=0.0)
        events = rig.run(rig.commands.leases.lease(asked, batch=batch, at=rig.at))
        assert batch in rig.state.batches and not any(isinstance(event, LanesLacking) for event in events)
        if chance.random() < 0.8:
            rig.ack(batch)
        rig.at += 1.0


def test_which_models_an_episode_may_train_by_what_was_said_of_it(rig: LedgerRig) -> None:
    named, team_of, said = rig.open(model="m"), rig.open(members=BOTH), rig.open()
    nobody, evaluation = rig.open(), rig.open(eval=True)
    rig.begin(said, model="n"), rig.begin(named, model="n")
    known = [rig.state.episodes[name].named_to_train() for name in (named, team_of, said, nobody, evaluation)]
    assert known == [("m",), ("m", "n"), ("n",), (), ()]
    assert known == [rig.state.episodes[name].may_train for name in (named, team_of, said, nobody, evaluation)]
    rig.mix(model="m", ahead=1)
    assert [rig.state.mixes.table[name].counts.playing for name in ("m", "")] == [{"default": 2}, {"default": 3}]


def test_a_call_to_a_teacher_says_nothing_of_what_an_episode_trains(rig: LedgerRig) -> None:
    for model in ("m", "n"):
        rig.announce(model, 1)
        rig.mix(model=model, ahead=1)
    taught, all_teach = rig.open(teachers={"tutor": "n"}), rig.open(teachers={"tutor": "n", "other": "m"})
    assert (rig.state.episodes[taught].may_train, rig.state.episodes[all_teach].may_train) == (("m",), ())
    rig.announce("o", 1)
    later = rig.open(teachers={"tutor": "n"})
    assert rig.state.episodes[later].may_train == ("m", "o")
    for model, may_train in (("n", ("m", "o")), ("o", ("o",)), ("m", ("o",))):
        rig.begin(later, model=model)
        assert rig.state.episodes[later].may_train == may_train
    playing = {name: dict(known.counts.playing) for name, known in rig.state.mixes.table.items()}
    assert playing == {"m": {"default": 1}, "n": {}, "o": {"default": 1}, "": {"default": 1}}


def test_agents_may_be_held_by_the_mix_of_a_model_alone() -> None:
    rig = of_two()
    assert not rig.state.mixes.paced()
    rig.mix(model="m", ahead=1)
    assert rig.state.mixes.paced()


def test_who_waits_for_any_model_opens_the_lanes_that_each_waits_for() -> None:
    rig = of_two()
    for model in ("m", "n"):
        rig.mix(model=model, ahead=2, shares={"a": 0.5, "b": 0.5})
        rig.ready("a/1", model=model), rig.ready("a/1", model=model)
    assert rig.lacking(groups=4) == []
    rig.ready("b/1", model="n"), rig.ready("b/1", model="n")
    assert rig.lacking(groups=4) == [("n", ("a",))]
