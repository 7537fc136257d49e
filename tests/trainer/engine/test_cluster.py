"""Ray for the length of a run."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest
import ray
from transfer_queue import interface

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl.cluster import STORE, come_up, refuse_another

ALONE = """
import torch
from torch.distributed import all_reduce
from ajet_trainer.backends.verl.cpu_worker import start_gloo
start_gloo()
all_reduce(torch.ones(1))
"""


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


def test_a_host_that_is_slow_to_start_ray_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the try before end first."""
    begun = list[subprocess.Popen[bytes]]()

    def init(**settings: object) -> None:
        assert settings == {"address": "local"} and all(one.poll() is not None for one in begun)
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"]))
        if len(begun) < 3:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    come_up({"address": "local"})
    assert begun[-1].poll() is None
    begun[-1].kill()
    begun[-1].wait()
    monkeypatch.setattr(ray, "init", Mock(side_effect=ValueError("the address is wrong")))
    with pytest.raises(ValueError, match="the address is wrong"):
        come_up({})


def test_one_process_needs_no_port_that_somebody_may_have_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
        subprocess.run([sys.executable, "-c", ALONE], env=os.environ | at, check=True)
