"""What an engine serves is compared with what the trainer computes, before anything is trained."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import Engine
from tests.e2e.training.test_attached import restore
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import FLOAT32, TrainerProcess
from tests.kit.vllm_process import vllm_server

pytestmark = pytest.mark.slow


def ended(folder: Path, model: Path, engine: str) -> str:
    """What a run says that was to train an engine with `model` and ended by itself."""
    folder.mkdir()
    ours = {"model": model, "model_name": "tiny", "engine_urls": [engine], "total_steps": 1}
    with (
        ProxyProcess(f"tiny={engine}", folder / "proxy") as proxy,
        TrainerProcess(folder, {"proxy_url": proxy.url, **ours}, FLOAT32) as trainer,
    ):
        assert trainer.wait(300) == 1, trainer.words()
        assert proxy.report()["gate"]["state"] == "open"
    assert not trainer.metrics()
    return trainer.words()


def test_a_mixture_of_experts_that_takes_no_weights_is_not_trained(tmp_path: Path) -> None:
    """vLLM's CPU build answers 200 to its own unchanged weights, and says something else from then on."""
    model = build(tmp_path / "mixture", experts=4)
    with vllm_server(model, tmp_path / "vllm.log") as url:
        said = ended(tmp_path / "run", model, url)
    assert "does not compute what was pushed to it: its logprobs of 32 tokens of its own are" in said
    assert "not loaded" in (tmp_path / "vllm.log").read_text()


@pytest.mark.filterwarnings("ignore")  # verl, imported to restore the engine, warns of engines it lacks
def test_an_engine_of_other_layers_is_not_trained(tmp_path: Path, shaped: Engine) -> None:
    """Its tensors have the same names and sizes, and it would take a part of them for the whole."""
    try:
        said = ended(tmp_path / "run", build(tmp_path / "one", layers=1), shaped.url)
    finally:
        restore(shaped, tmp_path / "weights")
    assert "serves another model: its num_hidden_layers is 2, and that of" in said


def test_an_engine_that_is_started_again_with_another_model_ends_the_run(tmp_path: Path) -> None:
    """Nothing that it samples is trained, and neither its weights nor its agents are touched."""
    one, other, port = build(tmp_path / "one"), build(tmp_path / "other", layers=1), free_port()
    ours = {"model": one, "model_name": "tiny", "engine_urls": [f"http://127.0.0.1:{port}"]}
    with ProxyProcess(f"tiny=http://127.0.0.1:{port}", tmp_path / "proxy") as proxy, ExitStack() as ends:
        with vllm_server(one, tmp_path / "vllm.log", port=port):
            trainer = TrainerProcess(tmp_path, {"proxy_url": proxy.url, **ours}, FLOAT32)
            ends.enter_context(trainer)
            trainer.until(lambda: trainer.phase() == "waiting for episodes", 300)
            trainer.until((tmp_path / "proxy" / "engines.json").exists, 300)
            trainer.process.send_signal(signal.SIGSTOP)  # it would see that the engine is gone
        with vllm_server(other, tmp_path / "other.log", port=port):
            trainer.process.send_signal(signal.SIGCONT)
            assert trainer.wait(300) == 1, trainer.words()
            give_up = time.monotonic() + 300.0
            while not any("serves tiny from" in alert for alert in proxy.report()["alerts"]):
                assert time.monotonic() < give_up
                time.sleep(0.5)
    assert "was started again with another model: it serves tiny from" in trainer.words()
