"""What a run is for, on the real parts: evaluations on the way, rows to read, curves, and a model to take away."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.players import Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.tiny_model import build
from tests.kit.trainer_process import FLOAT32, PYTHON, RATE, TRAINER, TrainerProcess
from tests.kit.vllm_process import vllm_server

pytestmark = pytest.mark.slow
STEPS, GROUPS, SIZE, EVALUATED = 2, 2, 4, 3
AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(len(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]) % 2)
"""


def settings(model: Path, url: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "proxy_url": url, "groups": GROUPS, "group_size": SIZE, **more}


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run: its folder, what the proxy knows of its episodes, and what `ajet run --wanted` said."""

    run: Path
    episodes: dict[str, dict[str, Any]]
    played: str

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "agent.py").write_text(AGENT)
    ours = {"eval_every": 1, "eval_episodes": EVALUATED, "save_freq": 1, "total_steps": STEPS}
    verl = FLOAT32 | {RATE: 1e-2, "trainer.logger": ["tensorboard"], "algorithm.adv_estimator": "ajet_turn"}
    with ProxyProcess(None, folder / "proxy") as proxy:
        client = [
            str(ROOT / ".venv" / "bin" / "ajet"), "run", "--proxy", proxy.url, "--task", "held-out", "--eval",
            "--wanted", "--parallel", "2", "--quiet", "--reward-from", "stdout", "--",
            str(PYTHON), str(folder / "agent.py"),
        ]  # fmt: skip
        with subprocess.Popen(client, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as playing:
            model = build(folder / "tiny")
            with (
                TrainerProcess(folder, settings(model, proxy.url, **ours), verl) as trainer,
                Players(proxy.url, model="policy", group_size=SIZE, parallel=GROUPS * SIZE),
            ):
                trainer.finish(600)
            playing.send_signal(signal.SIGINT)
            played, _ = playing.communicate(timeout=30)
        with httpx.Client(base_url=f"{proxy.url}/ajet/v1", trust_env=False) as http:
            listed = http.get("/episodes", params={"limit": 1000}).json()["episodes"]
            kept = [one["episode"] for one in listed if one["state"] in ("recorded", "trained")]
            episodes = {name: http.get(f"/episodes/{name}", params={"tokens": 1}).json() for name in kept}
    return Trained(trainer.run_dir, episodes, played)


def test_each_version_is_evaluated_by_episodes_of_its_own(trained: Trained) -> None:
    lines = trained.metrics()
    assert [(line["step"], line["eval_episodes"]) for line in lines] == [(step, EVALUATED) for step in range(STEPS + 1)]
    parts: dict[str, list[dict[str, Any]]] = {}
    for episode in trained.episodes.values():
        if "evaluation" in episode:
            parts.setdefault(episode["evaluation"], []).append(episode)
    assert sorted(len(part) for part in parts.values()) == [EVALUATED] * (STEPS + 1)
    versions = [{call["policy_version"] for one in part for call in one["calls"]} for part in parts.values()]
    assert sorted(versions, key=min) == [{version} for version in range(STEPS + 1)]
    means = {line["step"]: line["eval_reward_mean"] for line in lines}
    for part in parts.values():
        version = part[0]["calls"][0]["policy_version"]
        assert means[version] == pytest.approx(sum(one["reward"] for one in part) / EVALUATED)
        assert {one["state"] for one in part} == {"recorded"}
    assert f"{EVALUATED * (STEPS + 1)} episodes: {EVALUATED * (STEPS + 1)} rewarded" in trained.played


def test_tensorboard_shows_rewards_and_evaluations(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.run / "tensorboard")).Reload()
    for name, first in (("ajet/eval_reward_mean", 0), ("ajet/reward_mean", 1), ("actor/pg_loss", 1)):
        assert [one.step for one in events.Scalars(name)] == list(range(first, STEPS + 1)), name
    told = {line["step"]: line["reward_mean"] for line in trained.metrics() if line["step"]}
    assert {one.step: one.value for one in events.Scalars("ajet/reward_mean")} == pytest.approx(told)


def rows(run: Path, step: int) -> list[dict[str, Any]]:
    """What `ajet-trainer rows` shows of a step."""
    words = [str(TRAINER), "rows", str(run), "--step", str(step), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rows_are_what_the_engine_sampled_and_the_trainer_computed(trained: Trained) -> None:
    for line in trained.metrics()[1:]:
        found = rows(trained.run, line["step"])
        assert len(found) == line["samples"]
        assert sum(sum(row["mask"]) for row in found) == line["sampled_tokens"]
        assert line["timing"]["rows"] < 1.0
        for row in found:
            calls = {call["call"]: call for call in trained.episodes[row["episode"]]["calls"]}
            for name in dict.fromkeys(filter(None, row["calls"])):
                places = [place for place, call in enumerate(row["calls"]) if call == name]
                assert [row["ids"][place] for place in places] == calls[name]["token_ids"]
                assert [row["engine"][place] for place in places] == pytest.approx(calls[name]["logprobs"], abs=1e-6)
            sampled = [place for place, bit in enumerate(row["mask"]) if bit]
            assert all(row["advantage"][place] is not None and row["texts"][place] for place in sampled)
            differences = [abs(row["trainer"][place] - row["engine"][place]) for place in sampled]
            assert line["step"] > 1 or max(differences) < 0.1, "both have the weights that the run began with"


def test_the_exported_model_is_served_with_the_trainers_logprobs_and_trained_on(
    trained: Trained, tmp_path: Path
) -> None:
    """The trainer's logprobs in step 2 are those of the weights after step 1."""
    model = tmp_path / "model"
    words = [str(TRAINER), "export", str(trained.run), str(model), "--step", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.splitlines()[-1] == f"exported to {model}"
    with vllm_server(model, tmp_path / "vllm.log", options=("--logprobs-mode", "processed_logprobs")) as url:
        for row in rows(trained.run, 2)[:4]:
            body = {"model": "tiny", "prompt": row["ids"], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
            told = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            said = told["choices"][0]["prompt_logprobs"]
            for place, bit in enumerate(row["mask"]):
                if bit:
                    known = said[place][str(row["ids"][place])]["logprob"]
                    assert known == pytest.approx(row["trainer"][place], abs=1e-3)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).status_code == 200, "with its template"
        ours = {"model_name": "tiny", "engine_urls": [url], "total_steps": 1}
        with (
            ProxyProcess(f"tiny={url}", tmp_path / "proxy") as proxy,
            TrainerProcess(tmp_path, settings(model, proxy.url, **ours), FLOAT32) as trainer,
            Players(proxy.url, model="tiny", group_size=SIZE, parallel=GROUPS * SIZE),
        ):
            (line,) = trainer.finish(600)
    assert (line["step"], line["min_policy_version"], line["max_policy_version"]) == (1, 0, 0)
    assert line["rollout_probs_diff_max"] < 0.3 and line["grad_norm"] > 0
