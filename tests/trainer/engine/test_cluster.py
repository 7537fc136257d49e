"""Ray for the length of a run."""

from __future__ import annotations

import inspect

import pytest
import ray
from transfer_queue import interface

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl.cluster import STORE, refuse_another


def test_a_ray_is_for_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransferQueue would give the second one the store of the first."""
    there = {STORE: object()}

    def get_actor(name: str, namespace: str) -> object:
        try:
            return there[name, namespace]
        except KeyError:
            raise ValueError(name) from None

    monkeypatch.setattr(ray, "get_actor", get_actor)
    with pytest.raises(ConfigError, match="another run is at work in this Ray"):
        refuse_another()
    there.clear()
    refuse_another()
    assert 'get_actor("{}", namespace="{}")'.format(*STORE) in inspect.getsource(interface._init_from_existing)
