"""The whole run at a glance, from the state alone."""

from __future__ import annotations

import json

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.views import SHOWN, overview
from tests.kit.ledger_rig import LedgerRig
from tests.kit.steps import steps


def test_the_overview_of_nothing() -> None:
    assert overview(LedgerRig().state, 5.0) == {
        "now": 5.0, "rewards": {kind: {"episodes": 0, "points": []} for kind in ("train", "eval")}, "tasks": [],
        "quiet": [], "leases": [], "lanes": [],
    }


def test_the_overview_of_something(rig: LedgerRig) -> None:
    rig.ready("t", version=3)
    rig.ready("t", version=4)
    batch = rig.lease()
    quiet = rig.open(task="slow", agent="a")
    rig.at = 1010.0
    busy = rig.open(task="busy")
    rig.begin(busy)
    shown = json.loads(json.dumps(overview(rig.state, 1025.0)))
    assert shown["leases"] == [{
        "batch": batch, "model": "m", "policy_version": 0, "groups": 1, "episodes": 2, "lease_until": 1300.0,
    }]
    assert [(point["policy_versions"], point["mean"]) for point in shown["rewards"]["train"]["points"]] == [
        ([3, 3], 1.0), ([4, 4], 1.0),
    ]
    assert [task["task"] for task in shown["tasks"]] == ["t"]
    assert shown["quiet"] == [
        {"episode": quiet, "task": "slow", "agent": "a", "state": "open", "age_s": 25.0, "quiet_s": 25.0,
         "in_flight": 0, "calls": 0, "idle_timeout": 100.0},
        {"episode": busy, "task": "busy", "agent": None, "state": "open", "age_s": 15.0, "quiet_s": 15.0,
         "in_flight": 1, "calls": 1, "idle_timeout": 100.0},
    ]


def test_after_ten_thousand_episodes_it_is_still_short() -> None:
    rig = LedgerRig()
    for number in range(10_000):
        rig.open(task=f"t{number}")
    rig.state.tallies.reward_curves.add("train", "ep", "t", 1.0, at=0.0, version=0)
    assert steps(lambda: views.status(rig.state)) < 100
    assert steps(lambda: overview(rig.state, 0.0)) < 10_000 + 500, "one look at each open episode"
    assert [lane["lane"] for lane in overview(rig.state, 0.0)["lanes"]] == ["default"]
    shown, status = overview(rig.state, 0.0), views.status(rig.state)
    assert len(shown["quiet"]) == SHOWN
    assert status["episodes"]["open"] == 10_000
