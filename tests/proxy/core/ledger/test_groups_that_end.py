"""Groups that end: no ready episode waits for ever, and no group is smaller than a trainer allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec import structs

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_sdk import frame
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import Flush, Lease, OpenEpisode, SetMix
from tests.kit.ledger_rig import SETTINGS, LedgerRig
from tests.kit.paces import CASES, at_random, came_of
from tests.kit.refused import refused

ASK: dict[str, Any] = {"group_size": 4, "min_group_size": 2, "group_wait_s": 60.0}


def leased(rig: LedgerRig, **asked: Any) -> list[tuple[str, ...]]:
    return rig.leased(**{**ASK, **asked})


def detail(rig: LedgerRig, episode: str) -> tuple[str, str | None, str | None]:
    found = rig.state.episodes.known(episode)
    return found.state, found.reason, found.detail


def test_a_task_that_nobody_plays_any_more_gives_what_is_ready(rig: LedgerRig) -> None:
    names = tuple(rig.ready() for _ in range(3))
    rig.at += 59.0
    assert leased(rig) == []
    rig.at += 1.0
    assert leased(rig, min_group_size=None) == []
    assert leased(rig) == [names]


@pytest.mark.parametrize("what", ["restart", "another"])
def test_the_first_call_of_an_episode_makes_no_task_end_sooner(rig: LedgerRig, what: str) -> None:
    """It tells which of several models the episode trains, and not when one of its task was last opened."""
    rig.announce("m")
    rig.announce("n")
    alone = rig.open(task="t")
    rig.at += 59.0
    if what == "restart":
        rig.restart()
    else:
        rig.abort(rig.open(task="t"))
    rig.ends(alone)
    rig.at += 59.0
    assert leased(rig, model="m", min_group_size=1) == []
    rig.at += 1.0
    assert leased(rig, model="m", min_group_size=1) == [(alone,)]


def test_what_is_too_little_is_discarded(rig: LedgerRig) -> None:
    alone, whole = rig.ready("t"), tuple(rig.ready("u") for _ in range(5))
    rig.at += 60.0
    assert leased(rig) == [whole[:4]]
    assert detail(rig, alone) == detail(rig, whole[4]) == (
        "discarded", "incomplete_group", "nobody plays its task any more, and 2 make a group",
    )  # fmt: skip


def test_as_long_as_one_is_open_the_others_wait_for_it(rig: LedgerRig) -> None:
    names = [rig.ready() for _ in range(2)]
    late = rig.open(task="t")
    rig.at += 90.0
    assert leased(rig) == []
    rig.abort(late)
    assert leased(rig) == [tuple(names)]


def test_the_wait_begins_with_the_last_opening(rig: LedgerRig) -> None:
    names = [rig.ready() for _ in range(2)]
    rig.at += 50.0
    rig.abort(rig.open(task="t"))
    rig.at += 50.0
    assert leased(rig) == []
    assert rig.commands.leases.next_end(Lease(**ASK), at=rig.at) == 10.0
    rig.at += 10.0
    assert leased(rig) == [tuple(names)]
    assert rig.commands.leases.next_end(Lease(**ASK), at=rig.at) == float("inf")


def test_an_evaluation_holds_up_no_group(rig: LedgerRig) -> None:
    names = [rig.ready() for _ in range(2)]
    rig.open(task="t", eval=True)
    rig.at += 60.0
    assert leased(rig) == [tuple(names)]


def test_an_episode_that_is_named_late_counts_from_when_it_was_opened(rig: LedgerRig) -> None:
    names = [rig.ready() for _ in range(2)]
    rig.at += 50.0
    late = rig.open()
    rig.at += 20.0
    (call,) = rig.begin(late, task="t")
    assert leased(rig) == []
    rig.lose(late, call)
    rig.abort(late)
    rig.at += 39.0
    assert leased(rig) == []
    rig.at += 1.0
    assert leased(rig) == [tuple(names)]


def test_revisions_and_lanes_are_apart(rig: LedgerRig) -> None:
    """A group holds one revision of the code, and one lane."""
    old, new = ([played(rig, revision=name) for _ in range(2)] for name in ("one", "two"))
    terminal = played(rig, lane="terminal")
    assert leased(rig, groups=1, group_size=2) == [tuple(old)]
    assert leased(rig, groups=1, group_size=2) == [tuple(new)]
    rig.at += 60.0
    assert leased(rig, min_group_size=1) == [(terminal,)]


def played(rig: LedgerRig, *, task: str = "t", reward: float = 1.0, **how: Any) -> str:
    """A ready episode of a client's revision or lane."""
    episode = rig.id("ep")
    (opened,) = rig.commands.open_episode(OpenEpisode(task=task), episode=episode, at=rig.at, tenant="")
    rig.run([structs.replace(opened, **how)])
    rig.ends(episode, reward)
    return episode


