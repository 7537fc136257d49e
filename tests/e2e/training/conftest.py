"""One run of verl that learns, whose run folder and episodes serve many tests: it takes minutes."""

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
from tests.kit.trainer_process import FLOAT32, PYTHON, RATE, TrainerProcess, living

STEPS, GROUPS, SIZE = 20, 2, 8
EVERY, EVALUATED = 10, 3
"""The steps from one evaluation or checkpoint to the next, and the episodes of an evaluation."""
AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(len(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]) % 2)
"""


@dataclass(frozen=True, slots=True)
class Learned:
    """A finished run: its folder, what the proxy says at its end and knows of its episodes, and what the trainer and
    `ajet run --wanted` said."""

    run: Path
    status: dict[str, Any]
    episodes: dict[str, dict[str, Any]]
    said: str
    played: str

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """A tiny model trains with an engine that verl launches, and is evaluated by agents in processes of their own. All
    that was started has ended."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "agent.py").write_text(AGENT)
    model = build(folder / "tiny")
    with ProxyProcess(None, folder / "proxy") as proxy:
        ours = {
            "model": model, "proxy_url": proxy.url, "groups": GROUPS, "group_size": SIZE, "total_steps": STEPS,
            "save_freq": EVERY, "eval_every": EVERY, "eval_episodes": EVALUATED,
        }  # fmt: skip
        verl = FLOAT32 | {RATE: 1e-2, "trainer.logger": ["tensorboard"]}
        client = [
            str(ROOT / ".venv" / "bin" / "ajet"), "run", "--proxy", proxy.url, "--task", "held-out", "--eval",
            "--wanted", "--parallel", "2", "--quiet", "--reward-from", "stdout", "--",
            str(PYTHON), str(folder / "agent.py"),
        ]  # fmt: skip
        with (
            subprocess.Popen(client, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as playing,
            TrainerProcess(folder, ours, verl) as trainer,
            Players(proxy.url, model="policy", group_size=SIZE, parallel=GROUPS * SIZE),
        ):
            trainer.until(lambda: len(trainer.metrics()) > 1)
            below = trainer.below()
            assert len(below) > 5
            trainer.finish()
            playing.send_signal(signal.SIGINT)
            played, _ = playing.communicate(timeout=300)
        assert living(below) == []
        with httpx.Client(base_url=f"{proxy.url}/ajet/v1", trust_env=False, timeout=300) as http:
            listed = http.get("/episodes", params={"limit": 1000}).json()["episodes"]
            kept = [one["episode"] for one in listed if one["state"] in ("recorded", "trained")]
            episodes = {name: http.get(f"/episodes/{name}", params={"tokens": 1}).json() for name in kept}
        return Learned(trainer.run_dir, proxy.report(), episodes, trainer.log.read_text(), played)
