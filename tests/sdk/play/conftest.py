"""Fixtures that tests of playing share."""

from __future__ import annotations

import pytest

from ajet_sdk.play import data_set, rollouts, schedule


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all that is waited for come soon, and what failed be played again soon."""
    for module, name in ((rollouts, "WANTED_S"), (schedule, "AGAIN_S"), (data_set, "LOOK_S")):
        monkeypatch.setattr(module, name, 0.01)
