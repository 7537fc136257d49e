"""One run of a `Plan`: proxy, trainer with its engine, then agents step by step until the trainer has made its steps.

How agents are paced: the games of a step are started as soon as those of the step before are rewarded. The trainer then
leases the finished groups at once and closes the gate, so the new agents start up (importing `openai` is most of their
cost) while it trains, and their first call waits at the gate for the new weights. Nothing enforces this; each episode's
policy versions are recorded, and the figures say how stale the data was.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ajet_trainer.quickstart import screen as show
from ajet_trainer.quickstart.children import Children, Program
from ajet_trainer.quickstart.machine import QuickstartError, free_port, program
from ajet_trainer.quickstart.plan import MODEL_NAME, Plan, task_of
from ajet_trainer.quickstart.screen import Screen
from ajet_trainer.quickstart.watch import GOOD_STATES, Proxy, TrainerFiles

TICK_S = 0.2
AGENT_NICENESS = 19
"""Agents start up while the trainer trains; they get what it leaves, so that its threads do not wait for each other."""
PROXY_START_S = 60.0
TRAINER_START_S = 900.0
STALLED_S = 900.0
RETRIES = 3
READY_PHASES = ("training from step", "waiting for episodes")


@dataclass(slots=True)
class Record:
    """What a run leaves behind in memory; times in seconds."""

    metrics: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


class Loop:
    """Runs `plan` in `folder` with the model in `model`. `port` 0 takes a free one for the proxy."""

    def __init__(self, plan: Plan, folder: Path, model: Path, port: int, screen: Screen) -> None:
        self.plan, self.folder, self.model, self.screen = plan, folder, model, screen
        self.port = port or free_port()
        self.files = TrainerFiles(folder / "trainer")
        self.record = Record()
        self._shown = 0
        self._step_began = 0.0
        self._first_step: list[dict[str, Any]] = []

    def run(self, keep_episodes: int) -> Record:
        """To the end; `keep_episodes` early and as many late ones are fetched with their tokens."""
        proxy = Proxy(f"http://127.0.0.1:{self.port}")
        try:
            with Children() as children:
                try:
                    self._run(children, proxy)
                    self.record.episodes = self._sample_episodes(proxy, keep_episodes)
                except KeyboardInterrupt:
                    self.screen.line("  stopping: the programs end, which can take half a minute")
                    self.screen.line(f"  metrics, logs and episodes of {self._shown} steps stay in {self.folder}")
                    raise
        finally:
            proxy.close()
        return self.record

    def _run(self, children: Children, proxy: Proxy) -> None:
        self._start_proxy(children, proxy)
        trainer = self._start_trainer(children, proxy)
        with self.record.timed("steps"):
            self._play_all(children, proxy)
            self._wait_for_steps(children)
        with self.record.timed("final checkpoint and end"):
            self._wait_for_end(children, trainer)
        self.record.metrics = self.files.metrics()
        self.record.status = proxy.status()

    def _start_proxy(self, children: Children, proxy: Proxy) -> None:
        argv = [
            program("ajet-proxy"),
            "serve",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--data-dir",
            str(self.folder / "proxy"),
        ]
        with self.record.timed("proxy start"):
            log = self.folder / "proxy.log"
            children.start("ajet-proxy", argv, log, environment())
            for seconds in ticks(PROXY_START_S, "ajet-proxy did not become ready"):
                children.check()
                if log.read_text(errors="replace").startswith("ajet-proxy ready on "):
                    break
                self.screen.live(show.starting("ajet-proxy", seconds))
        self.screen.line(f"  proxy ready on {proxy.url} after {self.record.seconds['proxy start']:.1f} s")

    def _start_trainer(self, children: Children, proxy: Proxy) -> Program:
        self.files.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "trainer.toml"
        config.write_text(
            self.plan.trainer_config(model=self.model, proxy_url=proxy.url, run_dir=self.files.folder.absolute())
        )
        with self.record.timed("trainer and engine start"):
            argv = [program("ajet-trainer"), "run", "--config", str(config)]
            trainer = children.start("ajet-trainer", argv, self.folder / "trainer.log", environment())
            for seconds in ticks(TRAINER_START_S, "the trainer did not become ready"):
                children.check()
                if self.files.phase.startswith(READY_PHASES):
                    break
                self.screen.live(show.starting(self.files.phase, seconds))
        took = self.record.seconds["trainer and engine start"]
        self.screen.line(f"  verl and vLLM ready after {took:.0f} s")
        return trainer

    def _play_all(self, children: Children, proxy: Proxy) -> None:
        self._step_began = time.monotonic()
        for number, secrets in enumerate(self.plan.secrets(), 1):
            missing = Counter(dict.fromkeys(secrets, self.plan.group_size))
            for _ in range(RETRIES):
                self._play(children, proxy, number, missing)
                missing = self._missing(proxy, number, missing)
                if not missing:
                    break
            else:
                raise QuickstartError(
                    f"episodes of step {number} fail again and again; see {self.folder / 'agents.log'}"
                )
            self._first_step = self._first_step or self._rewarded(proxy)

    def _play(self, children: Children, proxy: Proxy, step: int, games: Counter[int]) -> None:
        """`games` says how often each secret is played; one ``ajet run`` a secret, all at once."""
        before, log = (step - 1) * self.plan.episodes_per_step, self.folder / "agents.log"
        commands = [
            children.start("ajet run", self._command(step, secret, times), log, environment(proxy.url), AGENT_NICENESS)
            for secret, times in games.items()
        ]
        checked = time.monotonic()
        played = 0
        for _ in ticks(STALLED_S, "the agents did not end"):
            if all(command.status is not None for command in commands):
                break
            if time.monotonic() - checked > 1.0:
                checked, played = time.monotonic(), max(0, proxy.finished() - before)
                children.check()
            self._show(played)
        for command in commands:
            children.finished(command)

    def _command(self, step: int, secret: int, times: int) -> list[str]:
        """What a user would type."""
        agent = str(Path(__file__).with_name("guess.py"))
        return [
            program("ajet"), "run", "--task", task_of(step, secret), "--model", MODEL_NAME, "--repeat", str(times),
            "--parallel", str(times), "--reward-from", "stdout", "--", sys.executable, agent, str(secret),
        ]  # fmt: skip

    def _missing(self, proxy: Proxy, step: int, wanted: Counter[int]) -> Counter[int]:
        """How often each secret must be played again, because its episode was not rewarded."""
        if proxy.finished() >= step * self.plan.episodes_per_step:
            return Counter()
        tasks = Counter(record["task"] for record in self._rewarded(proxy))
        lacking = {secret: self.plan.group_size - tasks[task_of(step, secret)] for secret in wanted}
        return Counter({secret: times for secret, times in lacking.items() if times > 0})

    def _rewarded(self, proxy: Proxy) -> list[dict[str, Any]]:
        """Records of the latest rewarded episodes (the proxy lists 100 a state), oldest first."""
        # In the order of the states, so that one which moves on meanwhile is seen, perhaps twice.
        records = {record["episode"]: record for state in GOOD_STATES for record in proxy.episodes(state)}
        return sorted(records.values(), key=lambda record: float(record["opened_at"]))

    def _wait_for_steps(self, children: Children) -> None:
        for _ in ticks(STALLED_S, "the trainer did not make its last step"):
            self._show(0)
            if self._shown >= self.plan.steps:
                return
            children.check()

    def _wait_for_end(self, children: Children, trainer: Program) -> None:
        for _ in ticks(STALLED_S, "the trainer did not end"):
            children.check()
            if trainer.status == 0:
                return
            self.screen.live(f"  {self.files.phase} …")

    def _show(self, played: int) -> None:
        """New steps as lines, and the live line."""
        metrics = self.files.metrics()
        for record in metrics[self._shown :]:
            now = time.monotonic()
            self.screen.line(show.step_line(record, self.plan.steps, now - self._step_began))
            self._step_began, self._shown = now, self._shown + 1
        done = min(self._shown, self.plan.steps - 1)
        spent = sum(sum(record["timing"].get(name, 0.0) for name in PARTS) for record in metrics)
        self.screen.live(
            show.running(done, self.plan.steps, min(played, self.plan.episodes_per_step), self.plan.episodes_per_step,
                         self.files.phase, spent)
        )  # fmt: skip

    def _sample_episodes(self, proxy: Proxy, count: int) -> list[dict[str, Any]]:
        """`count` episodes of the first step and as many of the last, evenly spaced, with their tokens."""
        latest = sorted(proxy.episodes("trained"), key=lambda record: record["opened_at"])
        step = self.plan.episodes_per_step
        spaced = max(1, step // count)
        chosen = [*self._first_step[:step:spaced], *latest[-step:][::spaced]]
        return [proxy.episode(record["episode"]) for record in chosen]


PARTS = ("wait", "train", "save", "drain", "push")
"""The parts of a step in the trainer's ``timing`` that follow each other; the others lie within these."""


def environment(proxy_url: str | None = None) -> dict[str, str]:
    """This process's environment without anything of ours, so that a run does not depend on the shell it began in."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("AJET_", "OPENAI_", "ANTHROPIC_"))
    }
    clean |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    return clean | {"AJET_PROXY_URL": proxy_url} if proxy_url else clean


def ticks(limit_s: float, complaint: str) -> Iterator[float]:
    """Seconds since the start, a few times a second; after `limit_s` it raises instead."""
    start = time.monotonic()
    while (seconds := time.monotonic() - start) < limit_s:
        yield seconds
        time.sleep(TICK_S)
    raise QuickstartError(f"{complaint} within {limit_s:.0f} s")
