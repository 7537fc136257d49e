"""A proxy that goes away in a run, and interrupts: what is said, how soon all ends, and what the end says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import Client
from ajet_sdk.client import NoReply
from ajet_sdk.play import program
from ajet_sdk.play.child import Child
from ajet_sdk.play.episode import EpisodeLife, Opened
from ajet_sdk.play.patience import Absence
from ajet_sdk.play.program import Program, ProgramAgent
from tests.kit.control_stub import DROP, ControlStub
from tests.kit.patience import PATIENT, until
from tests.sdk.play.test_child import alive
from tests.sdk.play.test_guardian import begun
from tests.sdk.test_requests import Script

AGENT = 'echo $$ >> "$PIDS"; echo hello; exec sleep 3600'
NOTICES = f"""{PATIENT}from ajet_sdk.cli import main
ajet_sdk.play.episode.STOP_DEADLINE_S, ajet_sdk.play.program.ENGINE_S = 0.3, 0.1
main()"""


def test_an_absence_is_told_once_and_its_end_too() -> None:
    absence = Absence("http://p", 600.0)
    assert [absence.seen(away=away) for away in (False, True, True, False, False)] == [
        None, "waiting up to 600 s for the proxy at http://p: it does not answer any more",
        None, "the proxy at http://p answers again", None,
    ]  # fmt: skip


@pytest.mark.parametrize("command", [("run", "--task", "t"), ("try",)])
def test_a_proxy_that_dies_in_a_run_is_told_of_and_the_end_says_the_truth(
    stub: ControlStub, tmp_path: Path, command: Sequence[str]
) -> None:
    pids, said = tmp_path / "pids", tmp_path / "said"
    with said.open("wb") as out:
        run = subprocess.Popen(
            (sys.executable, "-c", NOTICES, *command, "--", "sh", "-c", AGENT), env={**os.environ, "PIDS": str(pids)},
            stdout=out, stderr=out,
        )  # fmt: skip
        try:
            (theirs,) = begun(pids, 1)
            for fault, told in ((DROP, "does not answer any more"), (None, "answers again")):
                stub.says = lambda heard: fault  # noqa: B023
                assert until(lambda: told in said.read_text())  # noqa: B023
            stub.says = lambda heard: DROP
            run.send_signal(signal.SIGINT)
            assert run.wait() == 130 and not alive(theirs)
        finally:
            run.kill()
            run.wait()
    text = said.read_text()
    assert "none begun" not in text and "is aborted" not in text.rpartition("interrupted:")[2]
    if command[0] == "run":
        assert "1 episode: 1 failed" in text


def test_an_interrupt_of_who_waits_ends_the_program_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As soon as it obeys, and not after its time is over."""
    monkeypatch.setattr(program, "END_GRACE_S", 3600.0)
    pids = tmp_path / "pids"

    def interrupted(child: Child) -> int:
        begun(pids, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "wait", interrupted)
    words, env = ("sh", "-c", AGENT), {**os.environ, "PIDS": str(pids)}
    with (
        ControlStub() as stub, Client(stub.url) as client, ProgramAgent(Program(words), client) as agent,
        pytest.raises(KeyboardInterrupt),
    ):
        agent._run(words, env, _Episode("ep"))  # type: ignore[arg-type]
    assert not alive(*begun(pids, 1))


def test_a_client_says_that_the_proxy_is_away_and_back(stub: ControlStub, caplog: pytest.LogCaptureFixture) -> None:
    stub.hears_clients = True
    with ajet_sdk.join("me", ttl_s=0.1):
        for fault, said in ((DROP, "does not answer any more"), (None, "answers again")):
            stub.says = lambda heard: fault  # noqa: B023
            assert until(lambda: said in caplog.text)  # noqa: B023


@pytest.mark.parametrize(("error", "seconds"), [(KeyboardInterrupt(), 3.0), (ValueError(), 10.0)])
def test_who_is_interrupted_tells_a_proxy_that_is_away_for_little_time(error: BaseException, seconds: float) -> None:
    script = Script([NoReply("refused")])
    asyncio.run(EpisodeLife(script, Opened("ep", "", "", 0)).leave(error))
    assert script.now - 1000 == pytest.approx(seconds, abs=0.01)


class _Episode:
    revision = None

    def __init__(self, id: str) -> None:
        self.id = id


def test_programs_whose_episodes_are_discarded_are_ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked after at once, so those of which the proxy says nothing hold up no other."""
    monkeypatch.setattr(program, "WATCH_S", 1.0)
    ended: list[Any] = []
    monkeypatch.setattr(program, "_end_all", lambda children, grace: ended.append((children, grace)))
    with ControlStub() as stub, Client(stub.url) as client:
        agent = ProgramAgent(Program(("true",)), client)
        for number in range(50):
            with ajet_sdk.episode("t", proxy_url=stub.url) as episode:
                agent._running[episode.id] = program._Running(number, episode, 0.0)  # type: ignore[arg-type]
                episode.reward(1.0)
        stub.discard("ep-0", "idle")
        stub.says = lambda heard: None if heard.path.endswith("/ep-0") else DROP
        agent._end_discarded()
    assert ended == [([0], program.END_GRACE_S)] and agent._running["ep-0"].lost == "idle"
