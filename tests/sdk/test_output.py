"""The `ajet` command where its output is closed, full, or of an encoding that does not hold what is to be said."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ajet_sdk.output import run_command
from tests.kit import patience
from tests.kit.control_stub import ControlStub
from tests.kit.ports import free_port

AJET = f"exec {shlex.join(patience.AJET)}"
FULL = "No space left on device"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(stub: ControlStub, words: str, before: str = "", **env: str) -> tuple[int, str, str]:
    """Runs ``ajet WORDS`` by a shell, as `before` has prepared it: exit code, standard output, standard error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AJET_", "OPENAI_"))}
    done = subprocess.run(
        ["sh", "-c", f"{before}\n{AJET} {words}"], env={**kept, "AJET_PROXY_URL": stub.url, **env},
        capture_output=True, check=False,
    )
    return done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1")


@pytest.mark.parametrize("words", ["status", "--help", "run --task t -- sh -c 'echo said; echo complained >&2'"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(stub: ControlStub, words: str, closed: str) -> None:
    code, out, err = shell(stub, f"{words} {closed}")
    assert (code, "Traceback" in out + err) == (0, False)
    assert bool(out) == (closed == "2>&-")
    assert {record["state"] for record in stub.episodes.values()} <= {"ready"}


def test_what_the_encoding_does_not_hold(stub: ControlStub) -> None:
    code, out, err = shell(stub, "run --task 'h\u00e9 \U0001f600' -- true", PYTHONIOENCODING="latin-1", PYTHONUTF8="1")
    assert (code, err) == (0, "")
    assert "h\u00e9 ?  0  ep-0     rewarded" in out
    code, out, err = shell(stub, "show '\U0001f600'", PYTHONIOENCODING="latin-1", PYTHONUTF8="1")
    assert (code, out, err.count("\n")) == (2, "", 1)


@needs_full
def test_what_cannot_be_copied_is_said_once_and_harms_no_episode(stub: ControlStub) -> None:
    code, out, err = shell(stub, "run --task t --repeat 2 -- sh -c 'echo a; echo b; echo c >&2' >/dev/full")
    assert (code, out) == (1, "")  # the table is nowhere
    lost = f"some of the programs' output could not be written: [Errno 28] {FULL}"
    assert err.splitlines() == ["c", "c", lost, f"ajet: [Errno 28] {FULL}"]
    code, out, err = shell(stub, "run --task t -- sh -c 'echo c >&2' 2>/dev/full")
    assert (code, err) == (0, "")
    assert "1 rewarded" in out
    assert [record["state"] for record in stub.episodes.values()] == ["ready"] * 3


def test_the_end_of_a_file_is_no_interruption() -> None:
    """click takes it for one."""

    @click.command()
    def cut_short() -> None:
        raise EOFError

    with pytest.raises(click.Abort):
        run_command(cut_short, "ajet", "", argv=[])


@needs_full
def test_a_fault_that_can_be_told_nowhere_keeps_its_exit_code(stub: ControlStub) -> None:
    assert shell(stub, "reward nan --episode e 2>/dev/full") == (2, "", "")


def test_threads_that_cannot_be_started(stub: ControlStub) -> None:
    code, out, err = shell(stub, "run --task t --parallel 300 --repeat 300 -- sleep 1", "ulimit -v 400000")
    said = "parallel is too much for this machine: can't start new thread"
    assert code == 1 and err.splitlines()[-1] == f"ajet: {said}"
    for line in err.splitlines()[:-1]:
        assert re.fullmatch(rf"{said}: no more begins, and the run ends with its \d+ open episodes", line)
    assert len(stub.episodes) < 300
    ended = {"aborted": "discarded", "rewarded": "ready"}  # a program may have had all the threads that it needs
    outcomes = [line.split()[3] for line in out.splitlines()[1:-1]]
    assert sorted(ended[one] for one in outcomes) == sorted(record["state"] for record in stub.episodes.values())


def test_more_files_than_usual_are_opened_and_the_program_has_its_own_limit(stub: ControlStub, tmp_path: Path) -> None:
    """Once all programs run, for a moment after their start."""
    begun = f"echo >> {tmp_path}/n; until [ $(wc -l < {tmp_path}/n) = 30 ] && [ $(ulimit -n) = 64 ]; do sleep 0.3; done"
    words = f"run --quiet --task t --repeat 30 --parallel 30 --reward-from stdout -- sh -c '{begun}; ulimit -n'"
    code, out, err = shell(stub, words, "ulimit -S -n 64")
    assert code == 0 and err.startswith("every task has the reward 64 each time") and err.count("\n") == 1
    assert "30 rewarded, mean reward 64\n" in out


def test_more_files_than_allowed_are_said_before_anything_is_run(stub: ControlStub) -> None:
    code, out, err = shell(stub, "run --task t --repeat 30 --parallel 50 -- true", "ulimit -n 64")
    assert (code, out) == (2, "")
    assert err.startswith("ajet run: parallel 30 needs 272 open files, and only 64 are allowed (ulimit -Hn)")
    assert not stub.heard


def test_no_http_proxy_stands_between_a_program_and_this_machine(stub: ControlStub) -> None:
    ask = 'import os, urllib.request as r; r.urlopen(os.environ["AJET_PROXY_URL"] + "/ajet/v1/status")'
    ask += '; assert os.environ["no_proxy"] == "corp,127.0.0.1"'
    nowhere = f"http://127.0.0.1:{free_port()}"
    code, out, err = shell(stub, f"run --task t -- {sys.executable} -c '{ask}'", HTTP_PROXY=nowhere, NO_PROXY="corp")
    assert (code, err) == (0, "")
    assert "mean reward 1\n" in out
