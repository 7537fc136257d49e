"""What an engine serves is compared with what the trainer computes, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Engine
from tests.e2e.training.test_attached import restore
from tests.e2e.training.test_for_people import FLOAT32
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import TrainerProcess
from tests.kit.vllm_process import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def ended(folder: Path, model: Path, engine: str) -> str:
    """What a run says that was to train an engine with `model` and ended by itself."""
    folder.mkdir()
    ours = {"model": str(model), "model_name": "tiny", "engine_urls": [engine], "max_tokens": 256, "total_steps": 1}
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
    assert "does not compute what was pushed to it" in said
