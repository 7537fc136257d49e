"""Where a swarm plays: engine, daemon and trainer on one host, and each client on a host of its own.

`Site` is what all runs share. `Training` is one run in a folder of its own, with the real daemon and the real trainer.
`Client` is ``ajet run`` with a data set. Hosts are network namespaces (`tests.kit.hosts`).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ajet_trainer import trained_rows
from tests.bench.swarm import agent as agent_module
from tests.kit.environment import clean
from tests.kit.hosts import Hosts
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.tiny_model import build
from tests.kit.trainer_process import FLOAT32, RATE, TrainerFailed, TrainerProcess
from tests.kit.vllm_process import vllm_server

AJET, PYTHON = ROOT / ".venv/bin/ajet", ROOT / ".venv/bin/python"
HOME, CLIENTS = "home", ("one", "two", "three")
SECRET = "the secret of a bench"
LIMIT_S = 1200.0
VERL = {**FLOAT32, RATE: 1e-2}
Ran = Mapping[str, Any]
"""The part of a run that is kept, as JSON: ``lines`` of metrics, unix ``times`` at which they came, ``began``,
``episodes``, ``rows`` (for each step its groups and episodes), ``status``, ``clients`` and ``notes``."""
EPISODE = (
    "episode", "task", "lane", "state", "reason", "reward", "client", "revision", "opened_at", "sealed_at", "ended_at"
)


@dataclass(frozen=True, slots=True)
class Site:
    """`engine` serves the tiny model, until a trainer gives it other weights."""

    hosts: Hosts
    engine: str
    folder: Path


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """The calling thread is on the host of engine, daemon and trainer."""
    with Hosts(HOME, *CLIENTS) as hosts, hosts.at(HOME):
        model = build(folder / "model")
        with vllm_server(model, folder / "vllm.log") as engine:
            yield Site(hosts, engine, folder)


class Client:
    """``ajet run`` on `host`: every program of `tasks`, `parallel` at once, with `more` options."""

    def __init__(
        self, training: Training, host: str, agent: Path, tasks: Path, *more: str, parallel: int
    ) -> None:
        self.host, self.name = host, host
        self._command = [
            *training.site.hosts.inside(host), str(AJET), "run", "--quiet", "--tasks", str(tasks),
            "--repeat", str(training.size), "--epochs", "100", "--parallel", str(parallel), "--reward-from", "stdout",
            *more,
        ]  # fmt: skip
        self._program = ["--", str(PYTHON), str(agent)]
        self._env = clean(AJET_PROXY_URL=training.url, AJET_API_KEY=training.proxy.key("agent"))
        self._log = training.folder / f"{host}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name: str | None = None) -> None:
        """Begins, or goes on, as `name`."""
        self.name = name or self.name
        command = [*self._command, "--name", self.name, *self._program]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        """Ends it so, and waits for that."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(60)

    def words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""


class Training:
    """One run of so many `steps` in `folder`. Agents go on while a step trains, and nothing is too stale."""

    def __init__(
        self, site: Site, folder: Path, *, seed: int, steps: int, groups: int, size: int, mix: Mapping[str, float] = {}
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.site, self.folder, self.steps, self.size = site, folder, steps, size
        self.clients: list[Client] = []
        self.notes: dict[str, Any] = {}
        self.times: list[float] = []
        address = site.hosts.address(HOME)
        self.url = f"http://{address}:8484"
        self.proxy = ProxyProcess(
            f"tiny={site.engine}", folder / "proxy", port=8484, env={"AJET_ADMIN_SECRET": SECRET},
            options=["--listen", f"{address}:8484", "--insecure", "--gate-mode=pause", "--group-size", str(size)],
        )  # fmt: skip
        self._ours = {
            "model": build(folder / "model", seed=seed), "model_name": "tiny", "engine_urls": [site.engine],
            "proxy_url": self.url, "groups": groups, "group_size": size, "max_tokens": 512, "total_steps": steps,
            "save_freq": 4,
        }  # fmt: skip
        self._mix = mix
        self._http = httpx.Client(
            base_url=f"{self.url}/ajet/v1", headers={"Authorization": f"Bearer {SECRET}"}, trust_env=False, timeout=60.0
        )

    def ask(self, method: str, path: str, **more: Any) -> Any:
        return self._http.request(method, path, **more).raise_for_status().json()

    def client(self, host: str, agent: Path, tasks: Path, *more: str, parallel: int) -> Client:
        self.clients.append(Client(self, host, agent, tasks, *more, parallel=parallel))
        return self.clients[-1]

    def play(self, begin: Callable[[Training], Callable[[float], None]]) -> Ran:
        """The whole run. `begin` starts clients once the trainer waits for episodes. What it returns is called all the
        time, with the seconds since then."""
        with ExitStack() as stack:
            stack.enter_context(self._http)
            stack.enter_context(self.proxy)
            ours = self._ours | {"key": self.proxy.key("trainer")}
            trainer = stack.enter_context(TrainerProcess(self.folder, ours, VERL, mix=self._mix))
            stack.callback(self._end)
            trainer.until(lambda: trainer.phase() == "waiting for episodes", LIMIT_S)
            began, since = time.time(), time.monotonic()
            tick = begin(self)
            while len(self.times) < self.steps:
                self.times += [time.time()] * (len(trainer.metrics()) - len(self.times))
                if trainer.process.poll() is not None and len(trainer.metrics()) < self.steps:
                    raise TrainerFailed(trainer.words())
                if time.monotonic() - since > LIMIT_S:
                    words = "\n".join(client.words() for client in self.clients)
                    raise TrainerFailed(f"{len(self.times)} steps in {LIMIT_S:.0f} s\n{trainer.words()}\n{words}")
                tick(time.monotonic() - since)
                time.sleep(0.05)
            lines = trainer.finish(LIMIT_S)
            self._end()
            return {
                "lines": lines, "times": self.times, "began": began,
                "episodes": list(listed(self._http, EPISODE)),
                "rows": {
                    step: _trained(trainer.run_dir, step) for step in trained_rows.steps(trainer.run_dir)
                },
                "status": self.ask("GET", "/status"), "clients": self.ask("GET", "/clients")["clients"],
                "notes": self.notes,
            }  # fmt: skip

    def _end(self) -> None:
        for client in self.clients:
            client.signal(signal.SIGKILL)


def listed(http: httpx.Client, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """These fields of every episode; `http` asks the control routes of a daemon."""
    query: dict[str, Any] = {"limit": 1000}
    while True:
        answer = http.get("/episodes", params=query).raise_for_status().json()
        yield from ({name: one.get(name) for name in names} for one in answer["episodes"])
        if "next" not in answer:
            return
        query["before"] = answer["next"]


def _trained(run_dir: Path, step: int) -> list[tuple[str, str]]:
    """The groups and episodes of a step."""
    rows, _ = trained_rows.read(run_dir, step)
    return sorted({(one.row.group, one.row.episode) for one in rows})


def tasks(folder: Path, lane: str, number: int = 20) -> Path:
    """A data set of one lane."""
    path = folder / f"{lane}.txt"
    path.write_text("".join(f"{lane}/{task:02d}\n" for task in range(number)))
    return path


def agent(folder: Path) -> Path:
    """A copy of the agent, which may be edited."""
    return Path(shutil.copy(Path(agent_module.__file__), folder / "agent.py"))


def rewards(ran: Ran) -> list[float]:
    """The mean reward of each step."""
    return [line["reward_mean"] for line in ran["lines"]]
