"""The processes of a run and what can be done to each: killed, frozen, deprived of disk and time.

The engine, the daemon, the agents and the trainer are processes of their own. Agents and trainer are forked from a
process that has imported their libraries, since hundreds of them are started.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from tests.faults import agent, player, trainer
from tests.faults.agent import ABSENT, MEMBERS, MODELS
from tests.faults.notes import Reader, lines, replace
from tests.faults.supervised import Supervised
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT

ROOM = 512 << 20
LANE_WAIT_S = 5.0
END_S = 600.0
"""A worker that was told to die has so long, however slow the machine is."""
GIVEN_UP = tuple(f'ajet_captures_total{{outcome="{outcome}"}}' for outcome in ("disconnected", "engine_silent"))
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.faults.player", "tests.faults.trainer"])


class Engine:
    """The scripted engine of a model as a process, and of the model whose trainer never comes."""

    def __init__(self, model: str) -> None:
        models = ["--model", model, "--model", ABSENT]
        options = [*models, "--delay", "0.002", "--port", str(port := free_port())]
        self._command = [sys.executable, "-m", "tests.kit.engine_stub", *options]
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().decode().split()[-1] == self.url

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still meanwhile."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def spoil(self, *faults: dict[str, Any]) -> None:
        """The next answers go wrong."""
        request = urllib.request.Request(f"{self.url}/stub/faults", json.dumps(faults).encode(), method="POST")
        urllib.request.urlopen(request, timeout=300).close()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Disk:
    """Where the daemon's data lie: a small file system of its own where we may make one, else an ordinary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
        self.own = subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0

    def fill(self, proxy: ProxyProcess, spare: int) -> None:
        """Leave `spare` bytes; without a file system of its own no file may be larger than a part of that."""
        if self.own:
            while True:  # what is written meanwhile may be more than was spared: the kernel refuses such a size
                stat = os.statvfs(self.folder)
                if self._size((stat.f_blocks - stat.f_bfree) * stat.f_frsize + spare):
                    return
        _, hard = resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE, (spare // 4, hard))  # less than a segment

    def free(self, proxy: ProxyProcess) -> None:
        if self.own:
            assert self._size(ROOM), "the file system cannot grow again"
            return
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def _size(self, size: int) -> bool:
        """Gives the file system that many bytes from now on, and tells whether that worked."""
        remount = ["mount", "-o", f"remount,size={size}", str(self.folder)]
        return subprocess.run(remount, check=False, capture_output=True).returncode == 0

    def close(self) -> None:
        """Unmounts it, and leaves a copy of its contents beside it."""
        if self.own:
            try:
                shutil.copytree(self.folder, self.folder.with_suffix(".copy"), ignore=shutil.ignore_patterns("*.sock"))
            finally:
                subprocess.run(["umount", "-l", str(self.folder)], check=False, capture_output=True)


def forked(target: Callable[..., object], *given: Any, name: str | None = None) -> BaseProcess:
    process = FORKED.Process(target=target, args=given, daemon=True, name=name)
    process.start()
    return process


class Worker:
    """A forked process that is started anew after each kill, as its next life."""

    def __init__(self, start: Callable[[int], BaseProcess]) -> None:
        self._start = start
        self.life = 0
        self.process = start(0)

    def kill(self) -> bool:
        """SIGKILL; whether it died of that."""
        self.process.kill()
        return self.killed()

    def killed(self) -> bool:
        """Tell whether it has died of SIGKILL; waits for its end."""
        self.process.join(END_S)
        assert self.process.exitcode is not None, f"still there after {END_S:g} s"
        return self.process.exitcode == -signal.SIGKILL

    @property
    def stopped(self) -> bool:
        """Tell whether it stands still (SIGSTOP)."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def go_on(self) -> None:
        """After it stood still."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def again(self) -> None:
        self.life += 1
        self.process = self._start(self.life)


class Asking:
    """Asks the daemon of a `stage` until it is there, and reads what was noted. `counts` says what was compared."""

    waits_for: tuple[int, ...] = ()
    """Answers after which it asks again."""

    def __init__(self, stage: Any, counts: Counter[str]) -> None:
        self.stage, self.counts, self.reader = stage, counts, Reader()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.asked(method, path, body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def asked(self, method: str, path: str, body: Any = None) -> httpx.Response:
        give_up = time.monotonic() + 300
        while True:
            try:
                answer: httpx.Response = self.stage.http.request(method, path, json=body)
                if answer.status_code not in self.waits_for or time.monotonic() > give_up:
                    return answer
            except httpx.TransportError:
                assert self.stage.proxy.status is None, f"the proxy ended by itself: {self.stage.proxy.status}"
                if time.monotonic() > give_up:
                    raise
            time.sleep(0.05)

    def listed(self) -> list[str]:
        """Every episode that was ever opened."""
        names, rest = list[str](), ""
        while True:
            page = self.ask("GET", f"/episodes?limit=1000{rest}")
            names += [item["episode"] for item in page["episodes"]]
            if page.get("next") is None:
                assert len(names) == len(set(names))
                return names
            rest = f"&before={page['next']}"


class Stage:
    """Everything that runs. `root` is an empty folder; the proxy is a daemon with so many `workers`.

    The first two agents are strangers, each with one of the models, whose episodes open on their first calls. The
    others are clients, whose episodes ask both models: every second one starts again under the same name. A few
    episodes also ask a model whose trainer never comes.
    """

    def __init__(self, root: Path, seed: int, agents: int, workers: int = 1) -> None:
        self.root, self.notes, self.stops = root, root / "notes", root / "stops"
        self._conditions = root / "conditions"
        self.leases, self.dropped, self.holds = (self._conditions / name for name in ("leases", "dropped", "holds"))
        self._revision, self._whole = root / "revision", root / "whole"
        for folder in (self.notes, self.stops, self._conditions, self._whole, *map(self.folder, MODELS)):
            folder.mkdir(parents=True)
        self.revise(0)
        self.clock(0.0)
        self.engines = {model: Engine(model) for model in MODELS}
        upstreams = [f"{model}={self.engines[model].url}" for model in MODELS]
        upstreams.append(f"{ABSENT}={self.engines[MODELS[0]].url}")
        self.disk = Disk(root / "disk")
        self.proxy = ProxyProcess(
            None, root / "disk/data", inside=(sys.executable, "-m", "tests.faults.daemon",
            str(self._conditions)), env={"PYTHONPATH": str(ROOT)},
            options=["--group-size", str(player.GROUP), "--idle-timeout", "100000", "--wall-timeout", "1000000",
                     "--workers", str(workers), *(part for one in upstreams for part in ("--upstream", one))],
        )  # fmt: skip
        self.proxy.log = root / "proxy.log"
        self.proxy.start()
        self.http = httpx.Client(base_url=f"{self.proxy.url}/ajet/v1", timeout=300.0, trust_env=False)
        self._abandon(6)
        self.trainers = {model: Worker(lambda life, model=model: self._trainer(model, life)) for model in MODELS}  # type: ignore[misc]
        self.agents = [Worker(lambda life, n=n: self._agent(n, f"s{seed}a{n}l{life}")) for n in range(agents)]  # type: ignore[misc]
        self.run = Supervised(root / "supervised", self.proxy.url)

    def _abandon(self, number: int) -> None:
        """Both models are announced. A few episodes also ask a model whose trainer never comes."""
        members = {**MEMBERS, "judges": ABSENT}
        self.http.put("/mix", json={"lane_wait_s": LANE_WAIT_S}).raise_for_status()
        for model in MODELS:
            self.http.post("/policy", json={"model": model, "version": 0}).raise_for_status()
        for name in (f"absent{count}" for count in range(number)):
            self.http.post("/episodes", json={"id": name, "task": "task", "members": members}).raise_for_status()
            alone = agent.Agent(self.proxy.url, name, self.notes / "absent.log", members)
            alone.turns(name, f"{self.proxy.url}/e/{name}/v1", "none", "task")
            alone.http.close()

    def _agent(self, place: int, name: str) -> BaseProcess:
        arguments: tuple[Any, ...] = (self.proxy.url, name, self.notes / f"{name}.log", self.stops / "agents")
        member = sorted(MEMBERS)[place] if place < len(MEMBERS) else None
        if member:
            arguments = (*arguments, member)
        else:
            client = name.rpartition("l")[0] if place % 2 else name
            arguments = (*arguments[:2], client, *arguments[2:], self._revision, self._whole)
        return forked(agent.run if member else player.run, *arguments, name=name)

    def clients(self, life: BaseProcess) -> list[str]:
        """As which clients an agent that is dead has joined."""
        notes = lines(self.notes / f"{life.name}.log")
        return [note["client"] for note in notes if note["kind"] == "joins"]

    def revise(self, number: int) -> None:
        """The code that agents play with is another one."""
        replace(self._revision, f"r{number}")

    def folder(self, model: str) -> Path:
        return self.root / "trainers" / model

    def order(self, model: str, order: str) -> None:
        """Give the trainer of a model an order (`tests.faults.trainer.Orders`)."""
        replace(self.folder(model) / "order", order)

    def _trainer(self, model: str, life: int) -> BaseProcess:
        notes = self.notes / f"trainer-{model}{life}.log"
        return forked(trainer.run, self.proxy.url, model, self.folder(model), notes, self.stops / "trainer")

    def checkpoint(self, model: str) -> dict[str, Any]:
        return trainer.checkpoint(self.folder(model))

    def clock(self, offset: float) -> None:
        """The wall clock that the daemon sees is wrong by so many seconds."""
        replace(self._conditions / "clock", str(offset))

    @contextlib.contextmanager
    def failing(self, call: str, error: str) -> Iterator[None]:
        """Has the disk fail meanwhile at whatever the daemon asks of it by `call`."""
        order = self._conditions / call
        replace(order, error)
        try:
            yield
        finally:
            order.unlink()

    def compacting(self) -> bool:
        """Tell whether the daemon has a compaction running."""
        return bool(self._children("compaction"))

    def kill_worker(self, dice: random.Random) -> bool:
        """SIGKILL; whether one was there."""
        running = self._children("ajet_proxy.worker")
        if running:
            os.kill(dice.choice(running), signal.SIGKILL)
        return bool(running)

    def _children(self, program: str) -> list[int]:
        """The processes of the daemon that run `program`."""

        def runs(pid: str) -> bool:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                return program in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            return False

        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{self.proxy.pid}/task/{self.proxy.pid}/children").read_text()
            return [int(pid) for pid in children.split() if runs(pid)]
        return []

    def kill_proxy(self, dice: random.Random) -> bool:
        """Alone, so that a compaction and workers notice it by themselves, or with them; whether it died of that."""
        if dice.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.proxy.pid, signal.SIGKILL)
        self.proxy.kill()
        return self.proxy.status == -signal.SIGKILL

    def given_up(self) -> int:
        """The number of calls that the daemon has lost since its start because their clients went away."""
        lines = self.http.get(f"{self.proxy.url}/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(GIVEN_UP))

    def healthy(self) -> bool:
        """Tell whether the daemon says that it can write."""
        try:
            return bool(self.http.get("/status").json()["journal"]["healthy"])
        except (httpx.TransportError, KeyError, ValueError):
            return False

    def close(self) -> None:
        """The disk goes last, whatever fails before: a folder that is mounted cannot be removed by anybody."""
        with contextlib.ExitStack() as rest:
            rest.callback(self.disk.close)
            for worker in (*self.agents, *self.trainers.values()):
                worker.kill()
            self.run.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.proxy.pid, signal.SIGKILL)
            self.proxy.kill()
            for engine in self.engines.values():
                engine.stop()
            self.http.close()


