"""Keys that may be set from afar are keys that verl has."""

from __future__ import annotations

import pytest

from ajet_trainer.backends.verl.settings import compose
from ajet_trainer.backends.verl.unread import keys
from ajet_trainer.config import Config
from ajet_trainer.runs.allowed import KNOBS

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_every_knob_is_a_key_of_verls() -> None:
    tree = keys(compose(Config(model="m"), "cpu", None))
    assert sorted(knob for knob in KNOBS if knob not in tree) == []
