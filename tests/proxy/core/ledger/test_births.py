"""Births: no run learns from another one, and what a crash has lost is never taken for what was made again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.births import Births
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.trajectory.timeline import pack
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.codec import decode, encode
from ajet_sdk.errors import Conflict
from tests.kit.ledger_rig import SETTINGS, LedgerRig
from tests.kit.strategies import make_call


def play(rig: LedgerRig, number: int = 2, **options: Any) -> list[str]:
    """So many ready episodes of one task, each with a call."""
    names = [rig.open(task="t") for _ in range(number)]
    for name in names:
        rig.ends(name, **options)
    return names


def states(rig: LedgerRig, names: list[str]) -> set[tuple[str, str | None]]:
    return {(rig.state.episodes.known(name).state, rig.state.episodes.known(name).reason) for name in names}


def told(rig: LedgerRig, batch: str) -> set[int]:
    """The versions that a batch delivers."""
    return {
        version for group in views.batch(rig.state, batch).groups for episode in group.episodes
        for sample in episode.samples for version, _ in sample.policy_versions
    }


def test_another_run_discards_what_waits_and_voids_leases(rig: LedgerRig) -> None:
    rig.announce(version=7, run="a")
    leased, ready = play(rig), play(rig)
    batch = rig.batch()
    (sealed,) = [rig.open(task="t")]
    rig.begin(sealed)
    rig.reward(sealed)
    events = rig.announce(version=0, run="b")
    assert [type(event).__name__ for event in events] == [
        "BatchReturned", *["EpisodeDiscarded"] * 5, "RunBegan", "PolicyAnnounced",
    ]
    assert states(rig, [*leased, *ready, sealed]) == {("discarded", "other_run")}
    for ask in (lambda: rig.ack(batch), lambda: rig.extend(batch)):
        with pytest.raises(Conflict):
            ask()
    with pytest.raises(Conflict, match="leased to another run"):
        rig.ack(batch)
    assert rig.lease() is None
    fresh = play(rig)
    assert rig.lease(max_staleness=0) is not None
    assert states(rig, fresh) == {("leased", None)}


def test_the_same_run_again_discards_nothing(rig: LedgerRig) -> None:
    rig.announce(version=7, run="a")
    play(rig)
    batch = rig.batch()
    play(rig)
    rig.announce(version=7, run="a")
    rig.attend("comes")
    rig.attend("begins")
    rig.announce(version=7, run="a")
    rig.ack(batch, 8)
    assert told(rig, rig.lease(max_staleness=0) or "") == {7}


def test_what_was_sampled_before_any_run_belongs_to_the_first(rig: LedgerRig) -> None:
    play(rig, version=0)
    rig.announce(version=3)
    play(rig)
    rig.announce(version=3, run="a")
    assert told(rig, rig.lease(groups=2) or "") == {0, 3}


def test_an_open_episode_goes_on_and_goes_with_its_run_when_it_is_sealed(rig: LedgerRig) -> None:
    rig.announce(version=0, run="a")
    before, over, clean = (rig.open(task="t") for _ in range(3))
    rig.call(before)
    rig.call(over)
    rig.announce(version=0, run="b")
    for name in (over, clean):
        rig.call(name)
    for name in (before, over, clean):
        assert rig.state.episodes.known(name).state == "open"
        rig.reward(name)
    assert states(rig, [before, over]) == {("discarded", "other_run")}
    assert states(rig, [clean]) == {("ready", None)}


def test_shares_of_other_models_stay(rig: LedgerRig) -> None:
    rig.announce("m", 0, run="a")
    rig.announce("n", 0, run="z")
    names = [rig.open(task="t", members={"x": "m", "y": "n"}) for _ in range(5)]
    for name in names:
        rig.call(name, model="m", agent="x")
        rig.call(name, [8], model="n", agent="y")
    for name in names[:4]:
        rig.reward(name)
    batch = rig.batch(model="n")
    rig.announce("m", 0, run="b")
    rig.reward(names[4])
    assert [rig.state.episodes.known(name).state for name in names] == ["leased", "leased", *["ready"] * 3]
    assert all(set(rig.state.episodes.known(name).shares.by_model) == {"n"} for name in names)
    rig.ack(batch)
    assert states(rig, names[:2]) == {("trained", None)}
    shown = views.record(rig.state, names[4])["models"]["m"]
    assert (shown["share"], shown["reason"].partition(":")[0]) == ("filtered", "other_run")


def test_a_run_that_comes_back_has_what_it_sampled_itself(rig: LedgerRig) -> None:
    rig.announce(version=2, run="a")
    names = [rig.open(task="t"), rig.open(task="t")]
    for name in names:
        rig.call(name)
    rig.announce(version=0, run="b")
    rig.announce(version=1, run="a")
    for name in names:
        rig.reward(name)
    assert states(rig, names) == {("ready", None)}
    assert rig.lease(max_staleness=0) is None
    assert states(rig, names) == {("discarded", "stale")}


def test_the_way_to_a_lost_version_goes_over_the_version_from_which_both_go_on(rig: LedgerRig) -> None:
    for version in range(7):
        rig.announce(version=version, run="a")
    play(rig)
    rig.announce(version=4, run="a")
    rig.announce(version=5, run="a")
    batch = rig.batch(max_staleness=3)
    assert told(rig, batch) == {2}  # as far from 5 as two versions back to 4, and one on from there
    rig.nack(batch)
    rig.announce(version=6, run="a")
    assert rig.lease(max_staleness=3) is None
    rig.announce(version=3, run="a")  # beside what is now lost, too
    assert told(rig, batch) == {2}


def test_a_gate_that_opens_for_a_lower_version_loses_as_an_announcement_does(rig: LedgerRig) -> None:
    rig.announce(version=6, run="a")
    lost = play(rig)
    rig.gate_close("m")
    rig.gate_open(5, "m")
    rig.gate_open(6, "m")
    assert rig.lease(max_staleness=0) is None
    assert states(rig, lost) == {("discarded", "stale")}


def test_a_gate_that_opens_says_nothing_of_whose_weights_these_are(rig: LedgerRig) -> None:
    rig.announce(version=0, run="a")
    rig.attend("comes", "b")
    rig.attend("begins", "b")
    rig.gate_close("m")
    rig.gate_open(0, "m")  # the push failed
    assert states(rig, play(rig)) == {("discarded", "other_run")}
    rig.announce(version=0, run="b")
    assert states(rig, play(rig)) == {("ready", None)}


def test_until_a_run_is_announced_what_is_sampled_is_nobodys(rig: LedgerRig) -> None:
    rig.announce(version=0, run="a")
    for says in ("comes", "begins"):
        rig.attend(says, "b")
    name = rig.open(task="t")
    rig.call(name)  # perhaps by weights that were pushed already
    rig.at += 100.0
    for says in ("comes", "begins"):
        rig.attend(says, "a")
    rig.announce(version=0, run="a")
    rig.reward(name)
    assert states(rig, [name]) == {("discarded", "other_run")}


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_frozen_engine_may_have_gone_on_with_weights_that_were_never_announced(ends_in_time: bool) -> None:
    rig = LedgerRig(watch=True)
    rig.announce(version=6, run="a")
    name = rig.open(task="t")
    (call,) = rig.begin(name)
    rig.gate_close("m")
    done = pack(make_call(call, (1, 2), (3,), at=rig.at, model="m", version=6))
    done = structs.replace(done, turn=structs.replace(done.turn, altered=("cache_salt",)))
    if ends_in_time:
        rig.run(rig.commands.finish_call(name, done, at=rig.at))
    for says in ("comes", "begins"):
        rig.attend(says, "a", "a2")
    rig.announce(version=6, run="a")
    rig.gate_open(6, "m")
    rig.run(rig.commands.finish_call(name, done, at=rig.at))
    rig.reward(name)
    assert rig.lease(group_size=1, max_staleness=0) is None
    assert states(rig, [name]) == {("discarded", "stale")}


def test_an_evaluation_of_a_lost_version_is_wanted_no_more(rig: LedgerRig) -> None:
    rig.announce(version=1, run="a")
    rig.evaluate()
    assert rig.state.plays.wanted() == {"m": 2}
    for version in (0, 1):
        rig.announce(version=version, run="a")
    assert rig.state.plays.wanted() == {}
    rig.evaluate()
    rig.announce(version=1, run="b")
    assert rig.state.plays.wanted() == {}


def test_another_run_begins_where_the_slowest_of_its_team_is(rig: LedgerRig) -> None:
    for model in ("m", "n"):
        rig.announce(model, 0, run=f"a{model}")
    rig.ready(members={"x": "m", "y": "n"})
    rig.announce("m", 3, run="am")
    rig.announce("m", 5, run="b")
    assert rig.state.weights.teams == [{"m": 0, "n": 0}]


@dataclass
class Flight:
    """A call in flight: the true weights and the version that was read, token by token."""

    call: str
    tokens: list[tuple[int, int]] = field(default_factory=list)


class World:
    """A daemon in front of an engine whose true weights are known, and trainers that die at any instant.

    Weights have an id that is never used again. With `pause` the engine goes on, with whatever it has, while the gate
    is shut, and calls stay in flight; otherwise the gate waits for them.
    """

    def __init__(self, *, pause: bool, says: bool) -> None:
        self.rig = LedgerRig()
        self.pause, self.says = pause, says
        self.born = 0
        self.run_of: dict[int, str] = {0: "a"}
        self.engine = 0
        self.run, self.runs = "a", 1
        self.saved: dict[str, dict[int, int]] = {"a": {0: 0}}
        self.version = 0
        self.shut = self.dead = False
        self.flights: dict[str, Flight] = {}
        self.sampled: dict[str, list[int]] = {}
        self.start(0)

    def weights(self) -> int:
        self.born += 1
        self.run_of[self.born] = self.run
        return self.born

    def start(self, die: int) -> None:
        """The trainer starts from its latest checkpoint, and dies behind so many instants, if that many are passed."""
        version = max(self.saved[self.run])
        instants = [
            lambda: self.rig.attend("comes", self.run, f"{self.rig.id('process')}") if self.says else None,
            lambda: self._begins() if self.says else None,
            self._close,
            lambda: self._push(self.saved[self.run][version]),
            lambda: self.rig.announce(version=version, run=self.run),
            lambda: self._open(version),
        ]
        self.version, self.mine = version, self.saved[self.run][version]
        self._pass(instants, die)

    def _begins(self) -> None:
        self.rig.attend("begins", self.run, self.rig.state.weights.trainers["m"].came.instance)

    def step(self, die: int, *, save: bool) -> None:
        made = self.weights()
        version = self.version + 1

        def keep() -> None:
            if save:
                self.saved[self.run] = {
                    number: one for number, one in self.saved[self.run].items() if number < version
                } | {version: made}

        instants = [
            keep, self._close, lambda: self._push(made), lambda: self.rig.announce(version=version, run=self.run),
            lambda: self._open(version),
        ]
        self.version, self.mine = version, made
        self._pass(instants, die)

    def _pass(self, instants: list[Any], die: int) -> None:
        for instant in instants[: len(instants) if die == 0 else die]:
            instant()
        self.dead = 0 < die < len(instants)

    def another(self, die: int) -> None:
        self.rig.at += 100.0
        self.run, self.runs = f"run{self.runs}", self.runs + 1
        self.saved[self.run] = {0: self.weights()}
        self.start(die)

    def back(self) -> None:
        """The run before the latest is taken up again."""
        self.rig.at += 100.0
        names = list(self.saved)
        self.run = names[max(0, names.index(self.run) - 1)]
        self.start(0)

    def _close(self) -> None:
        self.rig.gate_close("m")
        self.shut = True
        if not self.pause:
            for name in tuple(self.flights):
                self.finish(name)

    def _push(self, made: int) -> None:
        self.engine = made
        for name in self.flights:
            self.sample(name)

    def _open(self, version: int) -> None:
        self.rig.gate_open(version, "m")
        self.shut = False

    def begin(self) -> None:
        if not self.shut:
            name = self.rig.open(task="t")
            self.flights[name] = Flight(*self.rig.begin(name))
            self.sample(name)

    def sample(self, name: str) -> None:
        self.flights[name].tokens.append((self.engine, self.rig.state.weights.policy_version("m")))

    def finish(self, name: str) -> None:
        flight = self.flights.pop(name)
        done = make_call(flight.call, (1, 2), tuple(made + 10 for made, _ in flight.tokens), at=self.rig.at, model="m")
        packed = pack(done)
        spans = list[tuple[int, int]]()
        for _, version in flight.tokens:
            if spans and spans[-1][0] == version:
                spans[-1] = version, spans[-1][1] + 1
            else:
                spans.append((version, 1))
        altered = ("cache_salt",) if self.pause else ()
        turn = structs.replace(packed.turn, policy_versions=tuple(spans), altered=altered)
        self.rig.run(self.rig.commands.finish_call(name, structs.replace(packed, turn=turn), at=self.rig.at))
        self.sampled[name] = [made for made, _ in flight.tokens]

    def end(self, name: str) -> None:
        if self.rig.state.episodes.known(name).state == "open":
            self.rig.reward(name)

    def lease(self, max_staleness: int | None) -> None:
        """The law: of this run alone, and with a bound of 0 of these very weights alone."""
        batch = self.rig.lease(group_size=1, max_staleness=max_staleness)
        if batch is None:
            return
        for _, names in self.rig.state.batches.known(batch).groups:
            for name in names:
                assert {self.run_of[made] for made in self.sampled[name]} == {self.run}
                if max_staleness == 0:
                    assert set(self.sampled[name]) == {self.mine}
                    assert told(self.rig, batch) == {self.version}
        self.rig.ack(batch)


@pytest.mark.parametrize(("pause", "says"), [(False, False), (False, True), (True, True)])
@given(seed=st.integers(0, 2**32))
def test_no_run_learns_from_another_and_nothing_lost_is_fresh(pause: bool, says: bool, seed: int) -> None:
    """Whenever a trainer is killed, and whoever comes next; also while an engine goes on in the middle of a call, where
    trainers say that they start."""
    dice, world = random.Random(seed), World(pause=pause, says=says)
    for _ in range(80):
        flying, ended = list(world.flights), list(world.sampled)
        die = dice.choice((0, 0, 1, 2, 3, 4, 5))
        match dice.choice(("begin", "begin", "finish", "end", "step", "step", "start", "another", "back", "lease")):
            case "begin":
                world.begin()
            case "finish" if flying:
                world.finish(dice.choice(flying))
            case "end":
                for name in dice.sample(ended, min(len(ended), 3)):
                    world.end(name)
            case "back":
                world.back()
            case "lease" if not world.dead:
                world.lease(dice.choice((None, 0, 0, 0)))
            case "step" if not world.dead:
                world.step(die, save=dice.random() < 0.5)
            case "start":
                world.rig.at += 100.0
                world.start(die)
            case "another" if dice.random() < 0.4:
                world.another(die)
        for name in world.flights if pause or not world.shut else ():
            world.sample(name)
    again = State(SETTINGS)
    for event in world.rig.events:
        again.apply(decode(encode(event, again.episodes), again.episodes))
    assert (again.weights.births, again.seats.queues) == (world.rig.state.weights.births, world.rig.state.seats.queues)
    kept = world.rig.state.weights.births["m"]
    assert snapshot.unpack(snapshot.pack(kept)) == kept


def test_restarts_are_compact() -> None:
    """Updates cost nothing; a start of a trainer costs a branch."""
    births = Births()
    births.begin("a", 1)
    for version in range(1000):
        births.serves(version, version + 2)
    assert births.last == 1
