"""A whole model's weights into engines that stand alone, which are frozen, reloaded and woken."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ajet_trainer.engines import EngineLost, vllm
from ajet_trainer.engines.weights import dead_engine, load_into
from tests.kit.ports import free_port
from tests.trainer.stub_engine import StubEngine


def test_an_attached_engine_is_frozen_reloaded_and_woken(engine: StubEngine, tmp_path: Path) -> None:
    load_into([engine.url], tmp_path, 4, 300.0)
    assert engine.asked == [
        "/is_paused", "/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume",
        "/is_paused",
    ]  # fmt: skip


def test_an_engine_that_the_gate_has_frozen_is_not_frozen_again_but_woken(engine: StubEngine, tmp_path: Path) -> None:
    engine.frozen = True
    load_into([engine.url], tmp_path, 4, 300.0)
    assert engine.asked == [
        "/is_paused", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume",
        "/is_paused",
    ]  # fmt: skip


def test_an_engine_that_cannot_say_whether_it_is_frozen_is_frozen(engine: StubEngine, tmp_path: Path) -> None:
    engine.status["/is_paused"] = 404
    load_into([engine.url], tmp_path, 4, 300.0)
    assert engine.asked[:3] == ["/is_paused", "/pause?mode=keep", "/collective_rpc"]


def test_engines_load_at_once_and_all_are_woken_when_one_fails(
    engine: StubEngine, other: StubEngine, tmp_path: Path
) -> None:
    other.meet = engine.meet = threading.Barrier(2, timeout=300)
    engine.status["/collective_rpc"] = 500
    with pytest.raises(EngineLost, match="HTTP 500"):
        load_into([engine.url, other.url], tmp_path, 4, 300.0)
    assert engine.asked[-2:] == other.asked[-2:] == ["/resume", "/is_paused"]
    assert other.asked.count("/reset_prefix_cache") == 1 and "/reset_prefix_cache" not in engine.asked


def test_an_engine_that_takes_no_version_is_woken_all_the_same(engine: StubEngine, tmp_path: Path) -> None:
    engine.status["/update_weight_version"] = 404
    load_into([engine.url], tmp_path, 4, 300.0)
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
    engine: StubEngine, tmp_path: Path, path: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "WAKE_S", 1.0)
    engine.status[path] = status
    with pytest.raises(EngineLost, match=words):
        load_into([engine.url], tmp_path, 4, 3.0 if status < 0 else 300.0)
    assert "/resume" in engine.asked[-2:]


def test_an_engine_that_neither_takes_them_nor_goes_on_is_said_to_need_a_start(
    engine: StubEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "WAKE_S", 1.0)
    engine.status |= {"/collective_rpc": 500, "/resume": 500}
    said = r"did not take the weights: HTTP 500 .*; nor does it continue \(HTTP 500 from /resume: \): start it again"
    with pytest.raises(EngineLost, match=said):
        load_into([engine.url], tmp_path, 4, 300.0)
    assert "/resume" in engine.asked


def test_an_engine_that_the_gate_has_frozen_need_not_forget(engine: StubEngine, tmp_path: Path) -> None:
    """Its calls go on from what the old weights computed, and no later call shares their salt."""
    engine.frozen, engine.busy = True, 1000
    load_into([engine.url], tmp_path, 4, 300.0)
    assert engine.asked.count("/reset_prefix_cache") == 1 and not engine.frozen


def test_any_other_engine_is_asked_again_once_it_is_awake(
    engine: StubEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.busy = 3
    load_into([engine.url], tmp_path, 4, 300.0)
    assert engine.asked[-3:] == ["/reset_prefix_cache"] * 3 and engine.asked.count("/reset_prefix_cache") == 4
    engine.busy = 1000
    monkeypatch.setattr(vllm, "WAKE_S", 0.5)
    with pytest.raises(EngineLost, match=r"keeps what the old ones computed, .* calls that the proxy does not hold"):
        load_into([engine.url], tmp_path, 5, 300.0)
    assert not engine.frozen and not any("reset_running_requests" in asked for asked in engine.asked)


def test_a_dead_engine_is_told_from_a_busy_one(engine: StubEngine) -> None:
    assert dead_engine([engine.url]) is None
    assert "is gone" in (dead_engine([f"http://127.0.0.1:{free_port()}"]) or "")
    engine.status["/health"] = 503
    assert "reports that it is dead" in (dead_engine([engine.url]) or "")
    engine.status["/health"] = -1
    assert dead_engine([engine.url]) is None
