"""Two models learn in the same episodes, on the real parts: each with a vLLM that its trainer launches, or as two
adapters of one vLLM."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import ajet_sdk
from tests.e2e.players import UNSHAPED
from tests.e2e.training.trained_rows import LORA, has_the_adapter, rows
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import TrainerProcess
from tests.kit.vllm_process import HOLDS_TWO, vllm_server

MODELS = ("planner", "coder")
STEPS, SIZE = 3, 4


def play(task: str, episode: ajet_sdk.Episode) -> float:
    """Each agent asks once, for the model of its own name."""
    total = 0
    for agent in MODELS:
        body = {
            "model": agent, "messages": [{"role": "user", "content": f"say {task}"}], "max_tokens": 8,
            "temperature": 1.0, "return_token_ids": True, **UNSHAPED,
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        url = f"{episode.base_url}/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=600.0, verify=False)
        total += sum(token % 2 for token in answer.raise_for_status().json()["choices"][0]["token_ids"])
    return total / 16


def go_on(url: str, over: threading.Event) -> None:
    """Games of the team, until they are `over`."""
    members = {agent: agent for agent in MODELS}
    for number in range(1000):
        if over.is_set():
            return
        ajet_sdk.run(play, [f"game-{number}"], SIZE, SIZE, members=members, proxy_url=url)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the library of models warns of is not ours
def test_two_models_learn_in_one_episode(tmp_path: Path) -> None:
    """The planner trains all its weights, the coder an adapter, which agents are served."""
    over = threading.Event()
    with ProxyProcess(None, tmp_path / "proxy") as proxy:
        trainers = {}
        for number, (name, more, verl) in enumerate((("planner", {}, {}), ("coder", {"overlap": 0}, LORA))):
            (tmp_path / name).mkdir()
            ours = {
                "model": build(tmp_path / name / "model", seed=number), "model_name": name, "proxy_url": proxy.url,
                "groups": 1, "group_size": SIZE, "total_steps": STEPS, "save_freq": 1, **more,
            }  # fmt: skip
            trainers[name] = TrainerProcess(tmp_path / name, ours, verl)
        planner, coder = trainers.values()
        with planner, coder:
            for trainer in trainers.values():
                trainer.until(lambda one=trainer: one.phase() == "waiting for episodes")  # type: ignore[misc]
            engines = {name: set(one["upstreams"]) for name, one in proxy.report()["models"].items()}
            assert engines.keys() == set(MODELS)
            assert engines["planner"] and engines["planner"].isdisjoint(engines["coder"])
            threading.Thread(target=go_on, args=(proxy.url, over), daemon=True).start()
            for trainer in trainers.values():
                trainer.finish()
            over.set()
        status, listed = proxy.report(), _episodes(proxy.url)
    for name, trainer in trainers.items():
        assert [line["policy_version"] for line in trainer.metrics()] == list(range(1, STEPS + 1))
        had = [one for one in listed if (one.get("shares") or {}).get(name) == "trained"]
        assert len(had) == STEPS * SIZE, f"{name} has trained {len(had)} shares"
    has_the_adapter(tmp_path / "coder" / "model", rows(coder.run_dir, STEPS))
    counts = status["episodes"]
    assert counts["opened"] == sum(number for state, number in counts.items() if state != "opened")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what PEFT warns of is not ours
def test_two_models_are_two_adapters_of_one_engine(tmp_path: Path) -> None:
    """Each trainer changes its own adapter alone. What the engine says with it is what the trainer computes, at each
    step of both. The coder ends first: its adapter stays as it is, although the engine has to read it again."""
    model, over, trainers = build(tmp_path / "tiny"), threading.Event(), {}
    with (
        vllm_server(model, tmp_path / "vllm.log", options=HOLDS_TWO) as engine,
        ProxyProcess(f"planner={engine}", tmp_path / "proxy", options=("--upstream", f"coder={engine}")) as proxy,
    ):
        for name, steps in (("planner", 3), ("coder", 2)):
            (tmp_path / name).mkdir()
            ours = {
                "model": model, "model_name": name, "proxy_url": proxy.url, "engine_urls": [engine], "groups": 1,
                "group_size": SIZE, "total_steps": steps, "save_freq": 1, "overlap": 0,
            }  # fmt: skip
            trainers[name] = TrainerProcess(tmp_path / name, ours, LORA)
        planner, coder = trainers.values()
        with planner, coder:
            for trainer in trainers.values():
                trainer.until(lambda one=trainer: one.phase() == "waiting for episodes")  # type: ignore[misc]
            start = said(engine, "tiny")
            assert same(said(engine, "planner"), start) and same(said(engine, "coder"), start)
            agents = threading.Thread(target=go_on, args=(proxy.url, over), daemon=True)
            agents.start()
            coder.finish()
            ended = said(engine, "coder")
            planner.finish()
            over.set()
            agents.join(600)  # vLLM on a CPU answers for its own model as for an adapter, if both are asked at once
        assert same(said(engine, "tiny"), start)
        assert same(said(engine, "coder"), ended)
        assert not same(ended, start) and not same(ended, said(engine, "planner"))
        for name, trainer in trainers.items():
            newest = max((trainer.run_dir / "adapters").iterdir(), key=lambda one: int(one.name.split("-")[0]))
            assert same(said(engine, name), computed(model, newest))
        status = proxy.report()["models"]
    for name, trainer in trainers.items():
        lines = trainer.metrics()
        assert status[name]["policy_version"] == len(lines) == lines[-1]["step"]
        assert max(line["rollout_probs_diff_max"] for line in lines) < 1e-6
        assert all(line["staleness_max"] == 0 for line in lines)


IDS = list(range(40, 140))


def said(engine: str, model: str) -> list[float]:
    """The logprobs of some text by a model of the engine."""
    body = {"model": model, "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{engine}/v1/completions", json=body, timeout=300.0).raise_for_status().json()
    told = answer["choices"][0]["prompt_logprobs"][1:]
    return [one[str(token)]["logprob"] for token, one in zip(IDS[1:], told, strict=True)]


def same(some: list[float], others: list[float]) -> bool:
    return max(abs(one - other) for one, other in zip(some, others, strict=True)) < 1e-4


def computed(model: Path, adapter: Path) -> list[float]:
    """The same by the library of adapters."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter))
    with torch.no_grad():
        logprobs = whole(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(logprobs[place, token]) for place, token in enumerate(IDS[1:])]


def _episodes(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/ajet/v1/episodes", params={"limit": 1000}, trust_env=False, timeout=300.0)
    found: list[dict[str, Any]] = answer.raise_for_status().json()["episodes"]
    return found
