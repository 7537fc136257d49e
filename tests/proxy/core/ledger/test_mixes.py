"""The mix in the ledger: what leases take of the lanes, who is waited for, and how far ahead a lane may be played."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.commands import paced
from ajet_proxy.core.ledger.mix import QueueCredit
from ajet_sdk.routes import Lease, OpenEpisode
from tests.kit.ledger_rig import LedgerRig, check


def ready(rig: LedgerRig, lane: str, groups: int) -> None:
    for number in range(groups):
        for _ in range(2):
            rig.ready(f"{lane}/{number}")


def leased(rig: LedgerRig, groups: int = 1, **asked: Any) -> str:
    """The first letters of the lanes of the groups of a lease."""
    batch = rig.lease(groups=groups, **asked)
    return "" if batch is None else "".join(task[0] for task, _ in rig.state.batches[batch].groups)


def test_leases_take_lanes_by_their_shares_whatever_was_complete_first(rig: LedgerRig) -> None:
    rig.mix({"math": 0.25, "code": 0.75})
    ready(rig, "math", 5)
    ready(rig, "code", 9)
    assert leased(rig, 4) + leased(rig, 1) + leased(rig, 3) == "ccmc" + "c" + "cmc"
    assert views.mix(rig.state)["lanes"] == {
        "math": {"share": 0.25, "leased": 2, "owed": 0, "open": 0, "ready": 6},
        "code": {"share": 0.75, "leased": 6, "owed": 0, "open": 0, "ready": 6},
    }


def test_a_batch_tells_the_lane_of_each_group(rig: LedgerRig) -> None:
    for task in ("math/1", "plain", "code/1"):
        for _ in range(2):
            rig.ready(task)
    batch = rig.batch(groups=3)
    lanes = {group.task: group.lane for group in views.batch(rig.state, batch).groups}
    assert lanes == {"math/1": "math", "plain": "default", "code/1": "code"}


def test_a_lane_is_waited_for_and_then_lends_its_turns(rig: LedgerRig) -> None:
    rig.mix({"math": 0.5, "code": 0.5}, lane_wait_s=30.0)
    ready(rig, "math", 9)
    assert (leased(rig, 2), leased(rig, 1)) == ("", "")
    assert rig.commands.leases.next_end(Lease(), at=rig.at) == 30.0
    rig.at += 29.0
    assert leased(rig, 2) == ""
    rig.at += 1.0
    assert leased(rig, 4) == "mmmm"
    ready(rig, "code", 4)
    assert leased(rig, 4) == "cccc"
    assert views.mix(rig.state)["lanes"]["code"]["owed"] == 0


def test_a_lane_without_a_share_is_not_leased_until_shares_are_dropped(rig: LedgerRig) -> None:
    rig.mix({"math": 1.0, "code": 0.0}, lane_wait_s=0.0)
    ready(rig, "code", 2)
    ready(rig, "terminal", 1)
    assert leased(rig) == ""
    ready(rig, "math", 1)
    assert leased(rig) == "m"
    assert len(rig.run(rig.commands.leases.drop_mix(at=rig.at))) == 1
    assert rig.run(rig.commands.leases.drop_mix(at=rig.at)) == ()
    assert leased(rig, 3) == "cct"


def test_what_is_set_stays_and_what_is_the_same_changes_nothing(rig: LedgerRig) -> None:
    assert rig.mix({"math": 0.5, "code": 0.5}, ahead=2, group_size=3, lane_wait_s=5.0) == 1
    assert rig.mix({"code": 0.5, "math": 0.5}) == rig.mix(ahead=2) == rig.mix() == 0
    ready(rig, "math", 2)
    ready(rig, "code", 2)
    assert len(leased(rig, 1)) == 1
    before = rig.state.mixes.of("").credit
    assert rig.mix(ahead=0) == 1
    assert rig.state.mixes.of("").credit is before
    assert rig.mix({"math": 1.0}) == 1
    assert rig.state.mixes.of("").credit == QueueCredit()
    assert rig.mix(group_size=0) == 1
    assert views.mix(rig.state)["group_size"] == 2
    assert rig.mix(group_size=3) == 1
    shown = views.mix(rig.state)
    del shown["lanes"]
    assert shown == {"shares": {"math": 1.0}, "ahead": 0, "group_size": 3, "lane_wait_s": 5.0}


def test_the_freshest_of_a_lane_comes_first(rig: LedgerRig) -> None:
    rig.mix({"a": 0.5, "b": 0.5})
    rig.announce("m", 9)
    for task, version in (("a/1", 6), ("a/2", 9), ("b/1", 6), ("b/2", 8)):
        for _ in range(2):
            rig.ready(task, version=version)
    batch = rig.batch(groups=4, max_staleness=4)
    assert [task for task, _ in rig.state.batches[batch].groups] == ["a/2", "b/2", "a/1", "b/1"]


def test_what_does_not_fit_is_formed_anew_in_its_lane(rig: LedgerRig) -> None:
    """An episode without a reward of its own stands in the way, where the freshest come first."""
    rig.mix({"a": 0.5, "b": 0.5})
    rig.announce("m", 9)
    late = rig.ready("a/1", version=5)
    odd = rig.open(task="a/1")
    rig.call(odd, agent="x")
    rig.reward(odd, agent="y")
    pair = [rig.ready("a/1"), rig.ready("b/1"), rig.ready("b/1")]
    batch = rig.batch(groups=2, max_staleness=6)
    assert rig.state.batches[batch].groups == (("a/1", (late, pair[0])), ("b/1", (pair[1], pair[2])))
    assert rig.state_of(odd) == "discarded"


def wanted(rig: LedgerRig) -> dict[str, Any]:
    return views.wanted(rig.state)


def test_without_a_pace_any_number_is_wanted(rig: LedgerRig) -> None:
    assert wanted(rig) == {}
    assert not rig.full("math/1")


def test_a_lane_is_full_when_so_many_are_open_or_ready(rig: LedgerRig) -> None:
    rig.mix(ahead=2)
    assert wanted(rig) == {"lanes": {}, "other": 4}
    assert paced(rig.state, ()) is None
    first = rig.open(task="math/1")
    rig.ready("math/1"), rig.ready("code/1"), rig.open(task="code/1")
    assert wanted(rig) == {"lanes": {"code": 2, "math": 2}, "other": 4}
    rig.open(task="math/2"), rig.open(task="math/2")
    assert wanted(rig)["lanes"]["math"] == 0
    assert rig.full("math/9")
    assert not rig.full("math/9", eval=True)
    assert not rig.full(None)
    rig.abort(first)
    assert not rig.full("math/9")


def test_the_lane_of_a_client_is_that_of_its_episodes(rig: LedgerRig) -> None:
    rig.mix(ahead=1)
    rig.ready("math/1"), rig.ready("math/1")
    assert rig.full("x", client=rig.join(lane="math"))
    assert not rig.full("x")


def test_an_opening_whose_answer_was_lost_needs_no_room_and_neither_does_a_trial(rig: LedgerRig) -> None:
    """It may be the very one that its lane is full of."""
    rig.mix(ahead=1, group_size=1)
    assert not rig.full("math/1", id="mine")
    rig.open("mine", task="math/1", id="mine")
    assert not rig.full("math/1", id="mine") and rig.full("math/1", id="other")
    assert not rig.full("math/1", trial=True)


def test_what_is_left_of_a_task_keeps_nobody_out(rig: LedgerRig) -> None:
    """Or the lane would be full of tasks that each lack an episode."""
    rig.mix(ahead=1)
    rig.ready("math/1"), rig.ready("math/2")
    assert wanted(rig)["lanes"]["math"] == 2
    lacking = rig.open(task="math/1")
    assert wanted(rig)["lanes"]["math"] == 0
    rig.abort(lacking)
    rig.ready("math/1")
    assert wanted(rig)["lanes"]["math"] == 0
    rig.mix(group_size=3)
    assert wanted(rig)["lanes"]["math"] == 3


def test_a_group_that_was_begun_lacks_episodes_until_it_is_whole(rig: LedgerRig) -> None:
    rig.mix(group_size=3)
    body = OpenEpisode(task="math/1", revision="r")
    where = paced(rig.state, rig.commands.open_episode(body, episode="new", at=rig.at, tenant=""))
    assert where is not None
    group_key, _ = where
    lacking = [rig.state.mixes.lacking(group_key)]
    for _ in range(3):
        opened = rig.open(task="math/1", revision="r")
        lacking.append(rig.state.mixes.lacking(group_key))
    assert group_key == rig.state.episodes.known(opened).group_key
    rig.ready("math/1"), rig.abort(opened)
    lacking.append(rig.state.mixes.lacking(group_key))
    assert lacking == [0, 2, 1, 0, 1]


def test_lanes_have_room_by_their_shares(rig: LedgerRig) -> None:
    rig.mix({"math": 0.75, "code": 0.25}, ahead=8, group_size=4)
    assert wanted(rig) == {"lanes": {"code": 8, "math": 24}, "other": 0}
    assert rig.full("x/1")


def test_a_lane_of_which_every_group_is_discarded_lends_its_turns() -> None:
    """However much of it becomes ready: whoever solves every task would otherwise hold up all the others."""
    rig = LedgerRig()
    rig.mix({"math": 0.5, "code": 0.5}, lane_wait_s=30.0)
    ready(rig, "math", 9)
    for _ in range(29):
        rig.ready("code/1", reward=1.0), rig.ready("code/1", reward=1.0), rig.ready("code/2")
        assert leased(rig, 2, signal=True) == ""
        rig.at += 1.0
    assert rig.commands.leases.next_end(Lease(model="m"), at=rig.at) == 1.0
    rig.at += 1.0
    for _ in range(4):
        rig.ready("math/new", reward=0.0), rig.ready("math/new", reward=1.0)
    assert leased(rig, 2, signal=True) == "mm"
    rig.ready("code/3", reward=0.0), rig.ready("code/3", reward=1.0)
    assert leased(rig, 1, signal=True) == "c"
    assert leased(rig, 1, signal=True) == "m" and leased(rig, 1, signal=True) == ""


@pytest.mark.parametrize("reason", ["aborted", "stale"])
def test_a_lane_of_which_one_is_discarded_is_waited_for_while_others_become_ready(rig: LedgerRig, reason: str) -> None:
    rig.mix({"math": 0.5, "code": 0.5}, lane_wait_s=30.0)
    first = rig.ready("code/0")
    rig.announce()
    if reason == "aborted":
        rig.abort(first)
    ready(rig, "math", 4)
    for number in range(40):
        assert leased(rig, 2, max_staleness=0) == ""
        rig.at += 1.0
        rig.ready(f"code/{number}")
    assert rig.state.tallies.discarded == {reason: 1}
    assert rig.commands.leases.next_end(Lease(model="m"), at=rig.at) == 30.0
    rig.at += 30.0
    assert leased(rig, 2, max_staleness=0) == "mm"


def test_a_restart_grants_a_lane_its_whole_wait(rig: LedgerRig) -> None:
    rig.mix({"math": 0.5, "code": 0.5}, lane_wait_s=30.0)
    ready(rig, "math", 4)
    rig.ready("code/1", reward=1.0), rig.ready("code/1", reward=1.0)
    assert leased(rig, 2, signal=True) == ""
    rig.at += 25.0
    rig.restart()
    rig.at += 29.0
    assert leased(rig, 2) == ""
    rig.at += 1.0
    assert leased(rig, 2) == "mm"


@pytest.mark.parametrize("asked", [{"groups": 3}, {"group_size": 4}, {"model": "n"}, {"groups": 5, "unit": "episodes"}])
def test_who_waits_while_nobody_plays_is_played_for(rig: LedgerRig, asked: dict[str, Any]) -> None:
    """It wants more groups, or larger ones, than may be ahead, or another model's are ready."""
    rig.mix(ahead=2)
    rig.open(task="b/1")
    ready(rig, "a", 1)
    last = rig.open(task="a/2")
    assert rig.lacking(**asked) == [] and wanted(rig)["lanes"]["a"] == 1
    rig.abort(last)
    rig.ready("a/3"), rig.ready("a/3")
    assert rig.full("a/9")
    assert rig.lacking(**asked) == [("", ("a",))] and rig.lacking(**asked) == []
    assert wanted(rig)["lanes"]["a"] == 4
    ready(rig, "a", 1)
    rig.restart()
    assert wanted(rig)["lanes"]["a"] == 2
    assert leased(rig) == "a"
    assert wanted(rig)["lanes"]["a"] == 0


