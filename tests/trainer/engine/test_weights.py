"""The watchdog around a weight push, with verl's own sender and a receiver that never comes; and the attached push."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.kit.http_server import started
from tests.kit.ports import free_port

STARTS = 3
"""Ray gives itself 30 s for its start, which a busy machine may exceed."""


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    import ray

    for left in reversed(range(STARTS)):
        try:
            ray.init(
                address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
                object_store_memory=100 << 20,
                runtime_env={"env_vars": {"VERL_PLATFORM": "cpu", "VERL_LOGGING_LEVEL": "ERROR"}},
            )  # fmt: skip
            break
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
    yield ray
    ray.shutdown()


def send_to_nobody(folder: str) -> None:
    """What a training process does in a push: verl's sender, whose receiver died before it connected."""
    import torch
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender = BucketedWeightSender(f"ipc://{folder}/push.sock", bucket_size_mb=1, use_shm=True)
    Path(folder, "sending").touch()
    asyncio.run(sender.async_send_weights(iter([("w", torch.zeros(4))])))


def test_a_push_whose_receiver_died_ends_with_a_clear_error(ray_here: Any, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import wait
    from ajet_trainer.engines import EngineLost

    reference = ray_here.remote(send_to_nobody).remote(str(tmp_path))
    while not (tmp_path / "sending").exists():
        time.sleep(0.2)
    with pytest.raises(EngineLost, match=r"did not finish within 2 s"):
        wait([reference], lambda: None, 2.0)
    start = time.monotonic()
    with pytest.raises(EngineLost, match="cannot finish: the engine at http://e is gone"):
        wait([reference], lambda: "the engine at http://e is gone")
    assert time.monotonic() - start < 60
    ray_here.cancel(reference, force=True)


def test_a_push_that_works_or_fails_is_reported_as_it_is(ray_here: Any) -> None:
    from ajet_trainer.backends.verl.weights import wait
    from ajet_trainer.engines import EngineLost

    def fail() -> None:
        raise ValueError("no such tensor")

    wait([ray_here.remote(lambda: None).remote()], lambda: None, 60.0)
    with pytest.raises(EngineLost, match="no such tensor"):
        wait([ray_here.remote(fail).remote()], lambda: None, 60.0)


class Engine:
    """vLLM's control routes: answers `status[path]` (200 if unnamed), remembers what it was asked; -1 never answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.frozen = False
        self.busy = 0
        """How often it cannot forget, since a call uses what was computed."""
        self.meet: threading.Barrier | None = None
        self.status: dict[str, int] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                engine.asked.append(self.path)
                if engine.meet is not None and self.path == "/collective_rpc":
                    engine.meet.wait()
                status = engine.status.get(engine.path(self.path), 200)
                if status < 0:
                    time.sleep(5)
                    return
                if status == 200 and engine.path(self.path) in ("/pause", "/resume"):
                    engine.frozen = engine.path(self.path) == "/pause"
                told = {"is_paused": engine.frozen, "success": engine.busy <= 0}
                engine.busy -= engine.path(self.path) == "/reset_prefix_cache"
                body = json.dumps(told).encode() if status == 200 else b""
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST  # noqa: N815

        self.server, self.url = started(Handler)

    def path(self, asked: str) -> str:
        return asked.partition("?")[0]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_an_attached_engine_is_frozen_reloaded_and_woken(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into

    load_into([engine.url], tmp_path, 4, 5.0)
    assert engine.asked == [
        "/is_paused", "/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume",
        "/is_paused",
    ]  # fmt: skip


def test_an_engine_that_the_gate_has_frozen_is_not_frozen_again_but_woken(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into

    engine.frozen = True
    load_into([engine.url], tmp_path, 4, 5.0)
    assert engine.asked == [
        "/is_paused", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume",
        "/is_paused",
    ]  # fmt: skip


def test_an_engine_that_cannot_say_whether_it_is_frozen_is_frozen(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into

    engine.status["/is_paused"] = 404
    load_into([engine.url], tmp_path, 4, 5.0)
    assert engine.asked[:3] == ["/is_paused", "/pause?mode=keep", "/collective_rpc"]


def test_engines_load_at_once_and_all_are_woken_when_one_fails(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into
    from ajet_trainer.engines import EngineLost

    other = Engine()
    other.meet = engine.meet = threading.Barrier(2, timeout=10)
    engine.status["/collective_rpc"] = 500
    with pytest.raises(EngineLost, match="HTTP 500"):
        load_into([engine.url, other.url], tmp_path, 4, 5.0)
    assert engine.asked[-2:] == other.asked[-2:] == ["/resume", "/is_paused"]
    assert other.asked.count("/reset_prefix_cache") == 1 and "/reset_prefix_cache" not in engine.asked
    other.server.shutdown()
    other.server.server_close()


def test_an_engine_that_takes_no_version_is_woken_all_the_same(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into

    engine.status["/update_weight_version"] = 404
    load_into([engine.url], tmp_path, 4, 5.0)
    assert engine.asked[-3:] == ["/update_weight_version", "/resume", "/is_paused"]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/pause", 404, "start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", 500, r"HTTP 500 from /collective_rpc: ; it may have taken a part of them: start it again"),
        ("/collective_rpc", -1, "timed out"),
        ("/resume", 500, r"took the weights but does not continue \(HTTP 500 from /resume: \): start it again"),
    ],
)
def test_an_engine_that_does_not_take_them_is_woken_all_the_same(
    engine: Engine, tmp_path: Path, path: str, status: int, words: str
) -> None:
    from ajet_trainer.backends.verl.weights import load_into
    from ajet_trainer.engines import EngineLost

    engine.status[path] = status
    with pytest.raises(EngineLost, match=words):
        load_into([engine.url], tmp_path, 4, 1.0)
    assert "/resume" in engine.asked[-2:]


def test_an_engine_that_neither_takes_them_nor_goes_on_is_said_to_need_a_start(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into
    from ajet_trainer.engines import EngineLost

    engine.status |= {"/collective_rpc": 500, "/resume": 500}
    said = r"did not take the weights: HTTP 500 .*; nor does it continue \(HTTP 500 from /resume: \): start it again"
    with pytest.raises(EngineLost, match=said):
        load_into([engine.url], tmp_path, 4, 1.0)
    assert engine.asked.count("/resume") > 1


def test_an_engine_that_the_gate_has_frozen_need_not_forget(engine: Engine, tmp_path: Path) -> None:
    """Its calls go on from what the old weights computed, and no later call shares their salt."""
    from ajet_trainer.backends.verl.weights import load_into

    engine.frozen, engine.busy = True, 1000
    load_into([engine.url], tmp_path, 4, 1.0)
    assert engine.asked.count("/reset_prefix_cache") == 1 and not engine.frozen


def test_any_other_engine_is_asked_again_once_it_is_awake(engine: Engine, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.weights import load_into
    from ajet_trainer.engines import EngineLost

    engine.busy = 3
    load_into([engine.url], tmp_path, 4, 20.0)
    assert engine.asked[-3:] == ["/reset_prefix_cache"] * 3 and engine.asked.count("/reset_prefix_cache") == 4
    engine.busy = 1000
    with pytest.raises(EngineLost, match=r"keeps what the old ones computed, .* calls that the proxy does not hold"):
        load_into([engine.url], tmp_path, 5, 0.5)
    assert not engine.frozen and not any("reset_running_requests" in asked for asked in engine.asked)


def test_a_dead_engine_is_told_from_a_busy_one(engine: Engine) -> None:
    from ajet_trainer.backends.verl.weights import dead_engine

    assert dead_engine([engine.url]) is None
    assert "is gone" in (dead_engine([f"http://127.0.0.1:{free_port()}"]) or "")
    engine.status["/health"] = 503
    assert "reports that it is dead" in (dead_engine([engine.url]) or "")
    engine.status["/health"] = -1
    assert dead_engine([engine.url]) is None


def test_the_folder_holds_the_newest_weights_only(tmp_path: Path, verl_here: None) -> None:
    import torch
    from safetensors.torch import load_file

    from ajet_trainer.backends.verl.weights import SharedFolder, forget

    for step in (1, 2):
        writer = SharedFolder(bucket_size=1, is_master=True, folder=str(tmp_path))
        tied = torch.full((2,), float(step))
        asyncio.run(writer.send_weights(iter([("w", tied), ("also_w", tied)]), global_steps=step))
        other = SharedFolder(bucket_size=1, is_master=False, folder=str(tmp_path / "other"))
        asyncio.run(other.send_weights(iter([("w", torch.zeros(2))]), global_steps=step))
        forget(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    saved = load_file(tmp_path / "2" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {"w": [2.0, 2.0], "also_w": [2.0, 2.0]}


def test_each_run_on_a_host_sends_weights_through_a_socket_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verl_here: None
) -> None:
    """Both ends call it alike; every Ray that is started calls its first job 01000000."""
    from types import SimpleNamespace

    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from ajet_trainer.backends.verl.main import environment
    from ajet_trainer.backends.verl.worker import RUN_WORD, own_socket, run_word

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
