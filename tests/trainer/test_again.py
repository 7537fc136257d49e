"""A process whose weights were not promoted becomes a new one over the same command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
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


def test_it_begins_again_with_the_same_words_and_the_environment_of_its_start(tmp_path: Path) -> None:
    """A supervisor sees no end. The lock of the folder is free for it again."""
    (tmp_path / "m").mkdir()
    (tmp_path / "run.toml").write_text(f'[trainer]\nmodel = "{tmp_path / "m"}"\nrun_dir = "{tmp_path / "run"}"\n')
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "run", "--config", str(tmp_path / "run.toml"), "groups=3"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out.splitlines() == [f"process {process.pid}, 3 groups, None"] * 3