def test_what_agents_have_left_behind_keeps_nobody_out_for_long(rig: LedgerRig) -> None:
    """No client shows that they are gone, and their episodes idle out much later."""
    rig.mix(ahead=1)
    left = [rig.open(task="a/1"), rig.open(task="a/1")]
    rig.at += 19.0
    asked: dict[str, Any] = {"group_wait_s": 20.0}
    assert rig.lacking(**asked) == []
    assert rig.commands.leases.next_end(Lease(group_wait_s=20.0), at=rig.at) == 20.0
    rig.at += 1.0
    (call,) = rig.begin(left[0])
    rig.open(task="a/1", eval=True)
    assert rig.lacking(**asked) == []
    rig.finish(left[0], call)
    rig.at += 20.0
    rig.gate_close()
    rig.at += 20.0
    assert rig.lacking(**asked) == []
    rig.gate_open(1)
    assert rig.lacking(**asked) == []
    rig.at += 20.0
    assert rig.lacking(**asked) == [("", ("a",))]
    rig.announce()
    for _ in range(3):
        assert rig.state.mixes.room("a") == 2
        rig.ready("a/2"), rig.ready("a/2")
        assert rig.state.mixes.room("a") == 0
        assert leased(rig) == "a"
    rig.restart()
    (call,) = rig.begin(left[0])
    assert rig.state.mixes.room("a") == 1
    rig.finish(left[0], call)
    rig.heartbeat(left[1])
    assert rig.state.mixes.room("a") == 0
    rig.at += 40.0
    assert rig.lacking(**asked) == [("m", ("a",))]
    rig.abort(left[1])
    assert rig.state.mixes.room("a") == 2


