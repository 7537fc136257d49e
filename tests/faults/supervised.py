"""A run that the daemon wants, its supervisor, and the trainer that this keeps alive; both are killed.

The supervisor is `ajet-trainer serve` with scripted trainers, whose steps are renames (`tests.kit.scripted_trainer`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.runs import LEARNING_RATE
from ajet_trainer import held
from tests.kit.environment import clean
from tests.kit.source import ROOT

RATES = (1e-5, 1e-4, 1e-3)
RUN = "/runs/r"


class Supervised:
    """`ask` asks the daemon, and tries again until somebody answers."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url, self.path = folder, url, folder / "runs/r"
        (folder / "model").mkdir(parents=True)
        self._allow = folder / "allow.toml"
        self._allow.write_text(f'runs = "{folder}/runs"\n[models]\nsmall = "{folder}/model"\n')
        self._http = httpx.Client(base_url=f"{url}/ajet/v1", trust_env=False, timeout=300.0)
        self.desired = "running"
        self._process = self._start()
        config = {"trainer": {"model": "small", "model_name": "slow"}, "verl": {LEARNING_RATE: RATES[0]}}
        self.ask("PUT", {"config": config, "desired": self.desired})

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.kit.scripted_supervisor", self._url, str(self._allow)]
        with (self._folder / "supervisor.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=clean(), stdout=log, stderr=log)

    def ask(self, method: str, body: Any = None, limit_s: float = 300.0) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while True:
            with suppress(httpx.TransportError):
                answer = self._http.request(method, RUN, json=body)
                if answer.status_code < 400:
                    found: dict[str, Any] = answer.json()
                    return found
                assert answer.status_code in (409, 503), answer.text
            assert time.monotonic() < end, f"no answer about the run for {limit_s:g} s"
            time.sleep(0.1)

    def change(self, dice: random.Random) -> None:
        """Something else is wanted from now on."""
        self.desired = dice.choice(("running", "running", "stopped"))
        self.ask("PATCH", {"desired": self.desired, "config": {"verl": {LEARNING_RATE: dice.choice(RATES)}}})

    def pid(self) -> int | None:
        return held.holder(self.path) if self.path.exists() else None

    def kill(self) -> bool:
        """SIGKILL to the supervisor, which is started again; whether it died of that."""
        self._process.kill()
        died = self._process.wait() == -signal.SIGKILL
        self._process = self._start()
        return died

    def kill_trainer(self) -> bool:
        """SIGKILL to its trainer; whether one was there."""
        if (pid := self.pid()) is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def check_steps(self) -> int:
        """The number of steps that were made; each once, in order, and by one trainer at a time."""
        path = self.path / "history"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        steps = [step for _, step, _ in lines]
        assert steps == list(range(1, len(steps) + 1)), "a step was made twice, or left out"
        pids = [pid for pid, _ in groupby(pid for pid, _, _ in lines)]
        assert len(pids) == len(set(pids)), "two trainers were at work at one time"
        return len(steps)

    def in_the_end(self, until: Callable[[Callable[[], bool]], object]) -> int:
        """Checks that the wanted run runs, and that nothing does once it is wanted no more. Returns the number of
        steps."""

        def as_wanted() -> bool:
            return self.ask("GET")["reason"] is None and (self.pid() is not None) == (self.desired == "running")

        until(as_wanted)
        self.desired = "running"
        self.ask("PATCH", {"desired": self.desired})
        before = self.check_steps()
        until(lambda: as_wanted() and self.check_steps() > before + 2)
        self.desired = "stopped"
        self.ask("PATCH", {"desired": self.desired})
        until(as_wanted)
        return self.check_steps()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.kill_trainer()
        self._http.close()
