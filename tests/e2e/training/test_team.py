"""Two models learn in the same episodes, on the real parts: each with a trainer and a vLLM that this launches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import ajet_sdk
from tests.e2e.players import UNSHAPED
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import TrainerProcess

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
        answer = httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers, timeout=600.0)
        total += sum(token % 2 for token in answer.raise_for_status().json()["choices"][0]["token_ids"])
    return total / 16


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_models_learn_in_one_episode(tmp_path: Path) -> None:
    over = threading.Event()

    def go_on(url: str) -> None:
        members = {agent: agent for agent in MODELS}
        for number in range(1000):
            if over.is_set():
                return
            ajet_sdk.run(play, [f"game-{number}"], SIZE, SIZE, members=members, proxy_url=url)

    with ProxyProcess(None, tmp_path / "proxy") as proxy:
        trainers = {}
        for number, name in enumerate(MODELS):
            (tmp_path / name).mkdir()
            ours = {
                "model": str(build(tmp_path / name / "model", seed=number)), "model_name": name, "proxy_url": proxy.url,
                "groups": 1, "group_size": SIZE, "max_tokens": 256, "total_steps": STEPS, "save_freq": 1,
            }  # fmt: skip
            trainers[name] = TrainerProcess(tmp_path / name, ours, {})
        planner, coder = trainers.values()
        with planner, coder:
            for trainer in trainers.values():
                trainer.until(lambda one=trainer: one.phase() == "waiting for episodes", 400)  # type: ignore[misc]
            engines = {name: set(one["upstreams"]) for name, one in proxy.report()["models"].items()}
            assert engines.keys() == set(MODELS)
            assert engines["planner"] and engines["planner"].isdisjoint(engines["coder"])
            agents = threading.Thread(target=go_on, args=(proxy.url,), daemon=True)
            agents.start()
            for trainer in trainers.values():
                assert trainer.wait(400) == 0, trainer.words()
            over.set()
        status, listed = proxy.report(), _episodes(proxy.url)
    for name, trainer in trainers.items():
        assert [line["policy_version"] for line in trainer.metrics()] == list(range(1, STEPS + 1))
        had = [one for one in listed if (one.get("shares") or {}).get(name) == "trained"]
        assert len(had) == STEPS * SIZE, f"{name} has trained {len(had)} shares"
    counts = status["episodes"]
    assert counts["opened"] == sum(number for state, number in counts.items() if state != "opened")


def _episodes(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/ajet/v1/episodes", params={"limit": 1000}, trust_env=False, timeout=60.0)
    found: list[dict[str, Any]] = answer.raise_for_status().json()["episodes"]
    return found
