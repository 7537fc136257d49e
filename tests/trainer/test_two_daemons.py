"""Two real daemons feed one trainer; one of them is killed while it has leased batches out, and started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.daemons import Daemons
from ajet_trainer.history import History
from ajet_trainer.keeper import Keeper
from ajet_trainer.progress import Progress
from ajet_trainer.step import Run
from tests.kit.proxy_process import ProxyProcess
from tests.kit.stub_process import stub_process

TASKS, SIZE, LEASE_S = 4, 2, 2.0


class Learner:
    """Remembers the sampled tokens of each row; `at_train` is called within a step."""

    colocated, max_tokens = False, 100_000

    def __init__(self) -> None:
        self.version = 0
        self.rows: list[tuple[int, ...]] = []
        self.at_train: list[Any] = []

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        self.rows += [(*row.prompt.tolist(), *row.response.tolist()) for row in rows]
        if self.at_train:
            self.at_train.pop(0)()
        self.version += 1
        return {}

    def save(self, history: Mapping[str, Any]) -> None:
        self.state = history

    def push(self) -> None:
        pass

    def upstreams(self) -> None:
        return None

    def check(self) -> None:
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


def counts(proxy: ProxyProcess) -> dict[str, Any]:
    status: dict[str, Any] = httpx.get(f"{proxy.url}/ajet/v1/status", trust_env=False).json()
    return status


def test_two_daemons_feed_one_trainer_and_one_is_killed_between(
    two: tuple[ProxyProcess, ProxyProcess], tmp_path: Path
) -> None:
    a, b = two
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, two, ("first", "second")))
    said: list[str] = []
    config = Config(
        model="none", model_name="stub", proxy_url=(a.url, b.url), run_dir=str(tmp_path / "run"), groups=2,
        group_size=SIZE, lease_s=LEASE_S, save_freq=2, total_steps=TASKS, drain_s=30.0,
    )  # fmt: skip
    learner, history, progress = Learner(), History(), Progress(config.run_dir, TASKS, said.append)
    daemons = Daemons.of(config, said.append)
    daemons.meet()
    late: list[threading.Thread] = []

    def kill() -> None:
        """In the first step, whose batch is trained, unsaved and leased: it dies, its leases run out, it comes back."""
        b.kill()
        again = threading.Timer(LEASE_S + 1.0, b.start)
        late.append(again)
        again.start()

    learner.at_train = [kill]
    give_up = time.monotonic() + 120
    with closing(daemons), Keeper(daemons, LEASE_S) as keeper:
        run = Run(
            config, daemons, learner, history, keeper, progress, stopping=lambda: time.monotonic() > give_up
        )  # fmt: skip
        try:
            run.start()
            run.loop()
        finally:
            run.close()
            late[0].join()
    assert any(line.startswith(f"the daemon at {b.url} is away, training goes on with 1 of 2") for line in said), said
    assert f"the daemon at {b.url} is back" in said
    assert len(set(learner.rows)) == len(learner.rows)
    trained = [counts(proxy)["episodes"]["trained"] for proxy in two]
    assert sum(trained) == len(learner.rows) > TASKS * SIZE
    assert trained[0] == TASKS * SIZE
    assert all(counts(proxy)["models"]["stub"]["gate"] == "open" for proxy in two)
    assert {counts(proxy)["models"]["stub"]["policy_version"] for proxy in two} == {learner.version}
    assert history.unacknowledged == ()
