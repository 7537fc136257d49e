"""Agents that are ahead of the weights that train: the gate, the bound on every token, and who was idle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ajet_sdk.sample import BatchEpisode, Group
from ajet_trainer.admission import Admission
from ajet_trainer.figures import staleness
from ajet_trainer.idle import Idle
from tests.trainer.making import batch, episode, sample
from tests.trainer.scripted_learner import MemoryProxy
from tests.trainer.test_link import Clock
from tests.trainer.test_step import Setting


@pytest.mark.parametrize(("overlap", "trains"), [(None, "open"), (0, "closed"), (1, "open"), (2, "open")])
def test_without_overlap_agents_are_held_while_a_step_trains(
    tmp_path: Path, overlap: int | None, trains: str
) -> None:
    """By the gate of an engine that stands alone, from before the training until it has the new weights."""
    setting, gates = Setting(tmp_path, 1, overlap=overlap), list[str]()
    run = setting.begun(colocated=False)
    setting.instants.happens = {
        at: lambda: gates.append(setting.proxy.gate) for at in range(setting.instants.seen, setting.instants.seen + 99)
    }
    setting.instants.names.clear()
    run.step()
    seen = dict(zip(setting.instants.names, gates, strict=True))
    assert (seen["before training"], seen["after training"]) == (trains, trains)
    assert seen["before the push"] == seen["after the push"] == "closed"
    assert setting.proxy.gate == "open"


def test_what_is_too_stale_for_the_weights_that_train_is_never_trained(tmp_path: Path) -> None:
    """Whatever the daemon leases: it may know an older version than the trainer. The daemon hears why."""
    setting = Setting(tmp_path, 8, max_staleness=2, group_size=2)
    setting.proxy = MemoryProxy(8, setting.instants, singly=True)

    def make(task: str) -> tuple[BatchEpisode, ...]:
        behind, now = {"0g0": 1, "3g1": 3, "5g0": 7}.get(task, 2), setting.learner.version
        return tuple(episode(f"{task}e{i}", i, version=max(0, now - behind + i % 2)) for i in range(2))

    setting.proxy.make = make
    setting.whole()
    lines = setting.lines()
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert [line["rejected_episodes"] for line in lines] == [0, 0, 0, 2, 0, 2, 0, 0]
    assert setting.proxy.filtered == {
        "3g1e0": "stale: 3g1e0/0: tokens of version 0, older than 1", "3g1e1": "no_baseline: alone in the group of "
        "task 3g1", "5g0e0": "stale: 5g0e0/0: tokens of version 0, older than 3",
        "5g0e1": "stale: 5g0e1/0: tokens of version 0, older than 3",
    }  # fmt: skip


def test_staleness_is_counted_in_tokens() -> None:
    mixed = replace(sample("e/0", turns=2), policy_versions=((3, 1), (5, 5)))
    one = replace(episode("e"), samples=(mixed,))
    hand = [(batch("b", Group("t", (one,))), Admission((Group("t", (one,)),), ()))]
    assert staleness(hand, 5) == {"staleness_mean": 2 / 6, "staleness_max": 2}


def test_idle_shares_go_from_step_to_step(tmp_path: Path) -> None:
    """Of the trainer that waits, and of the engine that nobody asks; `busy` is what the daemon tells."""
    setting, clock = Setting(tmp_path, 2), Clock()
    run = setting.start()
    run.idle, run.progress.clock = Idle(clock), clock
    setting.proxy.busy = 10.0
    run.start()

    def later(seconds: float, busy: float) -> None:
        clock.now += seconds
        assert setting.proxy.busy is not None
        setting.proxy.busy += busy

    at = setting.instants.seen
    setting.instants.happens = {at: lambda: later(3.0, 3.0), at + 3: lambda: later(5.0, 1.0)}
    run.step()
    at = setting.instants.seen
    setting.instants.happens = {at + 3: lambda: later(4.0, -12.0)}
    run.step()
    lines = setting.lines()
    assert [line["idle"] for line in lines] == [
        {"trainer": 0.375, "engine": 0.5}, {"trainer": 0.0, "engine": 0.5},
    ]  # fmt: skip
