"""The watchdog around a weight push, with verl's own sender and a receiver that never comes."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from ajet_trainer.backends.verl import ADDRESS
from ajet_trainer.backends.verl.backend import environment, listens
from ajet_trainer.backends.verl.cluster import come_up
from ajet_trainer.backends.verl.weights import SharedFolder, wait
from ajet_trainer.backends.verl.worker import RUN_WORD, own_socket, run_word
from ajet_trainer.engines import EngineLost
from ajet_trainer.engines.weights import forget


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    with patch.dict(os.environ, RAY_worker_niceness="0"):  # other tests would take all of a processor
        come_up({
            "address": "local", "num_cpus": 2, "include_dashboard": False, "logging_level": "ERROR",
            "log_to_driver": False, "object_store_memory": 100 << 20,
            "runtime_env": {"env_vars": {"VERL_PLATFORM": "cpu", "VERL_LOGGING_LEVEL": "ERROR"}},
        })
    yield ray
    ray.shutdown()


def send_to_nobody(folder: str) -> None:
    """The part of a training process in a push: verl's sender, whose receiver died before it connected."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender = BucketedWeightSender(f"ipc://{folder}/push.sock", bucket_size_mb=1, use_shm=True)
    Path(folder, "sending").touch()
    asyncio.run(sender.async_send_weights(iter([("w", torch.zeros(4))])))


def test_a_push_whose_receiver_died_ends_with_a_clear_error(ray_here: Any, tmp_path: Path) -> None:
    reference = ray_here.remote(send_to_nobody).remote(str(tmp_path))
    while not (tmp_path / "sending").exists():
        time.sleep(0.2)
    with pytest.raises(EngineLost, match=r"did not finish within 2 s"):
        wait([reference], lambda: None, 2.0)
    with pytest.raises(EngineLost, match="cannot finish: the engine at http://e is gone"):
        wait([reference], lambda: "the engine at http://e is gone")
    ray_here.cancel(reference, force=True)


def test_a_push_that_works_or_fails_is_reported_as_it_is(ray_here: Any) -> None:
    def fail() -> None:
        raise ValueError("no such tensor")

    wait([ray_here.remote(lambda: None).remote()], lambda: None)
    with pytest.raises(EngineLost, match="no such tensor"):
        wait([ray_here.remote(fail).remote()], lambda: None)


def test_the_folder_holds_the_newest_weights_only(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = SharedFolder(bucket_size=1, is_master=True, folder=str(tmp_path))
        tied = torch.full((2,), float(step))
        asyncio.run(writer.send_weights(iter([("w", tied), ("also_w", tied)]), global_steps=step))
        other = SharedFolder(bucket_size=1, is_master=False, folder=str(tmp_path / "other"))
        asyncio.run(other.send_weights(iter([("w", torch.zeros(2))]), global_steps=step))
        forget(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    saved = load_file(file := tmp_path / "2" / "model.safetensors")
    assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666, "an engine of another user may read it"
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {"w": [2.0, 2.0], "also_w": [2.0, 2.0]}


def test_weights_are_written_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    writer = SharedFolder(bucket_size=1, is_master=True, folder=str(tmp_path), dtype="bfloat16")
    weight, count = torch.tensor([1.0 + 2**-12, -3.0]), torch.tensor([7])
    asyncio.run(writer.send_weights(iter([("w", weight), ("n", count)]), global_steps=1))
    saved = load_file(tmp_path / "1" / "model.safetensors")
    assert saved["w"].dtype == torch.bfloat16 and saved["w"].tolist() == [1.0, -3.0]
    assert saved["n"].dtype == torch.int64 and weight.dtype == torch.float32


def test_weights_that_do_not_fit_are_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    writer = SharedFolder(bucket_size=1, is_master=True, folder=str(tmp_path))
    with pytest.raises(OSError, match=r"do not fit into .*/1, which has 0.0 GB free: set weights_dir"):
        asyncio.run(writer.send_weights(iter([("w", torch.zeros(2))]), global_steps=1))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_each_run_on_a_host_sends_weights_through_a_socket_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both ends call it alike; every Ray that is started calls its first job 01000000."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    engine, sockets = SimpleNamespace(model_runner=None, local_rank=0), set()
    monkeypatch.delenv(RUN_WORD, raising=False)
    for _ in range(2):
        monkeypatch.setenv(RUN_WORD, environment("cpu", tmp_path)[RUN_WORD])
        monkeypatch.setenv("VERL_RAY_JOB_ID", run_word())
        mine = own_socket("ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock", "01000000")
        assert vLLMColocateWorkerExtension._get_zmq_handle(engine) == mine
        sockets.add(mine)
        monkeypatch.delenv(RUN_WORD)
    assert len(sockets) == 2


def test_engines_are_reached_by_no_other_host_unless_the_proxy_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(ADDRESS, raising=False)
    here, alone = "http://127.0.0.1:8484", OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": None}}})
    assert listens(here, alone) == {ADDRESS: "127.0.0.1"}
    assert listens("http://gpu.example.com:8484", alone) == {}
    joined = OmegaConf.create({"ray_kwargs": {"ray_init": {"address": "head:6379"}}})
    assert listens(here, joined) == {}, "an engine may be on another node than the proxy"
    monkeypatch.setenv(ADDRESS, "10.0.0.1")
    assert listens(here, alone) == {ADDRESS: "10.0.0.1"}, "the proxy's end of a tunnel is here, and the proxy is not"
    monkeypatch.delenv(ADDRESS)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert listens(here, alone) == {}
