"""One run of a `Plan`: proxy, trainer with its engine, then agents step by step until the trainer has made its steps.

How agents are paced: the games of a step are started as soon as those of the step before are rewarded. The trainer then
leases the finished groups at once and closes the gate. So the new agents start up while it trains (importing `openai`
is most of their cost), and their first call waits at the gate for the new weights. Nothing enforces this. Each
episode's policy versions are recorded, and the figures say how stale the data was.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet_sdk import Client
from ajet_sdk.settings import toml_of
from ajet_trainer.progress import timed
from ajet_trainer.run_folder import read_json
from integrations.quickstart import screen as show
from integrations.quickstart.figures import PARTS
from integrations.quickstart.plan import MODEL_NAME, Plan, task_of
from integrations.quickstart.programs import Children, Program, QuickstartError, environment, free_port, path_of, ticks
from integrations.quickstart.screen import Screen

AGENT_NICENESS = 19
"""Agents start up while the trainer trains; they get what it leaves, so that its threads do not wait for each other."""
PROXY_START_S = 60.0
PROXY_ANSWER_S = 30.0
TRAINER_START_S = 900.0
STALLED_S = 900.0
RETRIES = 3
READY_PHASES = ("training from step", "waiting for episodes")
REWARDED_STATES = ("sealed", "ready", "leased", "trained")


class Loop:
    """Runs `plan` in `folder` with the model in `model`.

    `run` leaves behind the trainer's `metrics`, the proxy's `status`, some `episodes` with their tokens, and the
    `seconds` that each part took.
    """

    proxy_options: Sequence[str] = ()

    def __init__(self, plan: Plan, folder: Path, model: Path, screen: Screen) -> None:
        self.plan, self.folder, self.model, self.screen = plan, folder, model, screen
        self.port = free_port()
        self.proxy = Client(f"http://127.0.0.1:{self.port}", deadline=PROXY_ANSWER_S)
        self.proxy.core = self.proxy.core.but(key=None)  # it has no secrets, and gets no key of this shell's
        self.metrics: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.episodes: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self._trainer_folder = folder / "trainer"
        self._shown = 0
        self._step_began = 0.0
        self._first_step: list[dict[str, Any]] = []

    def run(self, keep_episodes: int) -> None:
        """Runs to the end; `keep_episodes` early episodes and as many late ones are fetched with their tokens."""
        with self.proxy, Children() as children:
            try:
                self._start_proxy(children)
                trainer = self._start_trainer(children)
                with timed(self.seconds, "steps"):
                    self._play_all(children)
                    self._wait_for_steps(children)
                with timed(self.seconds, "final checkpoint and end"):
                    self._wait_for_end(children, trainer)
                self.metrics = metrics_in(self._trainer_folder)
                self.status = self.proxy.ask("status").json()
                self.episodes = self._sample_episodes(keep_episodes)
            except KeyboardInterrupt:
                self.screen.line("  stopping: the programs end, which can take half a minute")
                self.screen.line(f"  metrics, logs and episodes of {self._shown} steps stay in {self.folder}")
                raise

    def _start_proxy(self, children: Children) -> None:
        log, data_dir = self.folder / "proxy.log", str(self.folder / "proxy")
        argv = [path_of("ajet-proxy"), "serve", "--listen", f"127.0.0.1:{self.port}", "--data-dir", data_dir,
                *self.proxy_options]  # fmt: skip
        with timed(self.seconds, "proxy start"):
            children.start("ajet-proxy", argv, log, environment())
            for seconds in ticks(PROXY_START_S, "ajet-proxy did not become ready"):
                children.check()
                if log.read_text(errors="replace").startswith("ajet-proxy ready on "):
                    break
                self.screen.live(show.starting("ajet-proxy", seconds))
        self.screen.line(f"  proxy ready on {self.proxy.target.url} after {self.seconds['proxy start']:.1f} s")

    def _start_trainer(self, children: Children) -> Program:
        self._trainer_folder.mkdir(parents=True, exist_ok=True)
        config, url = self.folder / "trainer.toml", self.proxy.target.url
        tables = self.plan.tables(model=self.model, proxy_url=url, run_dir=self._trainer_folder.absolute())
        config.write_text(toml_of(tables))
        with timed(self.seconds, "trainer and engine start"):
            argv = [path_of("ajet-trainer"), "run", "--config", str(config)]
            trainer = children.start("ajet-trainer", argv, self.folder / "trainer.log", environment())
            for seconds in ticks(TRAINER_START_S, "the trainer did not become ready"):
                children.check()
                phase = phase_in(self._trainer_folder)
                if phase.startswith(READY_PHASES):
                    break
                self.screen.live(show.starting(phase, seconds))
        self.screen.line(f"  verl and vLLM ready after {self.seconds['trainer and engine start']:.0f} s")
        return trainer

    def _play_all(self, children: Children) -> None:
        self._step_began = time.monotonic()
        for number, secrets in enumerate(self.plan.secrets(), 1):
            missing = Counter(dict.fromkeys(secrets, self.plan.group_size))
            for _ in range(RETRIES):
                self._play(children, number, missing)
                missing = self._missing(number, missing)
                if not missing:
                    break
            else:
                raise QuickstartError(
                    f"episodes of step {number} fail again and again; see {self.folder / 'agents.log'}"
                )
            self._first_step = self._first_step or self._rewarded()

    def _play(self, children: Children, step: int, games: Counter[int]) -> None:
        """Plays `games`, which says how often each secret is played: one ``ajet run`` a secret, all at once."""
        before, log = (step - 1) * self.plan.episodes_per_step, self.folder / "agents.log"
        env = environment(self.proxy.target.url)
        commands = [
            children.start("ajet run", self._command(step, secret, times), log, env, AGENT_NICENESS)
            for secret, times in games.items()
        ]
        checked, played = time.monotonic(), 0
        for _ in ticks(STALLED_S, "the agents did not end"):
            if all(command.status is not None for command in commands):
                break
            if time.monotonic() - checked > 1.0:
                children.check()
                checked, played = time.monotonic(), max(0, self._finished() - before)
            self._show(played)
        for command in commands:
            children.finished(command)

    def _command(self, step: int, secret: int, times: int) -> list[str]:
        """The command that a user would type."""
        agent = str(Path(__file__).with_name("guess.py"))
        return [
            path_of("ajet"), "run", "--task", task_of(step, secret), "--model", MODEL_NAME, "--repeat", str(times),
            "--parallel", str(times), "--reward-from", "stdout", "--", sys.executable, agent, str(secret),
        ]  # fmt: skip

    def _missing(self, step: int, wanted: Counter[int]) -> Counter[int]:
        """Counts how often each secret must be played again, because its episode was not rewarded."""
        if self._finished() >= step * self.plan.episodes_per_step:
            return Counter()
        tasks = Counter(record["task"] for record in self._rewarded())
        return +Counter({secret: self.plan.group_size - tasks[task_of(step, secret)] for secret in wanted})

    def _finished(self) -> int:
        """Counts the episodes that were rewarded, whatever became of them since."""
        counts = self.proxy.ask("status").json()["episodes"]
        return sum(int(counts[state]) for state in REWARDED_STATES)

    def _rewarded(self) -> list[dict[str, Any]]:
        """Records of the latest rewarded episodes (the proxy lists 100 a state), oldest first."""
        # In the order of the states, so that one which moves on meanwhile is seen, perhaps twice.
        records = {record["episode"]: record for state in REWARDED_STATES for record in self._listed(state)}
        return sorted(records.values(), key=lambda record: float(record["opened_at"]))

    def _listed(self, state: str) -> list[dict[str, Any]]:
        """The records in `state`, without token ids."""
        return list(self.proxy.ask("list_episodes", state=state).json()["episodes"])

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
            self.screen.live(f"  {phase_in(self._trainer_folder)} …")

    def _show(self, played: int) -> None:
        """Prints new steps as lines, and the live line."""
        metrics, steps, episodes = metrics_in(self._trainer_folder), self.plan.steps, self.plan.episodes_per_step
        for record in metrics[self._shown :]:
            now = time.monotonic()
            self.screen.line(show.step_line(record, steps, now - self._step_began))
            self._step_began, self._shown = now, self._shown + 1
        spent = sum(record["timing"].get(name, 0.0) for record in metrics for name in PARTS)
        done, phase = min(self._shown, steps - 1), phase_in(self._trainer_folder)
        self.screen.live(show.running(done, steps, min(played, episodes), episodes, phase, spent))

    def _sample_episodes(self, count: int) -> list[dict[str, Any]]:
        """`count` episodes of the first step and as many of the last, evenly spaced, with their tokens."""
        latest = sorted(self._listed("trained"), key=lambda record: record["opened_at"])
        step = self.plan.episodes_per_step
        spaced = max(1, step // count)
        chosen = [*self._first_step[:step:spaced], *latest[-step:][::spaced]]
        return [self.proxy.ask("get_episode", id=record["episode"], tokens=1).json() for record in chosen]


def phase_in(folder: Path) -> str:
    """The phase that the trainer of this run folder reports."""
    return str(read_json(folder / "phase.json").get("phase", "starting"))


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """One record a step, in order; the last line may be half written."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