def test_after_a_flush_nothing_more_is_waited_for(rig: LedgerRig) -> None:
    ready = {task: (rig.ready(task), rig.ready(task)) for task in ("math/1", "math/2", "code/1")}
    rig.open(task="math/1")
    rig.run(rig.commands.leases.flush(Flush(lane="math", task="math/1"), at=rig.at))
    assert leased(rig) == [ready["math/1"]]
    assert leased(rig) == []
    rig.run(rig.commands.leases.flush(Flush(lane="math"), at=rig.at))
    assert leased(rig, min_group_size=None) == [ready["math/2"]]
    rig.run(rig.commands.leases.flush(Flush(), at=rig.at))
    assert leased(rig) == [ready["code/1"]]


def test_what_comes_after_a_flush_is_waited_for_again(rig: LedgerRig) -> None:
    rig.ready(), rig.ready()
    rig.run(rig.commands.leases.flush(Flush(), at=rig.at))
    assert len(leased(rig)) == 1
    rig.ready(), rig.ready()
    assert leased(rig) == []


def test_a_batch_may_be_counted_in_episodes(rig: LedgerRig) -> None:
    small = tuple(rig.ready("t") for _ in range(3))
    rig.at += 60.0
    whole = tuple(rig.ready("u") for _ in range(4))
    assert leased(rig, unit="episodes", groups=8) == []
    assert leased(rig, unit="episodes", groups=4) == [small, whole]


def test_of_several_models_only_the_share_that_is_too_little_goes(rig: LedgerRig) -> None:
    episode = rig.ready(members={"x": "m", "y": "n"})
    other = rig.ready("t", model="n")
    rig.at += 60.0
    assert leased(rig, model="m") == []
    assert views.record(rig.state, episode)["shares"] == {"n": "ready"}
    assert leased(rig, model="n") == [(episode, other)]


def test_where_the_oldest_come_last_small_groups_are_taken_too(rig: LedgerRig) -> None:
    rig.announce("m", 8)
    old = [rig.ready("t", version=6) for _ in range(2)]
    older = [rig.ready("u", version=5) for _ in range(3)]
    rig.at += 60.0
    assert leased(rig, groups=2, max_staleness=3) == [tuple(old), tuple(older)]


def test_no_group_may_be_larger_than_whole_ones(rig: LedgerRig) -> None:
    with refused(BadRequest, param="min_group_size"):
        rig.lease(**ASK | {"min_group_size": 5})


def test_after_a_restart_a_task_has_its_whole_wait_again(rig: LedgerRig) -> None:
    names = [rig.ready() for _ in range(2)]
    rig.at += 60.0
    rig.restart()
    assert leased(rig) == []
    rig.at += 60.0
    assert leased(rig) == [tuple(names)]


EIGHT = {"group_size": 8, "min_group_size": 2, "group_wait_s": 60.0}


def of_eight() -> LedgerRig:
    """A ledger whose groups have eight seats; it is watched."""
    return LedgerRig(dataclasses.replace(SETTINGS, group_size=8, idle_timeout=1e6, wall_timeout=1e6), watch=True)


