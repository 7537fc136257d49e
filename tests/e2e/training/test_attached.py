"""The attached placement: an engine that was there before takes weights through its own routes and goes on serving.

One engine after another, at one address: that with the model that `learned` exported, and that with a mixture of
experts, which cannot be trained here.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.players import Players
from tests.e2e.training.conftest import EVERY, Learned
from tests.e2e.training.trained_rows import LORA, has_the_adapter, rows
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import FLOAT32, RATE, TRAINER, TrainerProcess, living
from tests.kit.vllm_process import vllm_server

STEPS, GROUPS, SIZE = 4, 2, 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the library of models warns of is not ours
def test_an_engine_that_stands_alone_takes_weights_and_adapters_of_its_own_model_alone(
    learned: Learned, tmp_path: Path
) -> None:
    model, port = tmp_path / "model", free_port()
    words = [str(TRAINER), "export", str(learned.run), str(model), "--step", str(EVERY)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.splitlines()[-1] == f"exported to {model}"
    verl = LORA | {"algorithm.adv_estimator": "ajet_turn"}
    options = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    with run(tmp_path / "adapter", model, port, verl, save_freq=1) as (proxy, trainer):
        with vllm_server(model, tmp_path / "vllm.log", options=options, port=port) as url:
            says_what_the_trainer_computed(url, learned)
            is_not_trained_as_a_model_of_other_layers(tmp_path / "one", port)
            takes_the_weights(tmp_path / "whole", model, port)
            takes_an_adapter(trainer, proxy, model)
            trainer.until((proxy.data_dir / "engines.json").exists)
            trainer.signal(signal.SIGSTOP)  # it would see that the engine is gone
        mixture = build(tmp_path / "mixture", experts=4)
        with vllm_server(mixture, tmp_path / "mixture.log", port=port):
            is_known_for_another_model(trainer, proxy)
            takes_no_weights_of_experts(tmp_path / "experts", mixture, port)
    assert "not loaded" in (tmp_path / "mixture.log").read_text()


@contextmanager
def run(
    folder: Path, model: Path, port: int, verl: dict[str, Any], **more: Any
) -> Iterator[tuple[ProxyProcess, TrainerProcess]]:
    """A proxy before the engine at this port, and a trainer of it that is not started yet."""
    folder.mkdir()
    url = f"http://127.0.0.1:{port}"
    with ProxyProcess(f"tiny={url}", folder / "proxy") as proxy:
        ours = {
            "proxy_url": proxy.url, "model": model, "model_name": "tiny", "engine_urls": [url], "groups": GROUPS,
            "group_size": SIZE, "overlap": 0, **more,
        }  # fmt: skip
        trainer = TrainerProcess(folder, ours, verl)
        try:
            yield proxy, trainer
        finally:
            trainer.__exit__()


def says_what_the_trainer_computed(url: str, learned: Learned) -> None:
    """The trainer's logprobs in a step are those of the weights after the step before it, which were exported."""
    for row in rows(learned.run, EVERY + 1)[:4]:
        body = {"model": "tiny", "prompt": row["ids"], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        told = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        said = told["choices"][0]["prompt_logprobs"]
        for place, bit in enumerate(row["mask"]):
            if bit:
                known = said[place][str(row["ids"][place])]["logprob"]
                assert known == pytest.approx(row["trainer"][place], abs=1e-3)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=300).status_code == 200, "with its template"


def is_not_trained_as_a_model_of_other_layers(folder: Path, port: int) -> None:
    """Its tensors have the same names and sizes, and it would take a part of them for the whole."""
    said = refused(folder, build(folder.with_name("layer"), layers=1), port)
    assert "serves another model: its num_hidden_layers is 2, and that of" in said


def refused(folder: Path, model: Path, port: int) -> str:
    """The output of a run that was to train the engine with `model` and ended by itself."""
    with run(folder, model, port, FLOAT32, total_steps=1) as (proxy, trainer), trainer:
        assert trainer.wait() == 1, trainer.words()
        assert proxy.report()["gate"]["state"] == "open"
    assert not trainer.metrics()
    return trainer.words()


