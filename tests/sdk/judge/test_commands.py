"""The command `ajet judge`: what it refuses, and a daemon whose episodes it judges until it is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from ajet_sdk import Client
from ajet_sdk.routes import OpenEpisode
from tests.kit.control_stub import ControlStub, Say
from tests.kit.judge_stub import judging
from tests.kit.patience import AJET, LONG_S, until
from tests.kit.proxy_process import ProxyProcess
from tests.sdk.conftest import Ajet

JUDGE = [*AJET, "judge"]
RUBRIC = "Is it true?"


@pytest.fixture
def rubric(tmp_path: Path) -> str:
    (tmp_path / "rubric.txt").write_text(RUBRIC)
    return str(tmp_path / "rubric.txt")


@pytest.mark.parametrize("address", ["nonsense", "ftp://host/v1", "127.0.0.1:8001"])
def test_what_is_no_address_of_a_model(ajet: Ajet, stub: ControlStub, rubric: str, address: str) -> None:
    code, _, err = ajet("judge", "--model", address, "--rubric", rubric)
    assert code == 2 and "http://127.0.0.1:8001/v1" in err


def test_a_rubric_that_is_no_text(ajet: Ajet, stub: ControlStub, tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_bytes(b"g\xf6\xf6d")
    code, _, err = ajet("judge", "--model", "http://127.0.0.1:1/v1", "--rubric", str(tmp_path / "rubric.txt"))
    assert code == 2 and "no UTF-8 text" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--with", "--redact"])
@pytest.mark.parametrize("code", ["def score(:", "import not_there", "raise SystemExit(3)", "1 / 0"])
def test_a_file_that_cannot_be_run(ajet: Ajet, stub: ControlStub, tmp_path: Path, code: str, option: str) -> None:
    (tmp_path / "judge.py").write_text(code)
    judged_by = () if option == "--with" else ("--cmd", "true")
    status, _, err = ajet("judge", *judged_by, option, f"{tmp_path / 'judge.py'}:score")
    assert status == 2 and "judge.py cannot be run: " in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("line", [
    "{}", "1", '{"question": "q", "answer": 1, "value": 1}', "no", "[" * 100_000,
    f'{{"question": "q", "answer": "a", "value": 1{"0" * 400}}}',
], ids=range(6))  # fmt: skip
def test_labels_that_are_none(ajet: Ajet, stub: ControlStub, tmp_path: Path, line: str) -> None:
    (tmp_path / "gold.jsonl").write_text(f'{{"question": "q", "answer": "a", "value": 1}}\n{line}\n')
    code, _, err = ajet("judge", "--cmd", "true", "--check", str(tmp_path / "gold.jsonl"))
    assert code == 2 and "line 2" in err


def test_a_model_does_not_judge_itself(ajet: Ajet, stub: ControlStub, rubric: str) -> None:
    with judging(lambda items: {}) as grader:
        grader.models = ["stub"]
        code, _, err = ajet("judge", "--model", grader.url, "--rubric", rubric)
        assert code == 1 and "stub is trained here" in err and "--self" in err
        stub.says = lambda heard: Say(200, {"models": {}, "candidates": {"stub": {}}})
        code, _, err = ajet("judge", "--model", grader.url, "--rubric", rubric)
        assert code == 1 and "stub is trained here" in err, "a candidate is, too"
        grader.models = ["one", "two"]
        code, _, err = ajet("judge", "--model", grader.url, "--rubric", rubric)
        assert code == 1 and "#NAME" in err


def awaiting(client: Client, daemon: ProxyProcess) -> str:
    """An episode that awaits a judgement."""
    name = str(client.ask("open_episode", OpenEpisode(task="t", judged=True)).json()["episode"])
    ask = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    url = f"{daemon.url}/e/{name}/v1/chat/completions"
    assert httpx.post(url, json=ask, timeout=LONG_S, trust_env=False).status_code == 200
    client.ask("seal", id=name)
    return name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_judges_until_it_is_asked_to_end(daemon: ProxyProcess, tmp_path: Path, rubric: str, number: int) -> None:
    with Client() as client, judging(lambda items: dict.fromkeys(items, 0.5)) as grader:
        name = awaiting(client, daemon)
        argv = [*JUDGE, "--model", grader.url, "--rubric", rubric, "--parallel", "2"]
        with subprocess.Popen(argv, env={**os.environ}, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert f"{name}  default  +0.50  1 of 1 rewarded" in process.stdout.readline()
            process.send_signal(number)
            out, _ = process.communicate()
        assert client.ask("get_episode", id=name).json()["reward"] == 0.5
    assert (process.returncode, out) == (0, "1 judged; 100 tokens\n")


@pytest.mark.parametrize("how", ["--cmd", "--with"])
def test_a_second_interrupt_leaves_what_hangs(stub: ControlStub, tmp_path: Path, how: str) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "judge.py").write_text(
        f"import pathlib, time\ndef score(unit):\n    pathlib.Path({str(pid)!r}).write_text('0')\n    time.sleep(9999)"
    )
    judged_by = f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 9999 & wait" if how == "--cmd" else "judge.py:score"
    calls = [{"call": "c", "before": "q", "answer": "a"}]
    unit = {"episode": "e", "task": "t", "lane": "l", "eval": False, "calls": calls}
    stub.says = lambda heard: Say(200, {"judgements": [unit]}) if heard.path.endswith("/lease") else None
    with subprocess.Popen([*JUDGE, how, judged_by], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and until(lambda: pid.exists() and pid.read_text())
        assert "judges what awaits" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "posted first; interrupted again, it is left" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 0 and "Traceback" not in err
    assert how == "--with" or not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_it_goes_on_where_nothing_can_be_shown(daemon: ProxyProcess, tmp_path: Path) -> None:
    """Its log stands on a disk that is full."""
    (tmp_path / "judge.py").write_text("def score(unit): return {one['call']: 0.5 for one in unit['calls']}")
    with Client() as client, open("/dev/full", "w") as full:
        argv = [*JUDGE, "--with", f"{tmp_path / 'judge.py'}:score"]
        with subprocess.Popen(argv, env={**os.environ}, stdout=full, stderr=subprocess.PIPE, text=True) as process:
            for _ in range(2):
                name = awaiting(client, daemon)
                while process.poll() is None and client.ask("get_episode", id=name).json()["reward"] is None:
                    time.sleep(0.05)
            process.terminate()
            _, err = process.communicate()
    assert process.returncode == 0 and "Traceback" not in err
