"""What a run does about proxies that cannot be told that a batch is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import Conflict, NotFound
from ajet_trainer.daemons import Away
from ajet_trainer.trained_batches import TrainedBatch
from tests.trainer.making import episode
from tests.trainer.test_step import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "run", 3)


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("elsewhere"), Away("away")])
def test_a_lease_without_anything_to_train_may_be_gone(setting: Setting, error: Exception) -> None:
    setting.config = replace(setting.config, no_signal="drop")
    setting.proxy.make = lambda task: tuple(episode(f"{task}e{i}", 1.0, task=task) for i in range(2))

    def ack(*_: Any, **__: Any) -> None:
        setting.proxy.ready.clear()
        raise error

    setting.proxy.ack = ack  # type: ignore[method-assign]
    run = setting.start()
    run.start()
    run.step()
    assert setting.learner.version == 0
    assert run.keeper.held == ()


def test_the_end_of_a_run_waits_for_an_absent_proxy_once(setting: Setting) -> None:
    run = setting.start()
    patient = []

    def ack(daemon: str, *_: Any, last: bool = False, **__: Any) -> None:
        patient.append((daemon, last))
        raise Away(f"{daemon} is away")

    run.daemons.ack = ack  # type: ignore[method-assign]
    for number in range(3):
        run.batches.trained(TrainedBatch(f"b{number}", 1, (), "http://proxy"))
    run.batches.trained(TrainedBatch("b3", 1, (), "http://other"))
    run.batches.saved()
    run.acknowledge(last=True)
    there, gone = ("http://proxy", True), ("http://proxy", False)
    assert patient == [there, gone, gone, ("http://other", True)]
    assert len([line for line in setting.said if "the next start does" in line]) == 4
