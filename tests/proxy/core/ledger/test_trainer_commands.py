"""One trainer of a model at a time: who is heard, who takes over, and who is refused from then on."""

from __future__ import annotations

import pytest

from ajet_sdk.errors import Conflict
from tests.kit.ledger_rig import LedgerRig


def refused(rig: LedgerRig, says: str, run: str, instance: str = "") -> str:
    with pytest.raises(Conflict) as raised:
        rig.attend(says, run, instance)
    assert raised.value.code == "other_trainer"
    return raised.value.message


def test_a_second_trainer_is_refused_while_the_first_is_heard(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    for _ in range(5):
        rig.at += 29.0
        said = refused(rig, "comes", "b")
        assert "on host in /a (run a)" in said
        rig.attend("beats", "a")
    rig.at += 30.0
    rig.attend("comes", "b")
    assert "in /b (run b)" in refused(rig, "beats", "a")


def test_a_lease_is_no_beat(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    rig.announce(version=0, run="a")
    rig.ready()
    assert rig.lease(group_size=1, lease_s=1000.0)
    rig.at += 31.0
    rig.attend("comes", "b")


def test_who_was_taken_over_never_comes_back_by_a_beat(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    rig.at += 30.0
    rig.attend("comes", "b")
    rig.at += 1000.0
    for says in ("beats", "begins", "leaves"):
        refused(rig, says, "a")
    rig.attend("leaves", "b")
    refused(rig, "beats", "a")
    rig.attend("comes", "a", "a2")


def test_another_process_of_the_same_folder_takes_over_at_once(rig: LedgerRig) -> None:
    rig.attend("comes", "a", "a1")
    rig.attend("comes", "a", "a2")
    refused(rig, "beats", "a", "a1")
    rig.attend("beats", "a", "a2")


def test_who_has_left_is_not_waited_for(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    rig.attend("leaves", "a")
    assert rig.attend("leaves", "a") == ()
    rig.attend("beats", "a")  # on its way when the trainer left
    rig.attend("comes", "b")


def test_after_a_restart_the_first_is_heard_for_30_s(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    rig.at += 1000.0
    rig.restart()
    rig.at += 29.0
    refused(rig, "comes", "b")
    rig.attend("beats", "a")
    rig.at += 29.0
    refused(rig, "comes", "b")
    rig.at += 1.0
    rig.attend("comes", "b")


def test_a_daemon_that_knows_nobody_takes_who_beats(rig: LedgerRig) -> None:
    rig.attend("beats", "a")
    refused(rig, "comes", "b")


def test_another_run_is_not_announced_while_a_trainer_is_heard(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    rig.attend("begins", "a")
    rig.announce(version=3, run="a")
    with pytest.raises(Conflict, match="is at work"):
        rig.announce(version=0, run="b")
    rig.at += 30.0
    rig.announce(version=0, run="b")


def test_each_model_has_a_trainer(rig: LedgerRig) -> None:
    rig.attend("comes", "a", model="m")
    rig.attend("comes", "b", model="n")


def test_a_run_begins_once_with_each_process(rig: LedgerRig) -> None:
    rig.attend("comes", "a")
    assert [type(event).__name__ for event in rig.attend("begins", "a")] == ["RunBegan"]
    assert rig.attend("begins", "a") == ()
    rig.attend("comes", "a", "a2")
    assert len(rig.attend("begins", "a", "a2")) == 1