def takes_the_weights(folder: Path, model: Path, port: int) -> None:
    """With a learning rate that moves the policy far, trainer and engine still agree: the weights did arrive. So they
    do at both temperatures at which the players sample, and each is a row of its own. Without overlap all is on-policy:
    a whole call, too, is as likely for the trainer as it was for the engine."""
    verl = FLOAT32 | {RATE: 5e-3, "algorithm.rollout_correction.rollout_is": "sequence"}
    with run(folder, model, port, verl, total_steps=STEPS) as (proxy, trainer), trainer:
        trainer.until(lambda: trainer.phase() == "waiting for episodes")
        below = trainer.below()
        assert not any("EngineCore" in " ".join(process.cmdline()) for process in below)
        with Players(proxy.url, model="tiny", group_size=SIZE, parallel=GROUPS * SIZE, temperatures=(1.0, 0.5)):
            metrics = trainer.finish()
    assert [line["policy_version"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["min_policy_version"] >= line["step"] - 1 for line in metrics)
    assert all(line["staleness_max"] == 0 for line in metrics)
    assert all(0 <= share <= 1 for line in metrics for share in line["idle"].values())
    assert all(line["idle"]["engine"] > 0 and line["idle"]["trainer"] > 0 for line in metrics)
    assert max(line["rollout_probs_diff_max"] for line in metrics) < 1e-3
    assert all(line["samples"] == 2 * line["episodes"] and line["merged_calls"] == 0 for line in metrics)
    first = metrics[0]["learner"]
    assert all(first[f"rollout_corr/rollout_is_{end}"] == pytest.approx(1.0, abs=1e-3) for end in ("min", "max"))
    assert not any(line[name] for line in metrics for name in ("left_out_calls", "corrected_tokens", "unstated_tokens"))
    assert metrics[-1]["entropy"] < metrics[0]["entropy"]
    assert living(below) == []


def takes_an_adapter(trainer: TrainerProcess, proxy: ProxyProcess, model: Path) -> None:
    """Agents are served the exported model, as soon as the trainer has given it to the engine, which has that of the
    run before; and from then on with the adapter. Each batch is played to its end, so that the trainer has nothing to
    do afterwards. A batch in which all win moves nothing."""
    trainer.start()
    trainer.until(lambda: trainer.phase() == "waiting for episodes")
    players, numbers = Players(proxy.url, model="tiny", group_size=SIZE, parallel=0), itertools.count()
    with ThreadPoolExecutor(GROUPS * SIZE) as agents:
        while len(metrics := trainer.metrics()) < STEPS or not any(line["grad_norm"] > 0 for line in metrics[:-1]):
            tasks = [f"game-{next(numbers)}" for _ in range(GROUPS)]
            list(agents.map(players.play, tasks * SIZE))
            trainer.until(lambda: idle(trainer, proxy))
    first = metrics[0]
    assert (first["step"], first["min_policy_version"], first["max_policy_version"]) == (1, 0, 0)
    assert max(line["rollout_probs_diff_max"] for line in metrics) < 0.01
    has_the_adapter(model, rows(trainer.run_dir, len(metrics)))


def idle(trainer: TrainerProcess, proxy: ProxyProcess) -> bool:
    """All that was played is trained, or will not be."""
    counts = proxy.report()["episodes"]
    over = counts["trained"] + counts["discarded"] == counts["opened"]
    return over and trainer.phase() == "waiting for episodes"


def is_known_for_another_model(trainer: TrainerProcess, proxy: ProxyProcess) -> None:
    """Nothing that it samples is trained, and neither its weights nor its agents are touched."""
    trainer.signal(signal.SIGCONT)
    assert trainer.wait() == 1, trainer.words()
    assert "was started again with another model: it serves tiny from" in trainer.words()
    give_up = time.monotonic() + 600.0
    while not any("serves tiny from" in alert for alert in proxy.report()["alerts"]):
        assert time.monotonic() < give_up
        time.sleep(0.5)


def takes_no_weights_of_experts(folder: Path, model: Path, port: int) -> None:
    """vLLM's CPU build answers 200 to its own unchanged weights, and says something else from then on."""
    said = refused(folder, model, port)
    assert "does not compute what was pushed to it: its logprobs of 32 tokens of its own are" in said
