"""A data set that ``ajet run`` plays at a running daemon: both are killed, and exactly what is missing is played."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk import Client, errors
from ajet_sdk.frame import decode_batch
from tests.kit.patience import AJET
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.kit.source import ROOT

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")

AGENT = """
import contextlib, json, os, pathlib, sys, time, urllib.request
messages = [{"role": "user", "content": json.loads(os.environ["AJET_TASK_JSON"])["question"]}]
body = json.dumps({"model": "stub", "messages": messages, "max_tokens": 4}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})).read()
may = pathlib.Path(__file__).with_name("may")
def may_end():
    for one in may.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if one.name != "all":
                one.unlink()
            return True
while not may_end():
    time.sleep(0.05)
"""
TASKS, REPEAT, EPOCHS = 5, 2, 2
WHOLE = TASKS * REPEAT * EPOCHS


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    kinds = ("sum", "sum", "sum", "word", "word")
    path.write_text("".join(f'{{"id": "{kind}/{at}", "question": "{at}?"}}\n' for at, kind in enumerate(kinds)))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "may").mkdir()
    return path


def let_end(tasks: Path, number: int) -> None:
    """Let so many more agents end. All others wait."""
    for _ in range(number):
        (tasks.parent / "may" / uuid.uuid4().hex).touch()


def command(url: str, tasks: Path, *more: str, epochs: int = EPOCHS) -> tuple[list[str], dict[str, str]]:
    """The command that plays `tasks` at the daemon at `url`, and its environment."""
    argv = [
        *AJET, "run", "--tasks", str(tasks), "--repeat", str(REPEAT), "--epochs", str(epochs), "--parallel", "3",
        "--name", "player", *more, "--", sys.executable, str(tasks.parent / "agent.py"),
    ]  # fmt: skip
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("AJET_", "OPENAI_"))}
    return argv, ours | {"AJET_PROXY_URL": url, "PYTHONPATH": str(ROOT)}


def episodes(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(
        f"{url}/ajet/v1/episodes", params={"limit": 1000}, timeout=300, trust_env=False
    ).json()["episodes"]
    return found


def had(url: str) -> list[dict[str, Any]]:
    """The episodes whose places are taken and settled."""
    return [one for one in episodes(url) if one["state"] == "ready"]


def check_whole(url: str) -> None:
    """Each place of each lane was had once, and each task as often as it was to be played."""
    found = had(url)
    assert Counter(one["task"] for one in found) == {
        f"{kind}/{at}": REPEAT * EPOCHS for at, kind in enumerate(("sum", "sum", "sum", "word", "word"))
    }
    for lane, number in (("sum", 3), ("word", 2)):
        places = [one["place"] for one in found if one["task"].startswith(lane)]
        assert sorted(places) == list(range(number * REPEAT * EPOCHS))
    with Client(url) as client:
        for play in {one["play"] for one in found}:
            with pytest.raises(errors.NotFound):
                client.ask("get_play", id=play)


def killed_after(url: str, tasks: Path, settled: int) -> None:
    """Starts to play, and kills the runner once so many episodes are settled, and hardly more."""
    argv, env = command(url, tasks)
    let_end(tasks, settled - len(had(url)) + 4)
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 300
        while len(had(url)) < settled and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[1]
        process.kill()
    for left in (tasks.parent / "may").iterdir():
        left.unlink(missing_ok=True)


def test_after_kill_9_of_the_runner_and_of_the_daemon_exactly_what_is_missing_is_played(
    engine: str, tasks: Path, tmp_path: Path
) -> None:
    with ProxyProcess(engine, tmp_path / "data") as proxy:
        killed_after(proxy.url, tasks, 4)
        proxy.kill()
        proxy.start()
        killed_after(proxy.url, tasks, 11)
        before = {one["episode"] for one in had(proxy.url)}
        argv, env = command(proxy.url, tasks)
        let_end(tasks, WHOLE)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(f"player goes on where it was left: {len(before)} of {WHOLE} played\n")
        assert "each time: its group carries no signal" in done.stderr and done.stderr.count("\n") == 3
        check_whole(proxy.url)
        after = {one["episode"] for one in had(proxy.url)}
        assert before <= after and len(after) == WHOLE
        opened = {one["episode"] for one in episodes(proxy.url)}
        assert len(opened) <= WHOLE + 2 * 3, "nothing but what was open as the runner was killed is played again"


def test_the_agent_is_edited_while_it_is_played_and_no_group_holds_both_codes(
    engine: str, tasks: Path, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"

    def earns(reward: float) -> None:
        agent.write_text(f"{AGENT}\nprint({reward})\n")

    def wait_for(reward: float) -> None:
        """Until one has earned that, and a group is whole, which another code leaves as it is."""
        until = time.monotonic() + 300
        while not (rig.status()["groups"]["ready"] and any(one["reward"] == reward for one in had(proxy.url))):
            assert runner.poll() is None and time.monotonic() < until
            time.sleep(0.05)

    earns(1.0)
    (tasks.parent / "may" / "all").touch()
    with ProxyProcess(engine, tmp_path / "data", options=["--group-size", str(REPEAT)]) as proxy, Rig(proxy.url) as rig:
        argv, env = command(proxy.url, tasks, "--watch", "--reward-from", "stdout", epochs=1000)
        with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as runner:
            try:
                wait_for(1.0)
                earns(2.0)
                wait_for(2.0)
            finally:
                runner.terminate()
        codes = {(one["revision"], one["reward"]) for one in had(proxy.url)}
        assert len(codes) == len({revision for revision, _ in codes}) == 2
        while (leased := rig.post("/batches/lease", {"groups": 1})).status_code == 200:
            (group,) = decode_batch(leased.content).groups
            assert len({one.reward for one in group.episodes}) == 1
        assert rig.status()["episodes"]["leased"] > 0
