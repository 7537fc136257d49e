"""Weights that serve, and candidates: those have a name and evaluations, and count for nothing else."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.plays import STANDS_S
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.limits import MAX_VERSION
from ajet_sdk.routes import GateOpen
from ajet_sdk.sample import spans_of
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused


@pytest.fixture
def rig(rig: LedgerRig) -> LedgerRig:
    rig.announce("m", 0, ("http://engine",))
    return rig


def plays(rig: LedgerRig, model: str, reward: float | None = 1.0) -> None:
    rig.ends(rig.open(eval=True, model=model), reward, model=model)


def test_a_candidate_has_a_version_and_engines_and_is_no_announced_model(rig: LedgerRig) -> None:
    before, room = views.status(rig.state)["models"], views.wanted(rig.state)
    rig.stands("next", 4, "m", "http://beside")
    weights, status = rig.state.weights, views.status(rig.state)
    assert (weights.policy_version("next"), weights.upstreams("next")) == (4, ("http://beside",))
    assert (weights.owner("next"), weights.owner("m")) == ("m", "m")
    assert (status["models"], views.wanted(rig.state)) == (before, room)
    assert status["candidates"] == {"next": {"of": "m", "policy_version": 4, "upstreams": ["http://beside"]}}
    assert (weights.models(), weights.only_model(), weights.may_train(), weights.meant(None)) == (
        ("m",), "m", ("m",), "m"
    )  # fmt: skip
    assert weights.policy_version("m") == 0 and weights.teams == []
    rig.restart()
    assert rig.state.weights.owner("next") == "m"


def test_the_same_version_again_is_other_weights(rig: LedgerRig) -> None:
    """As after weights that were thrown away. No branch of versions begins by that."""
    rig.stands("next", 4)
    assert rig.stands("next", 4) != ()
    assert rig.state.weights.born("m").last == rig.state.weights.born("next").last == 0


@pytest.mark.parametrize(("model", "of"), [("m", "m"), ("next", "unknown"), ("next", "n")])
def test_no_candidate_has_the_name_of_what_serves_or_of_another_s_or_is_one_of_nothing(
    rig: LedgerRig, model: str, of: str
) -> None:
    rig.announce("n", 1)
    rig.stands("next", 1)
    with refused(Conflict, "no_candidate"):
        rig.stands(model, 1, of)


def test_a_name_that_is_announced_is_no_candidate_any_more(rig: LedgerRig) -> None:
    rig.stands("next", 4)
    rig.announce("next", 1)
    assert rig.state.weights.owner("next") == "next" and rig.state.weights.policy_version("next") == 1
    assert "candidates" not in views.status(rig.state)


def test_its_evaluation_is_wanted_beside_that_of_what_serves(rig: LedgerRig) -> None:
    rig.stands("next", 4)
    first, second = rig.evaluate("m", 1), rig.evaluate("next", 2)
    assert rig.state.plays.wanted() == {"m": 1, "next": 2}
    plays(rig, "next", 0.5)
    plays(rig, "m")
    plays(rig, "next", None)
    told = [one.to_json() for name in (first, second) if (one := rig.state.plays.evaluation(name)) is not None]
    assert [one["policy_version"] for one in told] == [0, 4]
    assert [[(each["reward"], each["tokens"]) for each in one["played"]] for one in told] == [
        [(1.0, 1.0)], [(0.5, 1.0), (None, 1.0)]
    ]  # fmt: skip


def test_an_evaluation_that_stands_still_raises_an_alert(rig: LedgerRig) -> None:
    def alerts() -> list[str]:
        rig.open(eval=True)  # by which the ledger hears how late it is
        return [line for about, line in rig.state.alerts().items() if about.startswith("candidate")]

    rig.attend("comes")
    rig.stands("next", 4)
    rig.at += STANDS_S
    assert alerts() == []
    rig.at += 1.0
    assert alerts() == [
        "candidate 'next' of model 'm' (version 4) waits for its evaluation: does anybody play "
        "(`ajet run --eval --wanted`), and is its engine there?"
    ]
    rig.evaluate("next", 1)
    assert alerts() == []
    rig.at += STANDS_S + 1.0
    assert len(alerts()) == 1
    plays(rig, "next")
    rig.at += STANDS_S + 1.0
    assert alerts() == [], "it is played"
    rig.stands("next", 8)
    rig.at += STANDS_S + 1.0
    assert len(alerts()) == 1
    rig.attend("leaves")
    assert alerts() == [], "nobody waits for it"


def test_announcing_a_policy(rig: LedgerRig) -> None:
    assert rig.state.weights.policy_version("m") == 0
    rig.announce("m", 3, ("http://a", "http://b"))
    assert rig.announce("m", 3) == ()
    assert rig.announce("m", 3, ("http://a", "http://b")) == ()
    rig.announce("m", 4)
    assert (rig.state.weights.policy_version("m"), rig.state.weights.upstreams("m")) == (4, ("http://a", "http://b"))
    rig.announce("m", 2, ())
    assert (rig.state.weights.policy_version("m"), rig.state.weights.upstreams("m")) == (2, ())
    assert rig.state.weights.upstreams("other") == ()
    assert (rig.state.weights.models(), rig.state.weights.only_model()) == (("m",), "m")
    rig.announce("n", 1)
    assert rig.state.weights.only_model() == ""


def test_the_version_at_the_gate_is_that_of_the_one_model() -> None:
    rig = LedgerRig()
    rig.gate_open(2)
    assert rig.state.weights.policy_version("anything") == 2
    rig.announce("m", 3)
    rig.gate_close()
    rig.gate_open(4)
    rig.announce("n", 1)
    assert [rig.state.weights.policy_version(model) for model in ("m", "n")] == [4, 1]


@pytest.mark.parametrize("version", [0, 1, MAX_VERSION])
def test_versions_are_what_a_batch_can_say(version: int) -> None:
    opened = LedgerRig().commands.trainers.gate_open(GateOpen(version), at=1.0)
    assert opened == ((ev.GateOpened(1.0, version),) if version else ())
    assert spans_of([[version, 1]], 1) == ((version, 1),)
    with pytest.raises(BadRequest):
        spans_of([[version + MAX_VERSION + 1, 1]], 1)
