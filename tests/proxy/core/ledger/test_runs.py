"""Wishes for runs: which change takes another start, what is refused, and that a replay wants the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.runs import MAX_RUNS, forget, known_run, want
from ajet_sdk.errors import Conflict, NotFound
from ajet_sdk.runs import LIVE, changed, restarts
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused

LR = "verl.actor_rollout_ref.actor.optim.lr"
BASE = {"trainer.model": "m", "trainer.groups": 4, LR: 1e-5}


def wish(rig: LedgerRig, config: Any = None, desired: str = "running", run: str = "r", **more: Any) -> int:
    """Wants it; how many starts it takes by then."""
    said = {"supervisor": "s", "digest": "d", "restart": False, "at": rig.at} | more
    rig.run(want(rig.state.runs, run, desired=desired, config=BASE if config is None else config, **said))
    return rig.state.runs[run].starts


def test_a_start_is_taken_by_what_cannot_change_while_it_runs(rig: LedgerRig) -> None:
    assert wish(rig) == 1
    assert wish(rig, {**BASE, "trainer.groups": 8, LR: 1e-4, "trainer.save_freq": 1}) == 1
    with pytest.raises(Conflict) as caught:
        wish(rig, {**BASE, "trainer.model": "n", "verl.a": 1})
    assert (caught.value.code, caught.value.param) == ("needs_restart", "trainer.model,verl.a")
    assert wish(rig, {**BASE, "trainer.model": "n"}, restart=True) == 2
    assert rig.state.runs["r"].keys == {**BASE, "trainer.model": "n"}
    assert wish(rig, {**BASE, "trainer.model": "n"}, restart=True) == 3


def test_a_run_that_is_stopped_takes_any_change_and_begins_anew(rig: LedgerRig) -> None:
    wish(rig)
    assert wish(rig, desired="stopped") == 1
    assert wish(rig, {**BASE, "trainer.model": "n"}, desired="stopped") == 2
    assert wish(rig, {**BASE, "trainer.model": "n"}) == 3


def test_what_is_wanted_already_is_no_event(rig: LedgerRig) -> None:
    wish(rig)
    before = len(rig.events)
    wish(rig)
    assert len(rig.events) == before


def test_so_many_runs_and_no_more(rig: LedgerRig) -> None:
    for number in range(MAX_RUNS):
        wish(rig, run=f"r{number}")
    with refused(Conflict, "too_many_runs"):
        wish(rig, run="one-more")
    wish(rig, desired="stopped", run="r7")


def test_only_a_stopped_run_is_forgotten(rig: LedgerRig) -> None:
    wish(rig)
    for desired, runs_now in (("running", False), ("running", True), ("stopped", True)):
        wish(rig, desired=desired)
        with refused(Conflict, "run_not_stopped"):
            forget(rig.state.runs, "r", runs_now=runs_now, at=1.0)
    rig.run(forget(rig.state.runs, "r", runs_now=False, at=rig.at))
    assert not rig.state.runs
    with pytest.raises(NotFound):
        known_run(rig.state.runs, "r")


values = st.sampled_from([1, 2, True, "a"])
configs = st.dictionaries(st.sampled_from(["trainer.groups", "trainer.model", LR, "verl.b"]), values)


@given(st.lists(st.tuples(configs, st.sampled_from(["running", "stopped"]), st.booleans()), max_size=8))
def test_two_configurations_of_one_start_differ_only_in_what_a_run_can_take_up(
    wishes: list[tuple[dict[str, Any], str, bool]],
) -> None:
    """And starts never go back."""
    rig = LedgerRig()
    of_start: dict[int, dict[str, Any]] = {}
    for config, desired, restart in wishes:
        before = rig.state.runs["r"].starts if "r" in rig.state.runs else 0
        try:
            starts = wish(rig, config, desired, restart=restart)
        except Conflict:
            continue
        assert starts >= before
        first = of_start.setdefault(starts, config)
        assert restarts(changed(first, config)) == []
        assert json.loads(rig.state.runs["r"].config) == config


def test_live_keys_are_keys_of_the_tables() -> None:
    assert all(key.partition(".")[0] in ("trainer", "verl") for key in LIVE)
