"""The screens of ``ajet run --tasks`` and ``ajet try``, and what they end with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk.play import trial
from ajet_sdk.play.results import Progress, RunResult
from ajet_sdk.play.screen import Screen, result_line
from tests.kit.asking import ASK
from tests.kit.control_stub import ControlStub
from tests.kit.proxy_process import ProxyProcess
from tests.kit.steps import steps
from tests.sdk.conftest import Ajet

pytestmark = pytest.mark.usefixtures("quick")
AGENT = f"""{ASK}
first = "how many\\nlegs has it?"
said = ask(first)
print("it said", len(said), "characters")
ask(first, said, "and now?")
if os.environ["AJET_TASK"] == "broken":
    raise RuntimeError("the checker is not there")
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.txt"
    path.write_text("sum/1\n\nsum/2\n")
    return str(path)


@pytest.mark.parametrize("program", ["ajet-agent", "_agent", "my agent+é", "ajet-"])
def test_any_name_of_a_program_may_play_a_data_set(
    ajet: Ajet, stub: ControlStub, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / program).write_text("#!/bin/sh\ntrue\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    code, out, err = ajet("run", "--tasks", tasks, "--", f"./{program}")
    assert code == 0 and "2 rewarded" in out, err


def test_a_line_is_as_quick_after_thousands_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    shown, item = Screen("mine", None, named=False), RunResult("t", 0, "e", "rewarded", 1.0, None, 1.0)
    shown.progress(Progress(1, 10_000))
    first = steps(lambda: shown.result(item))
    for _ in range(1000):
        shown.result(item)
    assert steps(lambda: shown.result(item)) < 2 * first
    shown.show_progress()
    assert "1003 of 10000 played" in capsys.readouterr().err


def test_a_data_set_has_a_line_for_each_rollout(ajet: Ajet, stub: ControlStub, tasks: str) -> None:
    script = 'printf "%s has no end" "$AJET_TASK"; test "$AJET_TASK" = sum/1'
    code, out, err = ajet("run", "--tasks", tasks, "--name", "mine", "--", "sh", "-c", script)
    assert code == 0 and err == "mine: 2 episodes\n"
    lines = out.splitlines()
    assert lines[0] == "sum/1 has no end" and lines[2] == "sum/2 has no end"
    assert lines[1].startswith("[1/2] sum/1 #0  ep-0  rewarded 1  ")
    assert lines[4] == "2 episodes: 2 rewarded, mean reward 0.5"
    assert not stub.plays


def test_a_play_is_called_after_the_program_and_the_file(ajet: Ajet, stub: ControlStub, tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("exit 0")
    (tmp_path / "my tasks.txt").write_text("a")
    ajet("run", "--tasks", str(tmp_path / "my tasks.txt"), "-q", "--", "sh", str(tmp_path / "agent.sh"))
    (play,) = {record["play"] for record in stub.episodes.values()}
    assert play.startswith("agent.sh-my-tasks.txt-") and play.endswith(":default")


def test_what_fails_is_told_and_left_for_the_next_start(ajet: Ajet, stub: ControlStub, tasks: str) -> None:
    script = 'test "$AJET_TASK" = sum/1 || exit 75'
    code, out, err = ajet("run", "--tasks", tasks, "--name", "mine", "--retries", "1", "--", "sh", "-c", script)
    assert code == 1
    assert err.startswith("mine: 2 episodes\n")
    assert err.endswith("\nthe next start goes on where this was left: 1 of 2 played\n")
    first, second = [line for line in out.splitlines() if "sum/2" in line]
    assert first.endswith("the world failed: exit code 75  played again")
    assert second.endswith("the world failed: exit code 75")
    assert out.endswith("3 episodes: 1 rewarded, 2 failures of the world (1 played again), mean reward 1\n")
    code, out, err = ajet("run", "--tasks", tasks, "--name", "mine", "--", "true")
    assert (code, err) == (0, "mine goes on where it was left: 1 of 2 played\n")
    assert out.startswith("[2/2] sum/2 #0")


@pytest.mark.parametrize(
    ("prompts", "most"), [(["ping", "what is 2 + 3?", "name a color"], 3), (["name a color"] * 3, 1), ([], 1)]
)
def test_a_program_of_several_conversations_is_told_at_its_end(
    ajet: Ajet, daemon: ProxyProcess, prompts: list[str], most: int
) -> None:
    """A harness that plays a whole benchmark in one process is one episode. A prompt asked again is no other."""
    asks = f"{ASK}\nfor prompt in sys.argv[1:]: ask(prompt)"
    _, _, err = ajet("run", "--task", "bench", "--repeat", "2", "--", sys.executable, "-c", asks, *prompts)
    words = f"2 of 2 episodes held several conversations that do not go on from one another (up to {most}), and one"
    assert (words in err) is (most > 1), err
    assert ("POST /ajet/v1/episodes" in err) is (most > 1)


SCOPES = ("agent", "call", "model")
"""The words of a reward that is compared apart."""


@pytest.mark.parametrize(("script", "more", "says"), [
    ("exit 0", (), "every task has the reward 1 each time"), ("exit 1", (), "every task has the reward 0 each time"),
    ("exit 0", ("--eval",), ""), ('test "$AJET_EPISODE" = ep-0', (), ""),
    *((f"{sys.executable} -c 'import ajet_sdk; ajet_sdk.reward(0, {of}=\"x\")'", (), "") for of in SCOPES),
])  # fmt: skip
def test_groups_without_a_signal_are_told_at_the_end(
    ajet: Ajet, stub: ControlStub, script: str, more: tuple[str, ...], says: str
) -> None:
    _, _, err = ajet("run", "--task", "t", "--repeat", "2", *more, "--", "sh", "-c", script)
    assert ("carries no signal, and nothing is learned of it: choose tasks" in err) is bool(says)
    assert says in err


def test_lines_that_cannot_be_used_are_all_named_and_nothing_is_played(
    ajet: Ajet, stub: ControlStub, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 1}\n{\n[]\n')
    code, out, err = ajet("run", "--tasks", str(path), "--", "true")
    assert (code, out, stub.heard) == (2, "", [])
    lines = err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{path}:2", f"{path}:3", "ajet run"]
    assert lines[2].startswith(f"ajet run: 2 of 3 lines of {path} cannot be used: nothing is played")


def test_a_result_takes_one_line() -> None:
    item = RunResult("a\nb\x1b[0m", 3, None, "failed", None, "two\nlines", 1.25, infra=True)
    assert result_line(item, "[1/9] ") == "[1/9] a b\\x1b[0m #3  -  failed  1.2 s  the world failed: two lines"


def test_a_program_that_does_not_begin_is_told_as_that(ajet: Ajet, daemon: ProxyProcess) -> None:
    code, out, _ = ajet("run", "--task", "t", "--", sys.executable, "/no/such/agent.py")
    assert code == 0, "it was played, and rewarded"
    assert "exit code 2, no call to a model: nothing to train\n" in out
    assert out.endswith("1 episode: 1 rewarded (the proxy discarded 1 as incomplete_call), mean reward 0\n")


def test_an_interrupt_says_what_was_open(ajet: Ajet, stub: ControlStub, tasks: str) -> None:
    script = f"kill -INT {os.getpid()}; sleep 3600"
    code, out, err = ajet("run", "--tasks", tasks, "--name", "mine", "--", "sh", "-c", script)
    assert code == 130
    assert "interrupted: aborting the open episodes\n" in err
    assert "the run was interrupted" in out and "played again" not in out


# ---- ajet try


def test_a_trial_shows_each_call_and_what_came_of_it(ajet: Ajet, daemon: ProxyProcess) -> None:
    code, out, err = ajet("try", "--task", "fine", "--", sys.executable, "-c", AGENT)
    assert code == 0, err
    assert out.startswith("episode ep-") and " of task fine, policy version 0\n" in out
    for line in ("it said ", "→ call 1 asks stub\n", "4 sampled", "→ call 2 asks stub\n", "reward 1\n"):
        assert line in out, out
    assert "       how many\n       legs has it?" in out
    second = out.partition("← call 2")[2]
    assert "and now?" in second and "legs" not in second, "what is new in the prompt"
    assert "2 calls, 8 tokens sampled. Nothing of this is trained\n" in out
    episode = out.splitlines()[-1].rpartition(" ")[2]
    shown = ajet("show", episode)[1]
    assert f"episode {episode}: recorded" in shown and "eval: True" in shown


def test_a_trial_shows_the_traceback(ajet: Ajet, daemon: ProxyProcess) -> None:
    code, out, err = ajet("try", "--task", "broken", "--", sys.executable, "-c", AGENT)
    assert code == 0 and "RuntimeError: the checker is not there" in err and "reward 0 (exit code 1)\n" in out


def test_a_trial_without_a_call_has_shown_nothing(ajet: Ajet, daemon: ProxyProcess) -> None:
    code, out, _ = ajet("try", "--", "true")
    assert code == 1 and "0 calls, 0 tokens sampled" in out
    code, out, _ = ajet("try", "--", "sh", "-c", "exit 3")
    assert code == 1 and "\nreward 0 (exit code 3)" in out
    code, out, _ = ajet("try", "--", "sh", "-c", "exit 75")
    assert code == 1 and "aborted: the world failed: exit code 75" in out


def test_calls_whose_text_cannot_be_had_are_counted(ajet: Ajet, stub: ControlStub) -> None:
    stub.on_open = lambda record: record.update(calls=[
        {"call": "one", "model": "m", "agent": "solver", "complete": True, "prompt_tokens": 3, "sampled_tokens": 2},
        {"call": "two", "complete": False, "reason": "engine_error"},
        {"call": "three", "complete": False, "in_flight": True},
    ])  # fmt: skip
    code, out, _ = ajet("try", "--", "true")
    lines = out.splitlines()
    assert code == 0
    assert lines[1:-3] == [
        "→ call 1 asks m as solver", "← call 1: 3 tokens read, 2 sampled, no end", "→ call 2 asks a model",
        "← call 2 is lost: engine_error", "→ call 3 asks a model",
    ]  # fmt: skip
    assert "3 calls, 2 of them lost, 2 tokens sampled" in out


def test_the_texts_of_a_trial_end_where_they_would_take_long(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is found by reading the tokens of all calls."""
    monkeypatch.setattr(trial, "MOST_READ", 13)
    whole = {"complete": True, "model": "m", "prompt_token_ids": [1, 2], "token_ids": [3]}
    stub.on_open = lambda record: record.update(calls=[{"call": str(number), **whole} for number in range(2)])
    read = trial.Calls._record
    reads = list[bool]()

    def noted(calls: trial.Calls, *, tokens: bool) -> dict[str, Any]:
        reads.append(tokens)
        return read(calls, tokens=tokens)

    monkeypatch.setattr(trial.Calls, "_record", noted)
    with ajet_sdk.Client() as client, ajet_sdk.episode("t") as episode:
        said = list[str]()
        calls = trial.Calls(client, episode, said.append)
        calls.look()
        assert len(said) == 4 and sum(reads) == 2
        stub.episodes[episode.id]["calls"] += [{"call": str(number), **whole} for number in range(2, 6)]
        calls.look()
        assert len(said) == 12 and sum(reads) == 3


def test_long_texts_are_cut() -> None:
    assert trial._indented("in", "x" * 1000 + "end", last=True).endswith("x" * 597 + "end")
    assert trial._indented("out", "begin" + "x" * 1000, last=False).startswith("  out  begin")
    assert trial._indented("out", "a\n\x1b b", last=False) == "  out  a\n       \\x1b b"
