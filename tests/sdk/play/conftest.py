"""What tests of playing share."""

from __future__ import annotations

import pytest

from ajet_sdk.play import data_set, rollouts, schedule


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for comes soon, and what failed is played again soon."""
    for module, name in ((rollouts, "WANTED_S"), (schedule, "AGAIN_S"), (data_set, "LOOK_S")):
        monkeypatch.setattr(module, name, 0.01)