@pytest.mark.parametrize("size", [8, 4])
def test_who_is_compared_does_not_depend_on_who_ends_first(size: int) -> None:
    """16 of a task: quick ones with 0 and 0.1, slow ones with 0.6 and 0.9, in turns. Also where a lease names a size
    that the daemon does not."""
    rig = of_eight()
    names = [rig.open(task="t", model="m") for _ in range(16)]
    for paces in (names[0::2], names[1::2]):
        for number, name in enumerate(paces):
            rig.ends(name, (0.0, 0.1)[number % 2] if paces[0] == names[0] else (0.6, 0.9)[number % 2])
        rig.at += 10.0
    groups = leased(rig, groups=16 // size, **{**EIGHT, "group_size": size})
    assert sorted(groups) == sorted(tuple(names[at : at + size]) for at in range(0, 16, size))
    for group in groups:
        rewards = [rig.state.episodes.known(name).reward() for name in group]
        assert sum(filter(None, rewards)) / size == pytest.approx(0.4)


@pytest.mark.parametrize("case", CASES)
def test_the_mean_advantage_by_pace_is_that_of_groups_drawn_at_random(case: str) -> None:
    """Within three standard errors. Who is trained before another ends that is stuck is not compared with it: that is
    what is left, and less than a tenth of an advantage."""
    mix, how = CASES[case]
    found = came_of(mix, 2000, **how)
    for pace in mix:
        mean, error = found.mean(pace)
        left = 0.1 * abs(at_random(mix, pace)) if "stuck" in mix else 0.0
        assert abs(mean - at_random(mix, pace)) < 3 * error + left, pace
    assert not sum(found.lost.values())


def test_what_is_discarded_keeps_or_gives_up_its_seat_whatever_it_has_earned() -> None:
    """A reward, or none, or a call that was lost, changes nothing in who is compared with whom."""
    for outcome in ("aborted", "unrewarded", "uncalled", "low", "high"):
        rig = LedgerRig(watch=True)
        first, second, third, last = (rig.open(task="t", model="m") for _ in range(4))
        if outcome in ("low", "high"):
            rig.call(first), rig.reward(first, 0.0 if outcome == "low" else 1.0, final=False)
        if outcome == "unrewarded":
            rig.call(first), rig.seal(first)
        elif outcome == "uncalled":
            rig.reward(first)
        else:
            rig.abort(first)
        again = rig.open(task="t", model="m")
        for name in (third, second, again):
            rig.ends(name)
        assert leased(rig, group_size=2) == [(second, again)]
        assert rig.state_of(last) == "open"


def test_a_group_waits_for_a_member_four_times_as_long_as_for_the_slowest_other() -> None:
    rig = of_eight()
    rig.run(rig.commands.leases.set_mix(SetMix(ahead=1), at=rig.at))
    names = [rig.open(task="t", model="m") for _ in range(8)]
    rig.at += 20.0
    for name in names[:6]:
        rig.ends(name)
    for wait, last in ((39.0, 6), (40.9, 7)):
        rig.at += wait
        rig.heartbeat(names[7])
        rig.expire()
        assert leased(rig, **EIGHT) == []
        if last == 6:
            rig.ends(names[6])  # the slowest other took 59 seconds now
    rig.at += 136.0
    rig.heartbeat(names[7])
    rig.expire()
    assert leased(rig, **EIGHT) == [] and rig.state.mixes.room("default", ["m"]) == 0
    rig.at += 0.2
    assert rig.expire() == (ev.EpisodesLate(rig.at, (names[7],)),)
    assert rig.expire() == ()
    assert rig.state.mixes.room("default", ["m"]) == 8, "nor does it hold up the lane"
    assert leased(rig, **EIGHT) == [tuple(names[:7])]


def test_nobody_is_waited_for_in_vain_while_a_gate_is_shut_or_the_daemon_is_away() -> None:
    rig = of_eight()
    quick, slow = (rig.open(task="t", model="m") for _ in range(2))
    rig.at += 10.0
    rig.ends(quick)
    rig.gate_close()
    rig.at += 500.0
    assert rig.commands.expire(rig.at) == ()
    rig.gate_open(1)
    rig.at += 30.0
    rig.state.apply(ev.EpisodeTouched(rig.at, slow))
    rig.at += 500.0
    rig.restart()
    rig.at += 19.0
    assert rig.commands.expire(rig.at) == ()
    rig.at += 1.0
    assert rig.commands.expire(rig.at) == (ev.EpisodesLate(rig.at, (slow,)),)


def late(rig: LedgerRig) -> tuple[list[str], str]:
    """A group that was leased without one of its members; that one is open."""
    names = [rig.open(task="t", model="m") for _ in range(8)]
    for name in names[:7]:
        rig.ends(name, 0.5)
    rig.run([ev.EpisodesLate(rig.at, (names[7],))])
    assert leased(rig, **EIGHT) == [tuple(names[:7])]
    return names[:7], names[7]


def test_a_late_member_is_compared_with_those_that_were_trained_before() -> None:
    rig = of_eight()
    others, name = late(rig)
    rig.ends(name, 0.9)
    batch = rig.lease(**EIGHT)
    (group,) = views.batch(rig.state, batch or "").groups
    assert [one.episode for one in group.episodes] == [name]
    assert [one.episode for one in group.earlier] == others
    assert frame.decode_batch(frame.encode_batch(views.batch(rig.state, batch or ""))).groups[0].earlier


def test_a_late_member_whose_group_comes_back_is_one_of_it_again() -> None:
    rig = of_eight()
    others, name = late(rig)
    rig.ends(name, 0.9)
    rig.nack(next(iter(rig.state.batches.leased)))
    assert leased(rig, **EIGHT) == [(*others, name)]
    assert not rig.state.batches[next(iter(rig.state.batches.leased))].earlier


def test_a_late_member_teaches_something_where_its_reward_differs_from_those_of_before() -> None:
    for reward, taught in ((0.5, False), (0.9, True)):
        rig = of_eight()
        _, name = late(rig)
        rig.ends(name, reward)
        assert (leased(rig, signal=True, **EIGHT) == [(name,)]) == taught


def test_a_late_one_that_is_named_counts_nowhere() -> None:
    rig = of_eight()
    _, name = late(rig)
    rig.begin(name, task="u")
    rig.abort(name)
    rig.announce("m", 0), rig.announce("n", 0)
    unaimed = rig.open(task="t")
    rig.run([ev.EpisodesLate(rig.at, (unaimed,))])
    rig.begin(unaimed, model="n")
    assert rig.state.episodes.unsettled[unaimed].late


def test_who_aims_at_one_model_and_trains_another_gives_up_the_seat_of_the_first() -> None:
    rig = of_eight()
    episode = rig.open(task="t", members={"x": "m", "y": "n"})
    other = rig.open(task="t")
    rig.call(episode, agent="y", model="n")
    rig.call(other, sampled=(), model="m"), rig.call(other, model="n")
    for name in (episode, other):
        rig.reward(name)
        assert list(rig.state.episodes[name].shares.by_model) == ["n"]


def test_a_group_that_lost_members_to_staleness_ends_early() -> None:
    rig = of_eight()
    names = [rig.open(task="t", model="m") for _ in range(8)]
    rig.open(task="t", model="m")
    rig.announce("m", 9)
    for name in names:
        rig.ends(name, version=1 if name in names[:3] else 9)
    assert leased(rig, **EIGHT, max_staleness=2) == [tuple(names[3:])]
    shown = views.batch(rig.state, next(iter(rig.state.batches.leased)))
    assert [one.episode for one in shown.groups[0].episodes] == names[3:]


class Groups(RuleBasedStateMachine):
    """Law: a trainer that keeps asking has every ready episode, or has it discarded, once its task has been quiet for
    as long as it waits; and no group is below the minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LedgerRig(watch=True)
        self.rig.at = 1e6  # however often a clock goes back an hour, it stays after 1970
        self.open: list[str] = []
        self.last: dict[str, float] = {}

    @rule(task=st.sampled_from(["a", "b/1", "b/2"]))
    def opens(self, task: str) -> None:
        self.open.append(self.rig.open(task=task))
        self.last[task] = self.rig.at

    @rule(at=st.integers(0, 9), outcome=st.sampled_from(["ready", "ready", "aborted", "unrewarded"]))
    def ends(self, at: int, outcome: str) -> None:
        if not self.open:
            return
        episode = self.open.pop(at % len(self.open))
        if outcome == "aborted":
            self.rig.abort(episode)
            return
        self.rig.call(episode)
        if outcome == "ready":
            self.rig.reward(episode)
        else:
            self.rig.seal(episode)

    @rule(seconds=st.sampled_from([1.0, 20.0, 59.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.at += seconds

    @rule()
    def a_trainer_asks(self) -> None:
        while groups := leased(self.rig):
            assert all(2 <= len(names) <= 4 for names in groups)
        playing = {self.rig.state.episodes.known(name).opening.task for name in self.open}
        for _, name in self.rig.state.seats.queues.ready():
            task = self.rig.state.episodes.known(name).opening.task or ""
            assert task in playing or self.rig.at - self.last[task] < 60.0

    @rule(seconds=st.sampled_from([0.0, 3600.0, -3600.0]))
    def the_daemon_restarts(self, seconds: float) -> None:
        """Its machine's clock is then off by so much; each task has its whole wait again."""
        self.rig.at += seconds
        self.rig.restart()
        self.last = dict.fromkeys(self.last, self.rig.at)

    @rule(batch=st.integers(0, 9))
    def a_batch_is_returned(self, batch: int) -> None:
        leased = sorted(self.rig.state.batches.leased)
        if leased:
            self.rig.nack(leased[batch % len(leased)])


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
