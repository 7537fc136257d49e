"""Two real daemons feed one trainer; one of them is killed while it has leased batches out, and started again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_trainer import daemons as module
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.daemons import Daemons, Keeper
from ajet_trainer.progress import Progress
from ajet_trainer.step import Run
from ajet_trainer.trained_batches import TrainedBatches
from tests.kit.proxy_process import ProxyProcess
from tests.kit.stub_process import stub_process

TASKS, SIZE, LEASE_S = 4, 2, 2.0


class Learner:
    """Remembers the tokens of each row; what stands first in `at_train` or `at_push` is done within such a step."""

    max_tokens = 100_000
    temperature = 1.0
    several_temperatures = True
    vocabulary: int | None = None
    by_turn = shaping = None
    compares = True

    def __init__(self, *, colocated: bool = False) -> None:
        self.colocated = colocated
        self.version = 0
        self.rows: list[tuple[int, ...]] = []
        self.at_train: list[Callable[[], None]] = []
        self.at_push: list[Callable[[], None]] = []

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        self.rows += [(*row.prompt.tolist(), *row.response.tolist()) for row in rows]
        if self.at_train:
            self.at_train.pop(0)()
        self.version += 1
        return {}

    def save(self, batches: Mapping[str, Any]) -> None:
        pass

    def tune(self, config: Config) -> None:
        pass

    def push(self) -> None:
        if self.at_push:
            self.at_push.pop(0)()

    def upstreams(self) -> None:
        return None

    def compare(self) -> None:
        pass

    def check(self) -> None:
        pass

    def log(self, figures: Mapping[str, float], step: int) -> None:
        pass


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[ProxyProcess, ProxyProcess]]:
    options = ("--group-size", str(SIZE))
    with (
        stub_process("--model", "stub") as engine,
        ProxyProcess(engine, tmp_path / "a", options=options) as a,
        ProxyProcess(engine, tmp_path / "b", options=options) as b,
    ):
        yield a, b


def play(proxy: ProxyProcess, name: str) -> None:
    """`TASKS` whole groups, every prompt like no other; the episodes have the same names at both daemons."""
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=60.0) as http:
        for task in range(TASKS):
            for index in range(SIZE):
                body = {"model": "stub", "messages": [{"role": "user", "content": f"{name} {task} {index}"}]}
                episode = f"run-{task}-{index}"
                call = {"X-AJet-Task": f"t{task}"}
                http.post(f"/e/{episode}/v1/chat/completions", json=body, headers=call).raise_for_status()
                reward = {"value": float(index)}
                http.post(f"/ajet/v1/episodes/{episode}/rewards", json=reward).raise_for_status()


def train(
    two: tuple[ProxyProcess, ProxyProcess], folder: Path, learner: Learner, said: list[str] | None = None,
    **options: Any,
) -> list[str]:
    """What is said (in `said`, too) in a whole run over both, which have `TASKS` groups each and are left in order."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, two, ("first", "second")))
    said = [] if said is None else said
    config = Config(
        model="none", model_name="stub", proxy_url=tuple(proxy.url for proxy in two), run_dir=str(folder / "run"),
        group_size=SIZE, **options,
    )  # fmt: skip
    batches, progress = TrainedBatches(), Progress(config.run_dir, config.total_steps, said.append)
    daemons, give_up = Daemons.of(config, said.append), time.monotonic() + 120
    with closing(daemons), Keeper(daemons, LEASE_S) as keeper:
        daemons.meet()
        run = Run(
            config, daemons, learner, batches, keeper, progress, stopping=lambda: time.monotonic() > give_up
        )  # fmt: skip
        try:
            run.start()
            run.loop()
        finally:
            run.close()
    assert learner.version == config.total_steps, said
    assert batches.unacknowledged == ()
    assert len(set(learner.rows)) == len(learner.rows)
    models = [proxy.report()["models"]["stub"] for proxy in two]
    assert [(model["gate"], model["policy_version"]) for model in models] == [("open", learner.version)] * 2
    return said


def trained(proxy: ProxyProcess) -> int:
    return int(proxy.report()["episodes"]["trained"])


def test_one_that_is_killed_while_its_batch_is_trained_has_everything_trained_once(
    two: tuple[ProxyProcess, ProxyProcess], tmp_path: Path
) -> None:
    a, b = two
    late: list[threading.Thread] = []
    said: list[str] = []
    away = f"the daemon at {b.url} is away, training continues with 1 of 2"

    def kill() -> None:
        """Its batch is trained, unsaved and leased: it dies, its lease runs out, it is missed and comes back."""
        b.kill()
        late.append(threading.Timer(LEASE_S + 1.0, come_back))
        late[0].start()

    def come_back() -> None:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up and not any(line.startswith(away) for line in said):
            time.sleep(0.05)
        b.start()

    learner = Learner()
    learner.at_train = [kill]
    try:
        train(two, tmp_path, learner, said, groups=2, save_freq=2, total_steps=TASKS)
    finally:
        late[0].join()
    assert any(line.startswith(away) for line in said), said
    assert f"the daemon at {b.url} is back" in said
    assert trained(a) == TASKS * SIZE
    assert trained(a) + trained(b) == len(learner.rows) > TASKS * SIZE


def test_one_that_is_killed_with_closed_gates_keeps_no_agent_of_the_other_waiting(
    two: tuple[ProxyProcess, ProxyProcess], tmp_path: Path
) -> None:
    a, b = two
    asked: list[Future[int]] = []
    with ThreadPoolExecutor(1) as agent:

        def ask() -> int:
            body = {"model": "stub", "messages": [{"role": "user", "content": "held"}]}
            url = f"{a.url}/e/held/v1/chat/completions"
            return httpx.post(url, json=body, trust_env=False, timeout=60.0).status_code

        def kill() -> None:
            assert [proxy.report()["models"]["stub"]["gate"] for proxy in two] == ["closed", "closed"]
            asked.append(agent.submit(ask))
            while not a.report()["requests"]["waiting"]:
                time.sleep(0.05)
            b.kill()

        def restart() -> None:
            """The gate of the other is open again, and nobody waits there any more."""
            assert asked[0].result(timeout=60) == 200
            b.start()
            assert b.report()["models"]["stub"]["gate"] == "closed"

        learner = Learner()
        learner.at_push, learner.at_train = [lambda: None, kill], [lambda: None, restart]
        said = train(two, tmp_path, learner, groups=2, save_freq=1, total_steps=4)
    assert f"the daemon at {b.url} is back" in said
    assert trained(a) + trained(b) == len(learner.rows) == 4 * 2 * SIZE


def test_one_that_freezes_does_not_hold_up_an_update(
    two: tuple[ProxyProcess, ProxyProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing and closes no connection, as a host that hangs."""
    monkeypatch.setattr(module, "ANSWER_S", 1.0)
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    a, b = two
    learner = Learner(colocated=True)
    learner.at_train = [lambda: os.kill(b.pid, signal.SIGSTOP), lambda: os.kill(b.pid, signal.SIGCONT)]
    try:
        said = train(two, tmp_path, learner, groups=1, save_freq=1, total_steps=2 * TASKS)
    finally:
        os.kill(b.pid, signal.SIGCONT)
    assert any(line.startswith(f"the daemon at {b.url} is away") for line in said), said
    assert f"the daemon at {b.url} is back" in said
    assert trained(a) + trained(b) == len(learner.rows) == 2 * TASKS * SIZE
