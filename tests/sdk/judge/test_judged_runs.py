"""Programs that are run to be judged: from the prompt to what a trainer leases."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ajet_sdk import Client
from ajet_sdk.routes import Lease
from ajet_trainer.link import Link
from tests.kit.asking import AGENT
from tests.kit.control_stub import ControlStub
from tests.kit.patience import AJET
from tests.kit.proxy_process import ProxyProcess
from tests.sdk.conftest import Ajet

JUDGE = [*AJET, "judge"]
COMPARES = """
def score(episodes):
    return {one["episode"]: place / 2 for place, one in enumerate(episodes)}
"""


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(AGENT)
    return str(tmp_path / "agent.py")


@contextmanager
def at_work(tmp_path: Path, *options: str) -> Iterator[Callable[[int], list[str]]]:
    """A judge, and what it shows of so many episodes."""
    (tmp_path / "judge.py").write_text(COMPARES)
    argv = [*JUDGE, "--with", f"{tmp_path / 'judge.py'}:score", *options]
    with subprocess.Popen(argv, env={**os.environ}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        out = process.stdout
        try:
            yield lambda number: [out.readline() for _ in range(number)]
        finally:
            process.terminate()
            process.communicate()


def judged(tmp_path: Path, number: int, *options: str) -> list[str]:
    """The lines that a judge shows of so many episodes."""
    with at_work(tmp_path, *options) as shows:
        return shows(number)


def test_groups_are_run_judged_at_once_and_leased(
    ajet: Ajet, daemon: ProxyProcess, tmp_path: Path, agent: str
) -> None:
    code, out, err = ajet("run", "--judged", "--task", "t", "--repeat", "3", "--", sys.executable, agent)
    assert code == 0, err
    assert out.count("awaits a judgement") == 3 and out.endswith("3 episodes: 3 awaiting a judgement\n")
    with Client() as client, closing(Link(daemon.url)) as link:
        assert link.lease(Lease(group_size=3)) is None
        lines = judged(tmp_path, 3, "--relative")
        assert all("1 of 1 rewarded" in line for line in lines)
        batch = link.lease(Lease(group_size=3, wait_s=300.0))
        assert batch is not None
        (group,) = batch.groups
        assert sorted(one.reward for one in group.episodes) == [0.0, 0.5, 1.0]
        assert client.ask("status").json()["traffic"]["judged"] == 3


def test_groups_that_are_played_one_by_one_are_judged_at_once(
    ajet: Ajet, daemon: ProxyProcess, tmp_path: Path, agent: str
) -> None:
    """By a judge that is at work all along."""
    with at_work(tmp_path, "--relative") as shows:
        code, _, err = ajet("run", "--judged", "--task", "u", "--repeat", "3", "--", sys.executable, agent)
        assert code == 0, err
        shows(3)
    with closing(Link(daemon.url)) as link:
        batch = link.lease(Lease(group_size=3, wait_s=300.0))
        assert batch is not None
        assert sorted(one.reward for group in batch.groups for one in group.episodes) == [0.0, 0.5, 1.0]


def test_a_data_set_is_whole_once_it_was_played(ajet: Ajet, daemon: ProxyProcess, tmp_path: Path, agent: str) -> None:
    """Its judge comes when it likes."""
    (tmp_path / "tasks.txt").write_text("a/1\na/2\n")
    argv = ("run", "--judged", "--tasks", str(tmp_path / "tasks.txt"), "--name", "d", "--", sys.executable, agent)
    code, out, err = ajet(*argv)
    assert code == 0, err
    assert "[2/2]" in out and "2 episodes: 2 awaiting a judgement" in out


def test_a_program_that_rewards_itself_needs_no_judge(ajet: Ajet, daemon: ProxyProcess, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"{AGENT}\nimport ajet_sdk; ajet_sdk.reward(0.25)\n")
    code, out, err = ajet("run", "--judged", "--task", "t", "--", sys.executable, str(tmp_path / "agent.py"))
    assert code == 0 and "1 episode: 1 rewarded, mean reward 0.25" in out, err


@pytest.mark.parametrize("exit_code", [0, 3])
def test_an_exit_code_is_no_reward_then(ajet: Ajet, stub: ControlStub, exit_code: int) -> None:
    code, out, _ = ajet("run", "--judged", "--task", "t", "--", "sh", "-c", f"exit {exit_code}")
    assert code == 0 and "1 episode: 1 awaiting a judgement" in out
    code, out, _ = ajet("run", "--judged", "--task", "t", "--retries", "0", "--", "sh", "-c", "exit 75")
    assert code == 1 and "1 failure of the world" in out


def test_what_asked_no_model_awaits_no_judgement(ajet: Ajet, daemon: ProxyProcess) -> None:
    code, out, _ = ajet("run", "--judged", "--task", "t", "--", "true")
    assert code == 1 and "discarded by the proxy: incomplete_call" in out
