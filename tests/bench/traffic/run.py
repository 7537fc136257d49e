"""One run: daemon, trainer with its engine, judge, and people who come sixteen at a time.

The next sixteen come when the model has learned from those before, so that a step's score is that of one version.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TypedDict
from unittest.mock import patch

from integrations.tutorials.traffic.app import Chat
from tests.bench.traffic.arms import Arm
from tests.kit.environment import clean
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.trainer_process import TrainerProcess

CHATS = 16
"""Of a step."""
IDLE_S = 3
OPTIONS = ("--traffic", "people", "--traffic-idle", str(IDLE_S), "--traffic-holdout", "0")
KEPT = ("ready", "leased", "trained")
SEED = "actor_rollout_ref.rollout.seed"


class Run(TypedDict):
    """A finished run: the mean score of each step's chats, and how long it took, in seconds."""

    scores: list[float]
    seconds: float
    date: str


def run(arm: Arm, seed: int, steps: int) -> Run:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProxyProcess(None, folder / "proxy", options=OPTIONS) as proxy:
            ours = {
                "model": arm.model(folder, seed), "proxy_url": proxy.url, "groups": CHATS, "group_size": 1,
                "min_group_size": 1, "max_tokens": 512, "total_steps": steps, **arm.ours,
            }  # fmt: skip
            with TrainerProcess(folder, ours, {SEED: seed, **arm.theirs}) as trainer, judging(arm.judge, proxy, folder):
                trainer.until(lambda: trainer.phase().startswith("waiting for episodes"))
                chance = Random(seed)
                scores = [people(arm, chance, number, proxy, trainer) for number in range(1, steps + 1)]
                trainer.finish()
    return {"scores": scores, "seconds": round(time.monotonic() - began), "date": time.strftime("%Y-%m-%d")}


def people(arm: Arm, chance: Random, step: int, proxy: ProxyProcess, trainer: TrainerProcess) -> float:
    """The mean score of the people of a step, once the model has learned from them. Where a chat was lost, another one
    comes."""
    scores: list[float] = []

    def chat(own: Random) -> float:
        return arm.talk(own, Chat(max_tokens=arm.max_tokens).say)

    def settled() -> bool:
        status = proxy.report()
        return not status["episodes"]["open"] and not status["traffic"]["awaiting"]

    at = {"OPENAI_BASE_URL": f"{proxy.url}/v1", "OPENAI_API_KEY": "none"}
    with patch.dict(os.environ, at), ThreadPoolExecutor(CHATS) as threads:
        missing = CHATS
        while missing > 0:  # more, where a user was so slow that the chat has parts
            scores += threads.map(chat, [Random(chance.random()) for _ in range(missing)])
            trainer.until(settled)
            counts = proxy.report()["episodes"]
            missing = CHATS * step - sum(counts[state] for state in KEPT)
    trainer.until(lambda: len(trainer.metrics()) >= step or trainer.phase() == "done")
    return round(fmean(scores), 4)


@contextmanager
def judging(function: str, proxy: ProxyProcess, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``ajet judge``, as long as it is entered."""
    command: Sequence[str] = [str(ROOT / ".venv/bin/ajet"), "judge", "--with", function]
    env = clean(AJET_PROXY_URL=proxy.url, PYTHONPATH=str(ROOT))
    with (folder / "judge.log").open("wb") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as judge:
        try:
            yield judge
        finally:
            judge.send_signal(signal.SIGTERM)
