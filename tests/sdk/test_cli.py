"""The `ajet` command: exit codes, one line a fault, and programs run from a shell."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk import Client, __version__, cli
from ajet_sdk.output import say
from ajet_sdk.play import commands
from ajet_sdk.routes import OpenEpisode
from ajet_sdk.runs.commands import train
from tests.kit.control_stub import ControlStub
from tests.kit.patience import AJET, until
from tests.kit.ports import free_port
from tests.sdk.conftest import Ajet
from tests.sdk.play.test_child import until_dead


@pytest.mark.parametrize(
    "argv",
    [
        (), ("rewrd",), ("reward",), ("reward", "much"), ("reward", "nan"), ("reward", "--", "-inf"),
        ("reward", "1", "--no-final"), ("run", "--task", "t"), ("run", "--", "true"), ("show",), ("status", "extra"),
        ("run", "--task", "t", "--repeat", "0", "--", "true"), ("abort",), ("run", "--task", "", "--", "true"),
        ("run", "--task", "t", "--reward-from", "luck", "--", "true"),
        ("run", "--task", "t", "--reward-from", "stdout", "--reward-cmd", "echo 1", "--", "true"),
        ("run", "--task", "\udcff", "--", "true"),
        ("mix", "math"), ("mix", "math=much"), ("mix", "math=0.5"), ("mix", "a=0.5", "a=0.5"), ("mix", "=1"),
        ("mix", "--any", "math=1"), ("mix", "--ahead", "-1"), ("mix", "math=nan"), ("flush", "--lane", "\udcff"),
        pytest.param(("flush", "--lane", "x" * 2000), id="flush --lane"),
        ("show", ""), ("abort", "--episode", ""), ("reward", "1e13"),
        ("reward", "1", "--episode", "e", "--agent", "\udcff"),
        ("run", "--task", "t", "--model", "\udcff", "--", "true"), ("top", "--every", "nan"), ("top", "--every", "inf"),
        ("top", "--every", "1e10"), ("run", "--task", "t", "--", "/dev/null"), ("clients", "--every", "nan"),
        ("clients", "--every", "1", "--json"), ("run", "--task", "t", "--replace-older", "--", "true"),
        ("run", "--task", "t", "--lane", "x/y", "--", "true"),
        *(("run", "--task", "t", "--agent-model", one, "--", "true") for one in ("plans", "=m", "plans=", "\udcff=m")),
        ("run", "--task", "t", "--agent-model", "a=m", "--agent-model", "a=n", "--", "true"),
        ("try", "--agent-model", "a=m", "--teacher", "a=n", "--", "true"),
        ("try", "--agent-model", "a=m", "--teacher", "b=m", "--", "true"),
        ("try", "--model", "m", "--teacher", "b=m", "--", "true"),
        ("run", "--task", "t", "--name", "\udcff", "--", "true"), ("run", "--task", "t", "--name", "", "--", "true"),
        ("train", "begin"), ("train", "start"), ("train", "start", "../r"), ("train", "set", "r"),
        ("train", "set", "r", "groups"), ("train", "set", "r", "=1"), ("train", "set", "r", "a[b].c=1"),
        ("train", "log"), ("train", "stop", "r", "s"), ("train", "start", "r", "--config", "no-such-file.toml"),
        ("train", "start", "r", "--supervisor", "s"), ("train", "status", "a b"),
        ("judge",), ("judge", "--cmd", "true", "--with", "a.py:f"), ("judge", "--model", "http://127.0.0.1:1/v1"),
        ("judge", "--cmd", "true", "--votes", "3"), ("judge", "--cmd", "true", "--budget", "1/day"),
        ("judge", "--with", "missing.py:f"), ("judge", "--with", "nothing"),
        ("judge", "--cmd", "true", "--feedback-weight", "2"), ("judge", "--cmd", "true", "--redact", "missing.py:f"),
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line_and_exit_2(ajet: Ajet, argv: tuple[str, ...]) -> None:
    code, out, err = ajet(*argv)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("ajet")
    assert "--help" in err


@pytest.mark.parametrize(
    "argv",
    [
        ("run", "--task", "a", "--task", "b", "--", "true"), ("run", "--model=a", "--task", "a", "--model=b", "true"),
        ("run", "--tasks", "a", "--tasks", "b", "--", "true"), ("try", "--agent", "a", "--agent", "a", "--", "true"),
        ("run", "-q", "-q", "--task", "a", "--repeat", "1", "--repeat", "2", "--", "true"),
        ("reward", "1", "--episode", "a", "--episode", "b"), ("train", "start", "r", "--config", "a", "--config", "b"),
    ],
    ids=" ".join,
)
def test_an_option_that_takes_one_value_is_given_once(ajet: Ajet, argv: tuple[str, ...]) -> None:
    code, out, err = ajet(*argv)
    assert (code, out) == (2, "") and "is given 2 times, and takes one value" in err
    assert ("--tasks takes several" in err) == (argv[:2] == ("run", "--task"))


def test_the_options_of_a_program_are_its_own(ajet: Ajet, stub: ControlStub) -> None:
    code, _, err = ajet("run", "-q", "-q", "--task", "a", "--", "echo", "--task", "a", "--task", "b", "--model", "m")
    assert code == 0, err


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in cli.ajet.list_commands(None)), *(("train", name) for name in train.commands)],
    ids=" ".join,
)
def test_help(ajet: Ajet, command: tuple[str, ...], flag: str) -> None:
    code, out, err = ajet(*command, flag)
    assert (code, err) == (0, "")
    assert out.startswith(" ".join(("Usage: ajet", *command)))


def test_version(ajet: Ajet) -> None:
    assert ajet("--version") == (0, f"ajet {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "env", "exit", "says"),
    [
        (("reward", "1"), {}, 2, "AJET_EPISODE is not set"),
        (("reward", "1"), {"AJET_EPISODE": "bad id"}, 2, "letters, digits"),
        (("status", "--proxy", "http://me:ses@ame@host"), {}, 2, "not 'host'"),
        (("status", "--proxy", "nowhere"), {}, 2, "must look like http://127.0.0.1:8484"),
        (("status",), {"AJET_PROXY_URL": "http://127.0.0.1:1\n"}, 2, "must look like http://127.0.0.1:8484"),
        (("show", "../status"), {}, 2, "letters, digits"),
        (("run", "--task", "t", "--", "/no/such"), {}, 2, "there is no program '/no/such'"),
        (("run", "--task", "t", "--", cli.__file__), {}, 2, "cli.py' is not executable"),
        (("status",), {"AJET_API_KEY": "a b"}, 2, "characters that a key cannot have"),
        (("run", "--", "true"), {}, 2, "give --task, or --tasks FILE"),
        (("run", "--task", "t", "--tasks", "f", "--", "true"), {}, 2, "not both"),
        (("run", "--task", "t", "--epochs", "2", "--", "true"), {}, 2, "epochs belong to a play of a data set"),
        (("run", "--task", "t", "--watch", "--", "sh", "-c", "true"), {}, 2, "names no file of its own"),
        (("run", "--tasks", "/no/such", "--", "true"), {}, 2, "/no/such cannot be read: No such file"),
        (("run", "--task", "t", "--retries", "-1", "--", "true"), {}, 2, "--retries"),
        (("run", "--task", "t", "--wanted", "--", "true"), {}, 2, "only evaluations are wanted: set eval too"),
        (("run", "--task", "t", "--judged", "--reward-cmd", "true", "--", "true"), {}, 2, "leaves the rewards to a"),
        (("run", "--task", "t", "--judged", "--reward-from", "stdout", "--", "true"), {}, 2, "leaves the rewards to a"),
        (("try", "--", "/no/such"), {}, 2, "no program"), (("try",), {}, 2, "PROGRAM"),
        (("try", "--task", "", "--", "true"), {}, 2, "--task is empty"),
        (("show", "ep-none"), {}, 1, "no such episode"),
        (("reward", "1", "--episode", "ep-none"), {}, 1, "no such episode"),
        (("status", "--proxy", "http://xn--a:1"), {}, 1, "http://xn--a:1 cannot be asked"),
        (("status", "--proxy", "https://192.0.2.1"), {"SSL_CERT_FILE": "/no/such"}, 1, "SSL_CERT_FILE names cannot"),
        (("status", "--proxy", "http://192.0.2.1"), {"HTTP_PROXY": "socks5://x"}, 1, "HTTP proxy cannot be used"),
    ],
)
def test_a_fault_is_one_line_that_says_it(
    ajet: Ajet, stub: ControlStub, monkeypatch: pytest.MonkeyPatch, argv: Any, env: dict[str, str], exit: int, says: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, out, err = ajet(*argv)
    assert (code, out) == (exit, "")
    assert err.count("\n") == 1
    assert err.startswith("ajet")
    assert says in err
    assert exit == 1 or not stub.heard


def test_reward_and_show(ajet: Ajet, stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    ajet("run", "--task", "t", "--", "true")
    stub.episodes["ep-0"].update(state="open", rewards=[])
    assert ajet("reward", "-0.5", "--episode", "ep-0", "--not-final", "--agent", "a", "--call", "c") == (0, "", "")
    sent = stub.heard[-1]
    assert {**sent.body, "id": None} == {"value": -0.5, "final": False, "agent": "a", "call": "c", "id": None}
    assert ajet("reward", "0", "--episode", "ep-0", "--not-final", "--call", "c", "--state", "s")[0] == 0
    assert (stub.heard[-1].body["call"], stub.heard[-1].body["state"]) == ("c", "s")
    assert ajet("reward", "0", "--episode", "ep-0", "--not-final", "--model", "m")[0] == 0
    assert stub.heard[-1].body["model"] == "m"
    monkeypatch.setenv("AJET_EPISODE", "ep-0")
    monkeypatch.setenv("OPENAI_API_KEY", "ajet-ep-0")
    assert ajet("reward", "1")[0] == 0
    assert stub.heard[-1].headers["authorization"] == "Bearer ajet-ep-0"
    assert "episode ep-0: ready" in ajet("show", "ep-0")[1]
    shown = json.loads(ajet("show", "ep-0", "--json")[1])
    assert shown["reward"] == 0.5
    assert stub.heard[-1].path.endswith("?tokens=1")


def test_a_later_part_of_an_episode_can_be_named(ajet: Ajet, stub: ControlStub) -> None:
    with Client(stub.url) as client:
        client.ask("open_episode", OpenEpisode(task="t"))
    for part in ("ep-0~2", "ep-0~3"):
        stub.episodes[part] = stub.episodes["ep-0"] | {"episode": part, "state": "open", "rewards": []}
    assert ajet("reward", "1", "--episode", "ep-0~2") == (0, "", "")
    assert ajet("abort", "--episode", "ep-0~3") == (0, "", "")
    assert "episode ep-0~2: ready" in ajet("show", "ep-0~2")[1]


def test_abort(ajet: Ajet, stub: ControlStub) -> None:
    with Client(stub.url) as client:
        client.ask("open_episode", OpenEpisode(task="t"))
    assert ajet("abort", "--episode", "ep-0", "--reason", "tired") == (0, "", "")
    assert (stub.episodes["ep-0"]["detail"], stub.episodes["ep-0"]["cause"]) == ("tired", None)
    with Client(stub.url) as client:
        client.ask("open_episode", OpenEpisode(task="t"))
    assert ajet("abort", "--episode", "ep-1", "--infra") == (0, "", "")
    assert stub.episodes["ep-1"]["cause"] == "infra"


def test_run_is_a_client_that_clients_shows(ajet: Ajet, stub: ControlStub) -> None:
    options = ("--name", "mine", "--lane", "math", "--revision", "r1", "--replace-older")
    assert ajet("run", "--task", "t", *options, "--", "true")[0] == 0
    (client,) = stub.clients.values()
    assert {"name": "mine", "lane": "math", "revision": "r1", "replaces_older": True}.items() <= client.items()
    assert stub.episodes["ep-0"]["client"] == client["client"]
    assert ajet("run", "--task", "t", "--", "true")[0] == 0
    assert ":true-" in list(stub.clients.values())[1]["name"]
    code, out, _ = ajet("clients")
    assert code == 0 and out.splitlines()[1].split()[:4] == ["mine", "math", "r1", "gone"]
    assert json.loads(ajet("clients", "--json")[1])["clients"][0]["name"] == "mine"


def test_status(ajet: Ajet, stub: ControlStub) -> None:
    ajet("run", "--task", "t", "--", "true")
    code, out, _ = ajet("status")
    assert code == 0
    assert "opened 1 = open 0 + sealed 0 + ready 1" in out
    assert json.loads(ajet("status", "--json", "--proxy", stub.url)[1])["episodes"]["opened"] == 1


def test_run_prints_output_and_table(ajet: Ajet, stub: ControlStub) -> None:
    code, out, err = ajet(
        "run", "--task", "sum/1", "--repeat", "2", "--eval", "--agent", "a", "--model", "m", "sh", "-c",
        "echo said; echo complained >&2; exit 3", "--help",
    )
    assert code == 0  # a reward of zero is a success
    assert out.startswith("said\nsaid\ntask")
    assert err == "complained\n" * 2
    assert out.endswith("2 episodes: 2 rewarded, mean reward 0\n")
    record = stub.episodes["ep-1"]
    assert (record["task"], record["eval"], record["agent"], record["model"]) == ("sum/1", True, "a", "m")


def test_run_in_parallel_says_whose_output_it_is(ajet: Ajet, stub: ControlStub) -> None:
    code, out, _ = ajet("run", "--task", "t", "--repeat", "3", "--parallel", "3", "--", "sh", "-c", "echo hello")
    assert code == 0
    assert sorted(out.splitlines()[:3]) == ["[ep-0] hello", "[ep-1] hello", "[ep-2] hello"]
    code, out, _ = ajet("run", "--task", "t", "--quiet", "--", "echo", "hello")
    assert "hello" not in out


def test_run_fails_only_when_no_episode_succeeded(ajet: Ajet, stub: ControlStub, tmp_path: Path) -> None:
    count = f"echo >> {tmp_path}/n; [ $(wc -l < {tmp_path}/n) -lt 3 ] || echo 1"
    assert ajet("run", "--task", "t", "--repeat", "2", "--reward-from", "stdout", "--", "sh", "-c", count)[0] == 1
    code, out, _ = ajet("run", "--task", "t", "--repeat", "2", "--reward-from", "stdout", "--", "sh", "-c", count)
    assert code == 0
    (tmp_path / "n").unlink()
    code, out, _ = ajet("run", "--task", "t", "--repeat", "3", "--reward-from", "stdout", "--", "sh", "-c", count)
    assert code == 0
    assert "3 episodes: 1 rewarded, 2 aborted, mean reward 1" in out
    assert "no line of its output is a number" in out


def test_run_waits_for_a_proxy_that_is_starting(ajet: Ajet, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ExitStack() as late:

        def said(line: str) -> None:
            say(line)
            late.enter_context(ControlStub(port))

        monkeypatch.setattr(commands, "say", said)
        code, out, err = ajet("run", "--proxy", f"http://127.0.0.1:{port}", "--task", "t", "--", "true")
    assert code == 0
    assert "mean reward 1" in out
    assert err == f"waiting up to 60 s for a proxy at http://127.0.0.1:{port}\n"


def test_run_without_a_proxy_opens_nothing(ajet: Ajet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "AWAIT_PROXY_S", 0.3)
    code, out, err = ajet("run", "--proxy", f"http://127.0.0.1:{free_port()}", "--task", "t", "--", "true")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("ajet: no proxy acknowledged GET")


@pytest.mark.parametrize("argv", [("status",), ("show", "ep-0"), ("top",), ("clients",)], ids=" ".join)
def test_looking_does_not_wait_long(ajet: Ajet, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    monkeypatch.setattr(cli, "LOOK_S", 0.2)
    code, out, err = ajet(*argv, "--proxy", f"http://127.0.0.1:{free_port()}")
    assert (code, out) == (1, "")
    assert "in 0.2 s" in err


@pytest.mark.parametrize(("command", "shown"), [("top", "opened 1 = ready 1"), ("clients", "mine  ")])
def test_what_is_watched_is_shown_again_until_interrupted(
    ajet: Ajet, stub: ControlStub, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    ajet("run", "--task", "t", "--name", "mine", "--", "true")
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", nap)
    code, out, err = ajet(command, "--every", "0.5")
    assert (code, naps, err.strip()) == (130, [0.5, 0.5], "ajet: interrupted")
    assert out.count(shown) == 2 and "\x1b" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_program_and_no_open_episode(stub: ControlStub, tmp_path: Path, number: int) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 3600 & echo $$ $! >> {pids}; wait"
    argv = [*AJET, "run", "--task", "t", "--repeat", "9", "--parallel", "3", "--", "sh", "-c", script]
    with subprocess.Popen(
        argv, env={**os.environ, "AJET_PROXY_URL": stub.url}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert until(lambda: pids.exists() and len(pids.read_text().split()) == 6)
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 130
    assert all(until_dead(int(pid)) for pid in pids.read_text().split())
    assert [record["state"] for record in stub.episodes.values()] == ["discarded"] * 3
    assert "3 episodes: 3 aborted" in out
    assert "interrupted" in err
    assert "Traceback" not in err


def test_wanted_episodes_are_played_until_an_interrupt(stub: ControlStub) -> None:
    stub.evaluations.extend([{"m": 3}, *[{}] * 1000])
    argv = [*AJET, "run", "--task", "t", "--eval", "--wanted", "--parallel", "2", "--", "sh", "-c", "exit 0"]
    with subprocess.Popen(
        argv, env={**os.environ, "AJET_PROXY_URL": stub.url}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert until(lambda: sum(record["state"] == "ready" for record in stub.episodes.values()) == 3)
        asked = stub.count("GET", "/wanted")
        assert until(lambda: stub.count("GET", "/wanted") > asked + 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, len(stub.episodes)) == (130, 3)
    assert {(record["model"], record["eval"]) for record in stub.episodes.values()} == {("m", True)}
    assert "3 episodes: 3 rewarded" in out and "interrupted" in err and "Traceback" not in err


def test_a_reader_that_left_is_no_traceback(stub: ControlStub) -> None:
    script = f"{shlex.join(AJET)} status | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, text=True, check=False,
        env={**os.environ, "AJET_PROXY_URL": stub.url},
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)
