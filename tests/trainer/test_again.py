"""A process whose weights were not promoted becomes a new one over the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
from pathlib import Path
ask = "import sys, pathlib; from ajet_trainer.held import holder; print(holder(pathlib.Path(sys.argv[1])))"
folder = Path(sys.argv[3]).parent / "run"
print("held by", subprocess.run([sys.executable, "-c", ask, folder], capture_output=True, text=True).stdout.strip())
sys.stdout.flush()
from ajet_trainer import cli, training
from ajet_trainer.candidate import NotPromoted

def assemble(config, progress, stop, live):
    lives = progress.run_dir / "lives"
    before = lives.read_text() if lives.exists() else ""
    lives.write_text(before + "x")
    progress.say(f"process {os.getpid()}, {config.groups} groups, {os.environ.get('LEFT')}")
    os.environ["LEFT"] = "behind"
    if len(before) < 2:
        raise NotPromoted("it is worse")

training.assemble = assemble
cli.main()
"""


STOPPED = """
import os, signal, sys
from ajet_trainer import cli, training
from ajet_trainer.candidate import NotPromoted

when, ends = os.environ["WHEN"], training.ends

def told(progress, phase):
    ends(progress, phase)
    if phase == when:
        os.kill(os.getpid(), signal.SIGTERM)

def assemble(config, progress, stop, live):
    with (progress.run_dir / "lives").open("a") as lives:
        lives.write("x")
    stop.graceful = True
    if when == "before":
        os.kill(os.getpid(), signal.SIGTERM)
    raise NotPromoted("it is worse")

training.assemble, training.ends = assemble, told
cli.main()
"""


@pytest.mark.parametrize(("when", "phase"), [("before", "stopped"), ("starting again", "starting again")])
def test_one_that_is_told_to_end_meanwhile_ends(tmp_path: Path, when: str, phase: str) -> None:
    """The next process would know nothing of the signal, and train on."""
    (tmp_path / "m").mkdir()
    (tmp_path / "run.toml").write_text(f'[trainer]\nmodel = "{tmp_path / "m"}"\nrun_dir = "{tmp_path / "run"}"\n')
    words = ["run", "--config", str(tmp_path / "run.toml")]
    done = subprocess.run([sys.executable, "-c", STOPPED, *words], env={**os.environ, "WHEN": when}, check=False)
    assert (done.returncode, (tmp_path / "run/lives").read_text()) == (0, "x")
    assert json.loads((tmp_path / "run/phase.json").read_text())["phase"] == phase


@pytest.mark.parametrize("kept", [True, False])
def test_it_begins_again_with_the_same_words_and_the_environment_of_its_start(tmp_path: Path, kept: bool) -> None:
    """A supervisor sees no end, and nobody else gets the folder meanwhile."""
    (tmp_path / "m").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run.toml").write_text(f'[trainer]\nmodel = "{tmp_path / "m"}"\nrun_dir = "{tmp_path / "run"}"\n')
    process = subprocess.Popen(
        [
            *([sys.executable, "-m", "ajet_trainer.held", str(tmp_path / "run"), "1"] if kept else ()),
            sys.executable, "-c", SCRIPT, "run", "--config", str(tmp_path / "run.toml"), "groups=3",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate()
    assert process.returncode == 0
    first = process.pid if kept else None
    assert [line for line in out.splitlines() if line.startswith("held")] == [
        f"held by {first}", *[f"held by {process.pid}"] * 2
    ]  # fmt: skip
    said = [line for line in out.splitlines() if not line.startswith("held")]
    assert said == [f"process {process.pid}, 3 groups, None"] * 3
