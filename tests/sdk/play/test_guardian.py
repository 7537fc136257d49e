"""A run that is killed leaves no program behind, and one that ends well leaves all else alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ajet_sdk.play.guardian import Guardian, marked
from tests.kit.control_stub import ControlStub
from tests.kit.patience import until
from tests.sdk.play.test_child import alive

AJET = Path(sys.executable).with_name("ajet")
AGENT = """
echo $$ >> "$PIDS"
setsid sh -c 'echo $$ >> "$PIDS"; exec sleep 3600' &
env -u HOME sh -c 'echo $$ >> "$PIDS"; trap "" TERM HUP; sleep 3600; true' &
exec sleep 3600
"""


def begun(pids: Path, number: int) -> list[int]:
    assert until(lambda: pids.exists() and len(pids.read_text().split()) >= number)
    return [int(word) for word in pids.read_text().split()]


@pytest.mark.parametrize("command", [("run", "--task", "t", "--repeat", "2", "--parallel", "2"), ("try",)])
def test_programs_of_a_killed_run_end_with_all_that_they_started(tmp_path: Path, command: Sequence[str]) -> None:
    pids = tmp_path / "pids"
    with ControlStub() as stub:
        env = {**os.environ, "AJET_PROXY_URL": stub.url, "PIDS": str(pids)}
        run = subprocess.Popen(
            (str(AJET), *command, "--", "sh", "-c", AGENT), env=env,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs = begun(pids, 6 if command[0] == "run" else 3)
        other = subprocess.Popen(("sleep", "3600"), env=env)
        try:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            assert until(lambda: not any(map(alive, theirs)))
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


def test_a_run_that_ends_well_kills_nothing_that_has_left_its_session() -> None:
    with Guardian() as guardian:
        left = subprocess.Popen(("sleep", "3600"), env={**os.environ, **guardian.mark}, start_new_session=True)
        (name,) = guardian.mark
        assert until(lambda: marked(name) == {left.pid})
    assert left.poll() is None
    left.kill()
    left.wait()


def test_marks_of_two_runs_are_apart_and_a_run_inside_another_has_both() -> None:
    with Guardian() as one, Guardian() as other:
        assert one.mark.keys().isdisjoint(other.mark)
        inside = subprocess.Popen(
            ("sleep", "3600"), env={**os.environ, **one.mark, **other.mark}, start_new_session=True
        )
        assert until(lambda: inside.pid in marked(*one.mark) & marked(*other.mark))
        inside.kill()
        inside.wait()
