"""The real trainer as a child process: ``ajet-trainer run`` from `.venv-engine`, killable with everything below it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.kit.environment import clean
from tests.kit.source import ROOT

TRAINER = ROOT / ".venv-engine" / "bin" / "ajet-trainer"
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
RATE = "actor_rollout_ref.actor.optim.lr"
LIMIT_S = 900.0
"""The time in which a busy machine has done whatever a test waits for."""
PRECISION = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
FLOAT32 = {f"{PRECISION}.{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
"""Keys of verl, by which trainer and engine compute alike."""
SHORTER = """
from functools import partial
from ajet_trainer import cli
from ajet_trainer import training
training.Keeper = partial(training.Keeper, lease_s={})
cli.main()
"""


class TrainerFailed(RuntimeError):
    """The trainer ended or stood still when it should not have; the message ends with what it wrote."""


class TrainerProcess:
    """``with TrainerProcess(folder, {"model": …}, {verl keys}) as trainer``; `folder` keeps config, log and run.
    Samples are short and no checkpoint is saved, unless `ours` says otherwise."""

    def __init__(
        self, folder: Path, ours: Mapping[str, Any], verl: Mapping[str, Any], *, mix: Mapping[str, float] = {},
        lease_s: float | None = None,
    ) -> None:
        """With `lease_s`, leases are shorter than in every other trainer; `mix` are the shares of lanes, if any."""
        self.run_dir = folder / "run"
        self.log = folder / "trainer.log"
        self._config = folder / "trainer.toml"
        self._program = [str(TRAINER)] if lease_s is None else [str(PYTHON), "-c", SHORTER.format(lease_s)]
        values = {"run_dir": self.run_dir, "max_tokens": 256, "save_freq": 0, **ours}
        lines = ["[trainer]", *(f"{k} = {json.dumps(v, default=str)}" for k, v in values.items())]
        if mix:
            lines += ["[mix]", *(f"{lane} = {share}" for lane, share in mix.items())]
        lines += ["[verl]"]
        theirs = {"trainer.device": "cpu", **verl}
        self._config.write_text("\n".join([*lines, *(f"{k} = {json.dumps(v)}" for k, v in theirs.items()), ""]))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TrainerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            below = self.below()
            self._process.kill()
            self._process.wait()
            end_all(below)

    def start(self, *words: str) -> TrainerProcess:
        """A new process over the same configuration, with `words` as KEY=VALUE."""
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        env = {name: value for name, value in clean().items() if name not in ranks}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._program, "run", "--config", str(self._config), *words],
                stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` so far."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def phase(self) -> str:
        path = self.run_dir / "phase.json"
        return str(json.loads(path.read_text())["phase"]) if path.exists() else ""

    def until(self, reached: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Waits until `reached`; a trainer that ends before that, or the limit, is a failure."""
        give_up = time.monotonic() + limit_s
        while not reached():
            if self.process.poll() is not None:
                raise TrainerFailed(f"the trainer ended with {self.process.returncode}:\n{self.words()}")
            if time.monotonic() > give_up:
                raise TrainerFailed(f"the trainer stood still at {self.phase()!r}:\n{self.words()}")
            time.sleep(0.2)

    def finish(self, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """Until it ends by itself, as it should; its metrics."""
        if self.wait(limit_s) != 0:
            raise TrainerFailed(self.words())
        return self.metrics()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Until it ends by itself; the exit status."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TrainerFailed(f"the trainer does not end; it is at {self.phase()!r}:\n{self.words()}") from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def below(self) -> list[psutil.Process]:
        """Every process that the trainer started: Ray, the workers, vLLM."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def words(self) -> str:
        """The lines that a user saw, and the end of what the libraries wrote."""
        library = self.run_dir / "verl.log"
        tail = library.read_text(errors="replace")[-3000:] if library.exists() else ""
        return f"{self.log.read_text(errors='replace')}\n--- verl.log\n{tail}"


def end_all(processes: list[psutil.Process]) -> None:
    """SIGKILL for every one that still lives."""
    for process in processes:
        if process.is_running():
            process.kill()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of `processes` that live on, however long they are given to end."""
    give_up = time.monotonic() + LIMIT_S
    while (alive := [process for process in processes if lives(process)]) and time.monotonic() < give_up:
        time.sleep(0.2)
    return alive


def lives(process: psutil.Process) -> bool:
    """True until it has ended, whether or not its parent knows."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
