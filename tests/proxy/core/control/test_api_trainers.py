"""Trainers as the routes have them: who they are, what went of another run, and whose requests are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.identity.keys import EVERYTHING, Claims
from ajet_sdk.errors import Conflict, Forbidden
from tests.kit.control_rig import Caller
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused


def post(rig: LedgerRig, path: str, body: Any, trainer: str = "", claims: Claims = EVERYTHING) -> Any:
    return Caller(rig).post(path, body, trainer=trainer, claims=claims)


def says(word: str, run: str = "a") -> dict[str, str]:
    return {"model": "m", "run": run, "instance": f"{run}1", "says": word, "host": "h", "folder": f"/{run}"}


def test_what_goes_of_another_run_is_counted(rig: LedgerRig) -> None:
    post(rig, "/trainers", says("comes"))
    assert post(rig, "/trainers", says("begins")) == {"model": "m", "run": "a", "discarded": 0, "void": 0}
    post(rig, "/policy", {"model": "m", "version": 0, "run": "a"}, "a1")
    leased, ready = [(rig.ready(), rig.ready()) for _ in range(2)]
    assert post(rig, "/batches/lease", {"group_size": 1, "groups": 2}, "a1") is not None
    assert leased and ready
    rig.at += 30.0
    post(rig, "/trainers", says("comes", "b"))
    told = post(rig, "/trainers", says("begins", "b"))
    assert told == {"model": "m", "run": "b", "discarded": 4, "void": 1}
    again = post(rig, "/policy", {"model": "m", "version": 0, "run": "b"}, "b1")
    assert again == {"model": "m", "policy_version": 0, "upstreams": [], "run": "b", "discarded": 0, "void": 0}


def test_whose_place_was_taken_is_refused_whatever_it_asks(rig: LedgerRig) -> None:
    post(rig, "/trainers", says("comes"))
    post(rig, "/policy", {"model": "m", "version": 0, "run": "a"}, "a1")
    rig.ready()
    batch = post(rig, "/batches/lease", {"group_size": 1}, "a1")["batch"]
    rig.at += 30.0
    post(rig, "/trainers", says("comes", "b"))
    for path, body in (
        ("/policy", {"model": "m", "version": 1, "run": "a"}), ("/gate/close", {"model": "m"}), ("/gate/close", {}),
        ("/gate/open", {"policy_version": 1, "model": "m"}), ("/batches/lease", {"model": "m"}),
        (f"/batches/{batch}/ack", {"policy_version": 1}), (f"/batches/{batch}/nack", {}),
        (f"/batches/{batch}/extend", {}), ("/evaluations", {"model": "m", "episodes": 1}), ("/trainers", says("beats")),
    ):
        with refused(Conflict, "other_trainer"):
            post(rig, path, body, "a1")
    assert post(rig, "/gate/open", {"policy_version": 0, "model": "m"})["gate"] == "open"  # by hand


def test_a_trainer_is_checked_as_every_caller(rig: LedgerRig) -> None:
    with pytest.raises(Forbidden):
        post(rig, "/trainers", says("comes"), claims=Claims("trainer", model="n"))


def test_the_key_of_a_model_reaches_its_candidate_and_no_other(rig: LedgerRig) -> None:
    claims = Claims("trainer", model="m")
    rig.announce("m", 0)
    rig.announce("n", 0)
    rig.stands("other", 1, "n")
    stands = {"model": "next", "version": 4, "upstreams": ["http://e"], "candidate_of": "m"}
    assert post(rig, "/policy", stands, claims=claims) == {
        "model": "next", "policy_version": 4, "upstreams": ["http://e"],
    }  # fmt: skip
    wanted = {"episodes": 1, "id": "e"}
    post(rig, "/evaluations", {"model": "next", **wanted}, claims=claims)
    assert Caller(rig).ask("GET", "/evaluations/e", claims=claims)["model"] == "next"
    for path, body in (
        ("/evaluations", {"model": "other", **wanted}), ("/policy", {**stands, "candidate_of": "n"}),
        ("/policy", {"model": "unknown", "version": 1}), ("/evaluations", {"model": ["m"], **wanted}),
    ):
        with refused(Forbidden, "foreign_model"):
            post(rig, path, body, claims=claims)


def test_whose_place_was_taken_proposes_nothing(rig: LedgerRig) -> None:
    post(rig, "/trainers", says("comes"))
    rig.announce("m", 0)
    rig.stands("next", 4)
    rig.at += 30.0
    post(rig, "/trainers", says("comes", "b"))
    for path, body in (
        ("/policy", {"model": "next", "version": 5, "candidate_of": "m"}),
        ("/evaluations", {"model": "next", "episodes": 1}),
    ):
        with refused(Conflict, "other_trainer"):
            post(rig, path, body, "a1")
