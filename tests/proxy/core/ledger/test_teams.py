"""The lead that a model may have over those that learn from the same episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.teams import join, moved, slowest
from tests.kit.histories import folded
from tests.kit.ledger_rig import LedgerRig, picture

LEADS = st.sampled_from([None, 0, 0, 1, 2])
SAVE_FREQ = 10


class Training:
    """A rig with a trainer for each model, which acknowledges at every tenth update alone. There is always enough to
    train."""

    def __init__(self, leads: dict[str, int | None]) -> None:
        self.rig, self.leads = LedgerRig(), leads
        self.versions = dict.fromkeys(leads, 4)
        self.held: dict[str, list[str]] = {model: [] for model in leads}
        self.trains = dict.fromkeys(leads, False)
        for model in leads:
            self.rig.announce(model, 4)
        self.play()

    def play(self) -> None:
        self.rig.ready(members={f"agent {model}": model for model in self.leads})

    def go_on(self, model: str) -> bool:
        """The trainer of `model` makes the update that it has a batch for, or asks for one. Whether it waits."""
        if self.trains[model]:
            self.trains[model] = False
            self.versions[model] += 1
            self.rig.gate_open(self.versions[model], model)
            if self.versions[model] % SAVE_FREQ == 0:
                for batch in self.held[model]:
                    self.rig.ack(batch, self.versions[model])
                self.held[model].clear()
            return False
        if model not in {one for one, _ in self.rig.state.seats.queues.ready()}:
            self.play()
        batch = self.rig.lease(model=model, group_size=1, lease_s=6e5, max_lead=self.leads[model])
        if batch is not None:
            self.held[model].append(batch)
            self.trains[model] = True
        return batch is None

    def lead(self, model: str) -> int:
        return self.versions[model] - min(self.versions.values())


@settings(max_examples=50)
@given(LEADS, LEADS, LEADS, st.lists(st.sampled_from("mno"), max_size=60))
def test_who_is_further_ahead_than_it_may_waits_and_nobody_else_does(
    m: int | None, n: int | None, o: int | None, turns: Sequence[str]
) -> None:
    training = Training({"m": m, "n": n, "o": o})
    for model in turns:
        most, asks = training.leads[model], not training.trains[model]
        may = most is None or training.lead(model) <= most
        assert training.go_on(model) == (asks and not may)
        assert most is None or training.lead(model) <= most + 1, "the update that it begins is at most so much further"
    rig = training.rig
    assert picture(rig.state) == picture(folded(rig.events))


@settings(max_examples=30)
@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1000))
def test_two_that_wait_for_one_another_go_on_however_seldom_they_save(m: int, n: int, seed: int) -> None:
    training, chance = Training({"m": m, "n": n}), random.Random(seed)
    for _ in range(400):
        model = chance.choice("mn")
        waits = training.go_on(model)
        assert not (waits and training.lead(model) == 0), "the slowest waits for nobody"
    assert min(training.versions.values()) > 4 + 2 * SAVE_FREQ


def test_the_status_tells_who_waits_for_whom() -> None:
    training = Training({"m": 0, "n": None})
    state, leads = training.rig.state, training.rig.presence.leads
    assert not training.go_on("m") and not training.go_on("m")
    assert training.go_on("m"), "it is one ahead"
    assert views.status(state, leads)["teams"] == [{"m": {"updates": 1, "waits_for": "n"}, "n": {"updates": 0}}]
    assert views.status(state)["teams"] == [{"m": {"updates": 1}, "n": {"updates": 0}}]
    before = state.leasable()
    while training.lead("m"):
        training.go_on("n")
    assert state.leasable() != before, "a lease that waits looks again"
    assert views.status(state, leads)["teams"] == [{"m": {"updates": 1}, "n": {"updates": 1}}]
    assert not training.go_on("m")
    training.rig.lease(model="m")
    assert leads == {}, "of the latest lease"


def test_who_learns_alone_is_in_no_team_and_never_waits(rig: LedgerRig) -> None:
    for version in range(3):
        rig.announce("m", version)
        rig.ready()
        assert rig.lease(model="m", group_size=1, max_lead=0) is not None
    assert "teams" not in views.status(rig.state)


def test_who_joins_begins_where_the_slowest_is() -> None:
    teams: list[dict[str, int]] = []
    join(teams, ["a"])
    assert teams == [] and slowest(teams, "a") == ("a", 0)
    join(teams, ["a", "b"])
    join(teams, ["c", "d"])
    moved(teams, "a", 7, 9)
    moved(teams, "b", 0, 1)
    moved(teams, "c", 1, 4)
    moved(teams, "x", 1, 4)
    join(teams, ["b", "a"])
    assert teams == [{"a": 2, "b": 1}, {"c": 3, "d": 0}]
    join(teams, ["b", "c", "e"])
    assert teams == [{"a": 1, "b": 0, "c": 3, "d": 0, "e": 0}]
    assert (slowest(teams, "c"), slowest(teams, "e")) == (("b", 3), ("b", 0))


def test_who_goes_back_is_further_behind_and_who_begins_anew_is_level_with_the_slowest() -> None:
    teams = [{"a": 5, "b": 3, "c": 4}]
    moved(teams, "a", 25, 20)
    assert teams == [{"a": 0, "b": 3, "c": 4}]
    moved(teams, "a", 20, 0)
    assert teams == [{"a": 3, "b": 3, "c": 4}]
    moved(teams, "a", 0, 0)
    moved(teams, "b", 3, 4)
    moved(teams, "a", 0, 0)
    assert teams == [{"a": 3, "b": 4, "c": 4}]


def test_a_model_that_is_announced_later_begins_with_its_team() -> None:
    """Its trainer may go on at a version of long ago."""
    training = Training({"m": 1})
    rig = training.rig
    training.leads["n"] = None
    training.play()
    training.go_on("m"), training.go_on("m")
    assert rig.state.weights.teams == [{"m": 1, "n": 0}]
    rig.announce("n", 40)
    assert rig.state.weights.teams == [{"m": 1, "n": 0}]
    rig.announce("n", 41)
    assert rig.state.weights.teams == [{"m": 1, "n": 1}]
