"""One run of a team: a daemon, two attached engines, and a trainer for each model, on one host."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from ajet_trainer import trained_rows
from tests.bench.swarm.stage import VERL, Ran, listed
from tests.bench.team.models import MODELS, build
from tests.kit.environment import clean
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.trainer_process import TrainerFailed, TrainerProcess
from tests.kit.vllm_process import vllm_server

PYTHON = ROOT / ".venv/bin/python"
RATE, ENTROPY = 5e-4, 0.01
GROUPS, SIZE, PARALLEL = 4, 16, 64
LIMIT_S = 900.0
EPISODE = ("episode", "state", "reason", "reward", "models", "shares")


@contextmanager
def engines(folder: Path) -> Iterator[Mapping[str, str]]:
    """A vLLM for each model, by name. A trainer gives it other weights."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(vllm_server(build(folder, name, 0), folder / f"{name}.log", name=name))
            for name in MODELS
        }


class Gates:
    """Looks whether anybody is held at a gate that is not shut: counts of what was seen of each model, ten times a
    second.

    Those who waited at a gate that has just opened are still counted as waiting. So they are held if the look after
    sees some too.
    """

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/ajet/v1", trust_env=False, timeout=60.0)
        self.seen = Counter[str]()
        self._before = set[str]()

    def look(self) -> None:
        gates = self.http.get("/status").raise_for_status().json()["models"]
        held = {model for model, gate in gates.items() if gate["gate"] == "open" and gate["waiting"]}
        for model, gate in gates.items():
            others = any(other["gate"] != "open" for name, other in gates.items() if name != model)
            if gate["gate"] == "open" and others:
                self.seen[f"{model}: another's gate is shut"] += 1
                self.seen[f"{model}: and requests wait"] += model in held & self._before
        self._before = held


class Memory:
    """The most memory that this process and all below it had at once, in bytes, as far as anybody looked."""

    def __init__(self) -> None:
        self.most = 0
        self._next = 0.0

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 20.0
        total = 0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        self.most = max(self.most, total)


def run(urls: Mapping[str, str], folder: Path, learn: Sequence[str], seed: int, steps: int) -> Ran:
    """Both models are trained for so many `steps`, those that do not `learn` with a learning rate of 0."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    more = [word for name in MODELS[1:] for word in ("--upstream", f"{name}={urls[name]}")]
    first = f"{MODELS[0]}={urls[MODELS[0]]}"
    began = time.monotonic()
    with ExitStack() as stack:
        proxy = stack.enter_context(ProxyProcess(first, folder / "proxy", options=[*more, "--gate-mode=pause"]))
        trainers = {
            name: stack.enter_context(_trainer(proxy.url, urls[name], folder, name, seed, steps, name in learn))
            for name in MODELS
        }
        for trainer in trainers.values():
            trainer.until(lambda one=trainer: one.phase() == "waiting for episodes", LIMIT_S)  # type: ignore[misc]
        started, memory, gates = time.monotonic(), Memory(), Gates(proxy.url)
        with (folder / "game.log").open("wb") as log:
            game = subprocess.Popen(
                [str(PYTHON), "-m", "tests.bench.team.game", str(SIZE), str(PARALLEL)], cwd=ROOT,
                env=clean(AJET_PROXY_URL=proxy.url), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        stack.callback(_end, game)
        while any(trainer.process.poll() is None for trainer in trainers.values()):
            if time.monotonic() - started > LIMIT_S:
                raise TrainerFailed("\n".join(trainer.words() for trainer in trainers.values()))
            if game.poll() is not None:
                raise TrainerFailed((folder / "game.log").read_text()[-2000:])
            memory.look()
            gates.look()
            time.sleep(0.1)
        if any(trainer.process.returncode for trainer in trainers.values()):
            raise TrainerFailed("\n".join(trainer.words() for trainer in trainers.values()))
        played = time.monotonic() - started
        _end(game)
        return {
            "lines": {name: trainer.metrics() for name, trainer in trainers.items()},
            "rows": {name: _episodes_of(trainer.run_dir) for name, trainer in trainers.items()},
            "episodes": list(listed(gates.http, EPISODE)), "status": proxy.report(), "memory": memory.most,
            "gates": gates.seen, "seconds": {"start": started - began, "steps": played},
        }  # fmt: skip


def _trainer(
    proxy: str, engine: str, folder: Path, name: str, seed: int, steps: int, learns: bool
) -> TrainerProcess:
    (folder / name).mkdir()
    ours = {
        "model": build(folder, name, seed), "model_name": name, "engine_urls": [engine], "proxy_url": proxy,
        "groups": GROUPS, "group_size": SIZE, "max_tokens": 2048, "total_steps": steps, "save_freq": 20,
    }  # fmt: skip
    theirs = {"optim.lr": RATE if learns else 0.0, "entropy_coeff": ENTROPY}
    return TrainerProcess(
        folder / name, ours, VERL | {f"actor_rollout_ref.actor.{key}": value for key, value in theirs.items()}
    )


def _end(game: subprocess.Popen[bytes]) -> None:
    if game.poll() is None:
        game.send_signal(signal.SIGKILL)
        game.wait()


def _episodes_of(run_dir: Path) -> list[list[str]]:
    """The episodes that each step trained."""
    return [
        sorted({one.row.episode for one in trained_rows.read(run_dir, step)[0]})
        for step in sorted(trained_rows.steps(run_dir))
    ]
