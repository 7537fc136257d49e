"""The reward of an agent is edited while a trainer leases: real daemon, real ``ajet run --watch``, scripted trainer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.routes import Lease, SetMix
from ajet_sdk.sample import Batch
from ajet_trainer.link import Link
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.kit.stub_process import stub_process
from tests.proxy.test_plays import AJET, clean

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")

AGENT = """
import json, os, time, urllib.request
body = json.dumps({"model": "stub", "messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 4}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})).read()
time.sleep(0.1)
print(REWARD)
"""
SIZE, GROUPS, LIMIT_S = 3, 2, 120.0


class Trainer:
    """Leases batches one after the other and trains each at once, until it is told to stop."""

    def __init__(self, url: str) -> None:
        self.batches: list[Batch] = []
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _train(self) -> None:
        with closing(Link(self._url)) as link:
            link.announce("stub", 0)
            link.direct(SetMix(ahead=GROUPS, group_size=SIZE))
            while not self._over.is_set():
                if (batch := link.lease(Lease(groups=GROUPS, group_size=SIZE, wait_s=0.2))) is not None:
                    self.batches.append(batch)
                    link.ack(batch.batch, len(self.batches))
                    link.announce("stub", len(self.batches))

    def rewards(self, batches: int = 0) -> set[float]:
        """The rewards in all batches after the first `batches`."""
        return {one.reward for batch in self.batches[batches:] for group in batch.groups for one in group.episodes}


def until(reached: Callable[[], Any]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def write(agent: Path, reward: float) -> None:
    agent.write_text(AGENT.replace("REWARD", str(reward)))


def test_a_reward_is_edited_while_a_trainer_leases(tmp_path: Path) -> None:
    """New episodes follow the edit, no group holds both codes, and batches go on."""
    agent, tasks = tmp_path / "agent.py", tmp_path / "tasks.txt"
    write(agent, 1.0)
    tasks.write_text("\n".join(f"sum/{number}" for number in range(4)))
    with stub_process() as engine, ProxyProcess(engine, tmp_path / "data") as proxy, Rig(proxy.url) as rig:
        argv = [
            *AJET, "run", "--quiet", "--tasks", str(tasks), "--repeat", str(SIZE), "--epochs", "1000",
            "--parallel", "4", "--name", "editor", "--watch", "--reward-from", "stdout",
            "--", sys.executable, str(agent),
        ]  # fmt: skip
        with Trainer(proxy.url) as trainer, subprocess.Popen(argv, env=clean(proxy.url)) as runner:
            try:
                for reward in (2.0, 3.0):
                    before = len(trainer.batches)
                    until(lambda: len(trainer.batches) >= before + 2)  # noqa: B023
                    write(agent, reward)
                    until(lambda: reward in trainer.rewards())  # noqa: B023
                before = len(trainer.batches)
                until(lambda: len(trainer.batches) >= before + 2)
                assert runner.poll() is None
            finally:
                runner.terminate()
        revisions: list[str] = []
        for group in (group for batch in trainer.batches for group in batch.groups):
            told = [rig.record(one.episode) for one in group.episodes]
            (revision,) = {one["revision"] for one in told}
            assert len({one["reward"] for one in told}) == 1, "a group holds one code"
            revisions += [] if revision in revisions else [revision]
        assert len(revisions) == 3
        assert trainer.rewards() == {1.0, 2.0, 3.0}
        assert trainer.rewards(before + 1) == {3.0}
        status = rig.status()
        assert set(status["discarded"]) <= {"aborted", "client_gone"}, status
        assert status["episodes"]["trained"] == GROUPS * SIZE * len(trainer.batches)
