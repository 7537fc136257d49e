"""Data sets that are played: whatever is killed, each place is played once, and what is missing is known."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ajet_proxy.core.ledger import commands, plays
from ajet_proxy.core.ledger.plays import Play
from ajet_sdk import limits, routes
from ajet_sdk.errors import BadRequest, Conflict, NotFound
from tests.kit.histories import folded
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused

EPISODES = 5


@pytest.fixture
def rig(rig: LedgerRig) -> LedgerRig:
    begin(rig)
    return rig


def begin(rig: LedgerRig, name: str = "d", episodes: int = EPISODES, tenant: str = "") -> None:
    rig.run(rig.commands.play(routes.Play(name, episodes), tenant=tenant, at=rig.at))


def told(rig: LedgerRig, name: str = "d", tenant: str = "") -> dict[str, Any]:
    return rig.state.plays.play(tenant, name).to_json()


def opens(rig: LedgerRig, place: int, **how: Any) -> str:
    return rig.open(play="d", place=place, **{"task": f"t{place}", **how})


def test_a_play_from_its_beginning_to_its_end(rig: LedgerRig) -> None:
    assert told(rig) == {
        "play": "d", "episodes": 5, "opened": 0, "done": 0, "lost": 0, "missing": 5, "next": 0, "given_back": [],
    }  # fmt: skip
    first, second = opens(rig, 0), opens(rig, 1)
    assert [told(rig)[name] for name in ("opened", "missing", "next")] == [2, 3, 2]
    rig.ends(first)
    rig.abort(second, "why")
    assert told(rig) | {"play": ""} == {
        "play": "", "episodes": 5, "opened": 1, "done": 1, "lost": 1, "missing": 4, "next": 2, "given_back": [1],
    }  # fmt: skip
    for place in (2, 1, 3, 4):
        rig.ends(opens(rig, place))
    assert told(rig) | {"play": ""} == {
        "play": "", "episodes": 5, "opened": 5, "done": 5, "lost": 1, "missing": 0, "next": None, "given_back": [],
    }  # fmt: skip
    rig.run(rig.commands.end_play("d", tenant="", at=rig.at))
    with refused(NotFound, "unknown_play"):
        told(rig)


@pytest.mark.parametrize("place", [0, 2, 5, limits.MAX_PLAY - 1])
def test_only_a_free_place_can_be_opened(rig: LedgerRig, place: int) -> None:
    opens(rig, 0)
    with refused(Conflict, "place_taken", param="place", match=f"place {place} of play d is not free"):
        opens(rig, place)


def test_an_episode_of_a_play_needs_a_place_and_a_play_that_is_there(rig: LedgerRig) -> None:
    with refused(BadRequest, param="place"):
        rig.open(play="d")
    with pytest.raises(NotFound):
        rig.open(play="other", place=0)
    with pytest.raises(NotFound):
        rig.open(play="d", place=0, tenant="them")


def test_the_same_play_goes_on_and_another_is_refused(rig: LedgerRig) -> None:
    opens(rig, 0)
    begin(rig)
    assert told(rig)["opened"] == 1
    with refused(Conflict, "play_exists", param="episodes", match="play d has 5 episodes, not 6"):
        begin(rig, episodes=6)
    begin(rig, episodes=6, tenant="them")
    assert (told(rig)["missing"], told(rig, tenant="them")["missing"]) == (4, 6)


def test_of_too_many_plays_the_oldest_of_the_tenant_ends() -> None:
    rig = LedgerRig(watch=True)
    with mock.patch.object(commands, "MAX_PLAYS", 2):
        for name, tenant in (("a", ""), ("z", "them"), ("b", ""), ("c", "")):
            begin(rig, name, 1, tenant)
    assert [*rig.state.plays.table] == [("them", "z"), ("", "b"), ("", "c")]


@pytest.mark.parametrize("reason", ["abort", "idle", "no_call", "stale"])
def test_whatever_discards_an_episode_gives_its_place_back(rig: LedgerRig, reason: str) -> None:
    episode = opens(rig, 0)
    if reason == "abort":
        rig.run(rig.commands.abort(episode, routes.Abort("away", "infra"), at=rig.at))
        assert rig.state.episodes[episode].cause == "infra"
    elif reason == "idle":
        rig.later(101.0)
    elif reason == "no_call":
        rig.reward(episode)
    else:
        rig.ends(episode)
        assert told(rig)["done"] == 1
        rig.announce("m", 9)
        rig.lease(group_size=1, max_staleness=1)
    assert rig.state_of(episode) == "discarded"
    assert [told(rig)[name] for name in ("done", "lost", "given_back")] == [0, 1, [0]]


@pytest.mark.parametrize("value", [1.0, None])
def test_what_awaits_a_judgement_counts_as_played(rig: LedgerRig, value: float | None) -> None:
    """Once, even if one of its calls is lost then. If it is not judged, its place is given back."""
    episode = opens(rig, 0, judged=True)
    rig.call(episode)
    call = rig.call(episode)
    rig.seal(episode)
    assert (rig.state_of(episode), told(rig)["done"]) == ("sealed", 1)
    rig.lose(episode, call, taken_back=True)
    assert (rig.state_of(episode), told(rig)["done"]) == ("sealed", 1)
    rig.judge(episode, value)
    found = [told(rig)[name] for name in ("done", "lost", "given_back")]
    assert found == ([0, 1, [0]] if value is None else [1, 0, []])


def test_what_its_trainer_left_out_counts_as_played(rig: LedgerRig) -> None:
    episode = opens(rig, 0)
    rig.ends(episode)
    rig.ack(rig.batch(group_size=1), 1, **{episode: "no_signal"})
    assert rig.state_of(episode) == "discarded"
    assert [told(rig)[name] for name in ("done", "lost", "given_back")] == [1, 0, []]


def test_an_evaluation_can_be_a_play_and_then_belongs_to_no_other(rig: LedgerRig) -> None:
    rig.announce("m", 1)
    rig.evaluate("m", 2)
    episode = opens(rig, 0, eval=True, model="m")
    rig.call(episode)
    rig.seal(episode)
    assert (rig.state_of(episode), told(rig)["done"], rig.state.plays.wanted()) == ("recorded", 1, {"m": 2})


def test_a_trial_is_recorded_and_belongs_to_nothing() -> None:
    rig = LedgerRig(watch=True)
    rig.announce("m", 1)
    rig.evaluate("m", 2)
    known = rig.state.episodes[rig.open(trial=True, model="m")]
    assert (known.opening.eval, known.opening.evaluation, rig.state.plays.wanted()) == (True, None, {"m": 2})


def test_an_episode_that_is_opened_twice_is_one(rig: LedgerRig) -> None:
    """Its client did not hear the first answer."""
    body = {"task": "t", "play": "d", "place": 0, "id": "mine"}
    rig.open("mine", **body)
    assert rig.commands.open_episode(routes.OpenEpisode(**body), episode="mine", at=rig.at, tenant="") == ()  # type: ignore[arg-type]
    for other in ({"task": "u"}, {"place": 1}, {"play": None, "place": None}, {"id": None}):
        with refused(Conflict, "episode_exists"):
            rig.open("mine", **(body | other))
    with pytest.raises(Conflict):
        rig.open("mine", tenant="them", **body)
    rig.abort("mine")
    with pytest.raises(Conflict):
        rig.open("mine", **body)


def test_a_play_that_begins_anew_knows_nothing_of_the_earlier_one(rig: LedgerRig) -> None:
    late = opens(rig, 0)
    rig.run(rig.commands.end_play("d", tenant="", at=rig.at))
    rig.abort(opens_after_end(rig))
    begin(rig)
    opens(rig, 0)
    rig.abort(late)
    assert [told(rig)[name] for name in ("opened", "lost", "given_back")] == [1, 0, []]


def opens_after_end(rig: LedgerRig) -> str:
    return rig.open(task="of no play")


def test_an_episode_of_a_play_that_has_ended_ends_as_any_other(rig: LedgerRig) -> None:
    episode = opens(rig, 0)
    rig.run(rig.commands.end_play("d", tenant="", at=rig.at))
    rig.ends(episode)
    assert rig.state_of(episode) == "ready"


def test_places_that_were_given_back_are_told_page_by_page() -> None:
    play = Play("", "d", 500, 0, next=500, given_back=dict.fromkeys(range(498, -1, -2)))
    told, after = list[int](), -1
    while page := play.to_json(after)["given_back"]:
        assert len(page) <= plays.SHOWN
        told += page
        after = page[-1]
    assert told == sorted(play.given_back)


def test_places_take_memory_only_while_they_are_given_back() -> None:
    play = Play("", "d", limits.MAX_PLAY, 0)
    for place in range(1000):
        play.begin(place)
        play.moved(place, "open", "sealed", None)
        play.moved(place, "sealed", "ready", None)
        play.moved(place, "ready", "leased", None)
    assert (play.given_back, play.done, play.missing) == ({}, 1000, limits.MAX_PLAY - 1000)


class Played(RuleBasedStateMachine):
    """Runners that open what is free, fail, are killed and start again, over a daemon that does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LedgerRig()
        begin(self.rig)

    def placed(self, *states: str) -> dict[str, int]:
        """The episodes of the play in these states, with their places."""
        episodes = {**self.rig.state.episodes, **self.rig.state.episodes.leaving}.values()
        return {one.id: one.opening.place for one in episodes if one.opening.place is not None and one.state in states}

    @rule(data=st.data())
    def a_free_place_is_opened(self, data: st.DataObject) -> None:
        seen = told(self.rig)
        free = [*seen["given_back"], *([] if seen["next"] is None else [seen["next"]])]
        if free:
            place = data.draw(st.sampled_from(free))
            self.rig.open(play="d", place=place, task="t")

    @rule(place=st.integers(0, EPISODES))
    def a_place_is_asked_for(self, place: int) -> None:
        seen = told(self.rig)
        try:
            self.rig.open(play="d", place=place, task="t")
        except Conflict:
            assert place != seen["next"] and place not in seen["given_back"]

    @rule(data=st.data(), end=st.sampled_from(["abort", "reward", "ends", "begin", "seal"]))
    @precondition(lambda self: self.placed("open"))
    def an_episode_goes_on(self, data: st.DataObject, end: str) -> None:
        episode = data.draw(st.sampled_from(sorted(self.placed("open"))))
        getattr(self.rig, end)(episode)

    @rule(data=st.data())
    @precondition(lambda self: self.placed("sealed", "ready"))
    def an_episode_is_aborted_late(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.placed("sealed", "ready")))))

    @rule(staleness=st.sampled_from([None, 0]), version=st.integers(0, 3))
    def a_batch_is_trained(self, staleness: int | None, version: int) -> None:
        self.rig.announce("m", version)
        batch = self.rig.lease(group_size=1, max_staleness=staleness)
        if batch is not None:
            (episode,) = self.rig.state.batches[batch].episodes()
            self.rig.ack(batch, version, **({episode: "why"} if version % 2 else {}))

    @rule(seconds=st.sampled_from([1.0, 150.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.at += seconds
        self.rig.expire()

    @rule()
    def the_daemon_is_killed(self) -> None:
        self.rig.restart()

    @rule()
    def the_runner_is_killed_and_starts_again(self) -> None:
        before = told(self.rig)
        begin(self.rig)
        assert told(self.rig) == before

    @rule()
    def episodes_are_archived(self) -> None:
        self.rig.archive()

    @invariant()
    def each_place_is_had_by_one(self) -> None:
        known, seen = self.rig.state.episodes, told(self.rig)
        had = list(self.placed("open", "sealed", "ready", "leased", "trained", "recorded").values())
        had += [
            one.opening.place for one in {**known, **known.leaving}.values()
            if one.opening.place is not None and one.reason == "filtered"
        ]  # fmt: skip
        assert sorted(set(had)) == sorted(had)
        assert seen["opened"] == len(had) and seen["missing"] == EPISODES - len(had)
        assert seen["opened"] - seen["done"] == len(self.placed("open", "sealed"))
        if not seen["missing"]:
            assert sorted(had) == list(range(EPISODES))

    def teardown(self) -> None:
        assert folded(self.rig.events).plays.table == self.rig.state.plays.table


TestPlayed = Played.TestCase
TestPlayed.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
