"""Supervisor, trainer and daemon are killed at random instants. What is wanted runs, and no step is made twice.

The daemon and the supervisor are the real programs. Trainers are scripted: their steps take 20 ms.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.runs import LEARNING_RATE as RATE
from ajet_trainer import held
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT

pytestmark = pytest.mark.slow
KILLS = 12
RATES = (1e-5, 1e-4, 1e-3)


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        self.allow = folder / "allow.toml"
        self.allow.write_text(f'runs = "{folder}/runs"\n[models]\nsmall = "{folder}/model"\n')
        self.daemon = ProxyProcess(None, folder / "data")
        self.http = httpx.Client(base_url=f"{self.daemon.url}/ajet/v1", trust_env=False, timeout=300.0)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A supervisor, started again if it is gone."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AJET_")}
        with (self.folder / "supervisor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.scripted_supervisor", self.daemon.url, str(self.allow)],
                cwd=ROOT, env=clean, stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Tried again until somebody answers: the daemon, or a supervisor behind it, may be away."""
        end = time.monotonic() + 300
        while True:
            with suppress(httpx.TransportError):
                answer = self.http.request(method, path, json=body)
                if answer.status_code < 400:
                    found: dict[str, Any] = answer.json()
                    return found
                assert answer.status_code in (409, 503), answer.text
                assert answer.json()["error"]["code"] in ("no_supervisor", "no_verdict", "stopping"), answer.text
            assert time.monotonic() < end
            time.sleep(0.1)

    def run(self) -> dict[str, Any]:
        return self.ask("GET", "/runs/r")

    def until(self, reached: Callable[[], object], limit_s: float = 300.0) -> None:
        end = time.monotonic() + limit_s
        while not reached():
            assert time.monotonic() < end, (self.run(), (self.folder / "supervisor.log").read_text()[-2000:])
            time.sleep(0.05)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "r"

    def pid(self) -> int | None:
        return held.holder(self.path) if self.path.exists() else None

    def history(self) -> list[tuple[int, int, float]]:
        path = self.path / "history"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self, who: str) -> None:
        if who == "daemon":
            self.daemon.kill()
            self.daemon.start()
        elif who == "supervisor":
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            self.start()
        elif (pid := self.pid()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.kill("trainer")
        self.http.close()
        self.daemon.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        made.daemon.start()
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_wanted_runs_whoever_is_killed_and_no_step_is_made_twice(site: Site, seed: int) -> None:
    chance = random.Random(seed)
    config = {"trainer": {"model": "small"}, "verl": {RATE: RATES[0]}}
    site.ask("PUT", "/runs/r", {"config": config, "desired": "running"})
    site.until(lambda: len(site.history()) > 2)
    for number in range(KILLS):
        time.sleep(chance.uniform(0.0, 0.6))
        desired, rate = chance.choice(["running", "running", "stopped"]), chance.choice(RATES)
        site.ask("PATCH", "/runs/r", {"desired": desired, "config": {"verl": {RATE: rate}}})
        time.sleep(chance.uniform(0.0, 0.3))
        site.kill(chance.choice(["daemon", "supervisor", "trainer"]))
        if number % 3 == 2:
            site.until(lambda: site.run()["reason"] is None and (site.pid() is not None) == (desired == "running"))  # noqa: B023
    site.ask("PATCH", "/runs/r", {"desired": "running"})
    site.until(lambda: site.run()["reason"] is None)
    before = len(site.history())
    site.until(lambda: len(site.history()) > before + 3)
    assert site.history()[-1][2] == site.run()["config"]["verl"][RATE]
    site.ask("PATCH", "/runs/r", {"desired": "stopped"})
    site.until(lambda: site.run()["reason"] is None and site.pid() is None)
    steps = [step for _, step, _ in site.history()]
    assert len(steps) == len(set(steps)), "a step was made twice"
    assert steps == sorted(steps)
    pids = [pid for pid, _ in groupby(pid for pid, _, _ in site.history())]
    assert len(pids) == len(set(pids)), "two trainers were at work at one time"
    lines = [json.loads(line) for line in (site.path / "metrics.jsonl").read_text().splitlines()]
    site.until(lambda: site.ask("GET", "/runs/r/metrics")["lines"] == lines[-1000:])


def test_the_reason_of_a_run_that_cannot_start_is_in_the_answer(site: Site) -> None:
    body = {"config": {"trainer": {"model": "small", "model_name": "refused"}}, "desired": "running"}
    site.ask("PUT", "/runs/r", body)
    site.until(lambda: "this cannot be used" in (site.run()["reason"] or ""))
    assert site.run()["actual"]["exit_code"] == 2
    wrong = site.http.put("/runs/s", json={"config": {"trainer": {"model": "/etc"}}, "desired": "running"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "config_refused")
    site.ask("PATCH", "/runs/r", {"desired": "stopped"})
    site.until(lambda: site.run()["reason"] is None)
    assert site.ask("DELETE", "/runs/r") == {"run": "r"}


def test_a_supervisor_that_ends_lets_its_trainer_save(site: Site) -> None:
    site.ask("PUT", "/runs/r", {"config": {"trainer": {"model": "small"}}, "desired": "running"})
    site.until(lambda: len(site.history()) > 2)
    assert site.process is not None
    site.process.terminate()
    assert site.process.wait(300) == 0
    assert site.pid() is None
    assert json.loads((site.path / "phase.json").read_text())["phase"] == "stopped"
    site.start()
    before = len(site.history())
    site.until(lambda: len(site.history()) > before)
