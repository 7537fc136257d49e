"""The run as a whole: the real proxy, the real ``ajet run`` and the real agent; a scripted engine and trainer.

It runs in a process of its own, because a run ends everything that its process has started.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk import routes
from integrations.quickstart.loop import Loop, metrics_in, phase_in
from integrations.quickstart.plan import Plan
from integrations.quickstart.screen import Screen
from tests.kit.proxy_process import PROXY
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs the daemon's environment: .ci/setup daemon")

RUN = """
import json, sys
from pathlib import Path
from integrations.quickstart import figures, loop
from integrations.quickstart.plan import Plan
from integrations.quickstart.screen import Screen

folder, engine = Path(sys.argv[1]), sys.argv[2]
script, trainer = folder / "trainer.sh", "-m tests.tutorials.scripted_trainer"
script.write_text(f'#!/bin/sh\\nexec {sys.executable} {trainer} smollm2={engine} "$@"\\n')
script.chmod(0o755)
programs = {name: loop.path_of(name) for name in ("ajet", "ajet-proxy")} | {"ajet-trainer": str(script)}
loop.path_of = programs.__getitem__
python = folder / "python.sh"
python.write_text(f'#!/bin/sh\\nmkdir {folder}/failed-once 2>/dev/null && exit 3\\nexec {sys.executable} "$@"\\n')
python.chmod(0o755)
sys.executable = str(python)
plan = Plan(steps=2, groups=2, group_size=2)
run = loop.Loop(plan, folder, folder, Screen(tty=False))
run.run(2)
summary = figures.summarize(plan, run.metrics, run.status, run.seconds)
(folder / "out.json").write_text(json.dumps({"summary": summary, "episodes": run.episodes, "port": run.port}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files that two steps left behind in which the first game failed."""
    folder = tmp_path_factory.mktemp("run")
    with stub_process("--model", "smollm2") as engine:
        argv = [sys.executable, "-c", RUN, str(folder), engine]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    logs = "\n".join(f"{log.name}:\n{log.read_text()}" for log in folder.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "step   2/2" in done.stdout
    out: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return out


@pytest.mark.slow
def test_every_game_is_trained_and_the_failed_one_was_played_again(found: dict[str, Any]) -> None:
    states = found["summary"]["episodes"]
    assert states["adds_up"]
    assert (states["trained"], states["discarded"]) == (8, 1)
    assert sum(states[state] for state in routes.EPISODE_STATES) == states["opened"]


@pytest.mark.slow
def test_the_data_is_on_policy_and_merged(found: dict[str, Any]) -> None:
    assert found["summary"]["staleness"] == {"max": 0, "steps_with_stale_data": 0}
    assert found["summary"]["tokens"]["stored"] < found["summary"]["tokens"]["as_calls"]


@pytest.mark.slow
def test_episodes_of_the_first_and_the_last_step_come_with_tokens(found: dict[str, Any]) -> None:
    tasks = [record["task"] for record in found["episodes"]]
    assert [task[-8:] for task in tasks] == ["step-001"] * 2 + ["step-002"] * 2
    assert all(call["token_ids"] for record in found["episodes"] for call in record["calls"])


STOPPED = """
import sys
from pathlib import Path
from integrations.quickstart.loop import Loop
from integrations.quickstart.plan import Plan
from integrations.quickstart.screen import Screen

def stopped(*_):
    raise KeyboardInterrupt

run = Loop(Plan(steps=2, groups=2, group_size=2), Path(sys.argv[1]), Path("no-model"), Screen(tty=False))
run._start_proxy = stopped
run.run(2)
"""


def test_files_that_are_not_there_yet_or_half_written(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert (phase_in(none), metrics_in(none)) == ("starting", [])
    (tmp_path / "phase.json").write_text('{"pha')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert phase_in(tmp_path) == "starting"
    assert [record["step"] for record in metrics_in(tmp_path)] == [1, 2]
    (tmp_path / "phase.json").write_text('{"phase": "training", "step": 2, "of": 9}')
    assert phase_in(tmp_path) == "training"


def test_a_key_of_the_shell_is_not_shown_to_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AJET_API_KEY", "ajet-of-another-proxy")
    assert Loop(Plan(), tmp_path, tmp_path, Screen(tty=False)).proxy.target.key is None


def test_who_stops_it_is_told_where_the_run_stays(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STOPPED, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert f"metrics, logs and episodes of 0 steps stay in {tmp_path}" in done.stdout
