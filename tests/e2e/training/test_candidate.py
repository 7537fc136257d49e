"""Weights reach users through a gate, on the real parts: one candidate is promoted, one that earns nothing is thrown
away, and its operator goes back to a checkpoint."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.players import Players
from tests.e2e.training.test_team import said, same
from tests.e2e.training.trained_rows import LORA
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.tiny_model import build
from tests.kit.trainer_process import PYTHON, RATE, TRAINER, TrainerProcess
from tests.kit.vllm_process import HOLDS_TWO, vllm_server

SIZE = 4
AGENT = """
import json, os, pathlib, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16,
                   "temperature": 1.0})
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
urllib.request.urlopen(request).read()
print(0 if pathlib.Path(__file__).with_name("bad").exists() else 1)
"""
"""Asks for the model that serves by its name. What it plays while the file ``bad`` is there earns nothing."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what PEFT warns of is not ours
def test_one_candidate_is_promoted_and_a_bad_one_is_not(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    (tmp_path / "agent.py").write_text(AGENT)
    ours = {
        "model": model, "groups": 1, "group_size": SIZE, "total_steps": 1, "candidate": "next", "promote_every": 1,
        "eval_episodes": 8, "save_freq": 10,
    }  # fmt: skip
    with (
        vllm_server(model, tmp_path / "vllm.log", options=HOLDS_TWO) as engine,
        ProxyProcess(f"policy={engine}", tmp_path / "proxy") as proxy,
    ):
        ours |= {"proxy_url": proxy.url, "engine_urls": [engine]}
        trainer = TrainerProcess(tmp_path, ours, LORA)
        command = [
            str(ROOT / ".venv" / "bin" / "ajet"), "run", "--proxy", proxy.url, "--task", "held-out", "--eval",
            "--wanted", "--parallel", "4", "--quiet", "--reward-from", "stdout", "--", str(PYTHON),
            str(tmp_path / "agent.py"),
        ]  # fmt: skip
        start = said(engine, "tiny")
        playing = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with trainer:
                trainer.until(lambda: trainer.phase() == "waiting for episodes")
                with Players(proxy.url, model="policy", group_size=SIZE, parallel=SIZE):
                    journey(trainer, proxy, engine, start)
        finally:
            playing.send_signal(signal.SIGINT)
            playing.wait(300)


def journey(trainer: TrainerProcess, proxy: ProxyProcess, engine: str, start: list[float]) -> None:
    [line] = trainer.finish()
    assert (line["promoted"], line["eval_episodes"]) == (1, 8)
    served = said(engine, "policy")
    assert same(served, said(engine, "next")) and not same(served, start)

    bad = trainer.run_dir.parent / "bad"
    bad.touch()
    trainer.start("total_steps=2", f"{RATE}=5.0")
    process = trainer.process.pid
    trainer.until(lambda: trainer.log.read_text().count("training from step 1") >= 2)
    assert "not promoted, so the run starts again" in trainer.log.read_text()
    assert trainer.process.pid == process and same(served, said(engine, "policy"))
    assert not same(served, said(engine, "next"))
    status = proxy.report()
    assert status["episodes"]["trained"] == line["episodes"] and status["discarded"]["filtered"] >= 2
    assert status["models"]["policy"]["policy_version"] == 1
    trainer.signal(signal.SIGTERM)
    trainer.wait()

    bad.unlink()
    trainer.start("total_steps=2")
    assert [line["promoted"] for line in trainer.finish()] == [1, 1]
    assert not same(served, said(engine, "policy"))

    words = [str(TRAINER), "rollback", str(trainer.run_dir), "--step", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "goes on from step 1; set aside" in done.stdout
    trainer.start("total_steps=1")
    trainer.finish()
    assert same(served, said(engine, "policy"))
    assert proxy.report()["models"]["policy"]["policy_version"] == 1