def test_who_waits_is_not_held_up_by_the_gate_of_a_model_that_is_not_played_there(rig: LedgerRig) -> None:
    """The other model's trainer may be dead, or move its gate all the time."""
    rig.announce("m"), rig.announce("n")
    rig.mix(ahead=1, model="n")
    rig.open(task="a/1", model="n"), rig.open(task="a/1", model="n")
    asked: dict[str, Any] = {"group_wait_s": 20.0, "model": "n"}
    rig.at += 20.0
    rig.gate_close("n")
    rig.at += 20.0
    assert rig.lacking(**asked) == []
    rig.gate_open(1, "n")
    rig.at += 20.0
    rig.gate_close("m")
    assert rig.lacking(**asked) == [("n", ("a",))]


def test_of_lanes_with_shares_only_those_are_played_further_that_are_waited_for(rig: LedgerRig) -> None:
    rig.mix({"a": 0.5, "b": 0.5, "c": 0.0}, ahead=2, lane_wait_s=30.0)
    ready(rig, "a", 1), ready(rig, "c", 1)
    assert rig.lacking(groups=4) == []
    ready(rig, "b", 1)
    rig.at += 29.0
    assert rig.lacking(groups=4) == [("", ("a",))]
    ready(rig, "a", 1)
    assert rig.lacking(groups=4) == [("", ("b",))]
    rig.at += 30.0
    assert rig.lacking(groups=9) == [("", ("a",))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whoever_goes_on_asking_is_served(data: st.DataObject) -> None:
    """Whatever may be ahead, however large the groups of several trainers are, and whatever is discarded: agents that
    play whenever there is room bring what each of them waits for."""
    rig = LedgerRig()
    weights = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
    whole, lanes = sum(weights), "abcd"[: len(weights)]
    shares = {lane: round(weight / whole, 9) for lane, weight in zip(lanes, weights, strict=True)}
    rig.mix(
        data.draw(st.sampled_from([None, shares])),
        ahead=data.draw(st.integers(1, 9)), group_size=data.draw(st.sampled_from([None, 1, 2, 3])), lane_wait_s=30.0,
    )  # fmt: skip
    trainers = [
        Lease(model=model, groups=data.draw(st.integers(1, 5)), group_size=data.draw(st.integers(1, 4)), min_group_size=
              data.draw(st.sampled_from([None, 1])), signal=data.draw(st.booleans()), group_wait_s=20.0)
        for model in "mn"[: data.draw(st.integers(1, 2))]
    ]  # fmt: skip
    flat = data.draw(st.sampled_from(lanes))
    known = rig.state.mixes.of("").mix.shares
    teach = {lane for lane in known or lanes if known.get(lane, 1.0)} - {flat}
    chance = random.Random(data.draw(st.integers(0, 99)))

    def play() -> None:
        for lane in lanes:
            while rig.state.mixes.room(lane):
                reward = 1.0 if lane == flat else float(chance.randrange(2))
                model = "mn"[chance.randrange(len(trainers))]
                rig.ready(f"{lane}/{chance.randrange(2)}", model=model, reward=reward)

    for trainer in trainers * 3:
        if trainer.signal and not teach:
            continue
        for _ in range(400):
            play()
            rig.at += 5.0
            while True:  # as the route looks again
                batch = rig.id("batch")
                events = rig.run(rig.commands.leases.lease(trainer, batch=batch, at=rig.at))
                if not events or batch in rig.state.batches:
                    break
            if events:
                break
        else:
            pytest.fail(f"nothing for {trainer}")


class Lanes(RuleBasedStateMachine):
    """Law: as long as every lane has a whole group, over every prefix of the leased groups each lane's number differs
    from its share of them by less than 1. What is leased is the same whatever came of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LedgerRig()
        self.rig.at = 1e6  # however often a clock goes back an hour, it stays after 1970
        self.turns: list[str] = []
        self.lacked = False
        self.heard = dict.fromkeys("abcde", self.rig.at)

    @initialize(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def shares(self, weights: list[int]) -> None:
        self.exact = {lane: Fraction(weight, sum(weights)) for lane, weight in zip("abcd", weights, strict=False)}
        self.rig.mix({lane: round(float(share), 9) for lane, share in self.exact.items()}, lane_wait_s=20.0)

    @rule(lane=st.sampled_from("abcde"), number=st.integers(1, 6))
    def plays(self, lane: str, number: int) -> None:
        for _ in range(number):
            self.rig.ready(f"{lane}/1")
        self.heard[lane] = self.rig.at

    def whole(self, lane: str) -> int:
        ready = (self.rig.state.episodes.known(name) for _, name in self.rig.state.seats.queues.ready())
        return sum(episode.group_key.lane == lane for episode in ready) // 2

    @rule(groups=st.integers(1, 4))
    def leases(self, groups: int) -> None:
        have = {lane: self.whole(lane) for lane in self.exact}
        waits = [lane for lane in self.exact if self.rig.at - self.heard[lane] < 20.0]
        batch = self.rig.lease(groups=groups)
        if batch is None:
            assert sum(have.values()) < groups or any(have[lane] < groups for lane in waits)
            return
        taken = [task[0] for task, _ in self.rig.state.batches[batch].groups]
        assert all(Counter(taken)[lane] <= have[lane] for lane in have)
        self.turns += taken
        self.lacked |= any(number < groups for number in have.values())
        if not self.lacked:
            for number in range(1, len(self.turns) + 1):
                for lane, share in self.exact.items():
                    assert abs(self.turns[:number].count(lane) - share * number) < 1

    @rule(batch=st.integers(0, 9), trained=st.booleans())
    def ends(self, batch: int, trained: bool) -> None:
        leased = sorted(self.rig.state.batches.leased)
        if leased:
            (self.rig.ack if trained else self.rig.nack)(leased[batch % len(leased)])

    @rule(seconds=st.sampled_from([1.0, 10.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.at += seconds

    @rule(seconds=st.sampled_from([0.0, 3600.0, -3600.0]))
    def restarts(self, seconds: float) -> None:
        """The machine's clock is then off by so much; each lane is waited for anew."""
        self.rig.at += seconds
        self.rig.restart()
        self.heard = dict.fromkeys(self.heard, self.rig.at)

    @invariant()
    def counters_are_right(self) -> None:
        check(self.rig.state)


TestLanes = Lanes.TestCase
TestLanes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
