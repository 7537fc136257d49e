"""A proxy that cannot be told that a batch is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import Conflict, NotFound
from tests.trainer.making import episode
from tests.trainer.test_step import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "run", 3)


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("elsewhere")])
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
