"""A supervisor and one run, turn by turn, with a daemon in memory and trainers that are real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.bodies import check_storable
from ajet_sdk.errors import BadRequest, Conflict, ProxyUnreachable
from ajet_sdk.routes import Supervise
from ajet_sdk.runs import LEARNING_RATE, flat, merged
from ajet_sdk.settings import ConfigError
from ajet_trainer import held
from ajet_trainer.config import Config
from ajet_trainer.run_folder import LOCK
from ajet_trainer.runs.allowed import read
from ajet_trainer.runs.kept_run import found_in
from ajet_trainer.runs.supervisor import Supervisor, environment, hidden_in
from tests.kit.source import ROOT

PROXY = "http://127.0.0.1:8484"
COMMAND = (sys.executable, "-m", "tests.kit.scripted_trainer")
STRANGER = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(900)
"""
SECRET = "a-key-that-nobody-may-see"


class MemoryDaemon:
    """Answers a supervisor with what is wanted, and keeps what it said."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self.checks: dict[str, Any] = {}
        self.have: dict[str, Any] = {}
        self.said: Supervise | None = None
        self.fault: Exception | None = None
        self.log: dict[str, list[str]] = {}
        self.metrics: list[dict[str, Any]] = []

    def supervise(self, said: Supervise) -> dict[str, Any]:
        if self.fault is not None:
            raise self.fault
        self.said = said
        for run, report in said.runs.items():
            have = self.have.setdefault(run, {"log": 0, "step": -1, "line": ""})
            if "log" in report:
                self.log.setdefault(run, []).extend(report["log"]["lines"])
                have["log"] = report["log"]["end"]
            self.metrics += report.get("metrics", ())
        have = {run: self.have.get(run, {"log": 0, "step": -1, "line": ""}) for run in self.wanted}
        return {"runs": self.wanted, "have": have, "checks": self.checks, "known": "k"}


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.daemon, self.said = folder, MemoryDaemon(), list[str]()
        self.now, self.run = 0.0, folder / "runs" / "r"
        (folder / "model").mkdir()
        (folder / "allow.toml").write_text(f'runs = "{folder}/runs"\n[models]\nsmall = "{folder}/model"\n')
        self.made: list[Supervisor] = []

    def supervisor(self, **more: Any) -> Supervisor:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for older in self.made:
            older._lock.close()  # as at its death
        made = Supervisor(
            read(str(self.folder / "allow.toml")), self.daemon, PROXY, "s", say=self.said.append, env=env,
            hidden={SECRET: "***"}, command=COMMAND, clock=lambda: self.now,
            sleep=lambda seconds: time.sleep(0.02), **more,
        )  # fmt: skip
        self.made.append(made)
        return made

    def want(self, run: str = "r", desired: str = "running", starts: int = 1, **trainer: Any) -> None:
        verl = {LEARNING_RATE: trainer.pop("rate", 1e-5)}
        config = merged({}, flat({"trainer": {"model": "small", **trainer}, "verl": verl}))
        digest = self.made[-1]._verdict(run, config)["digest"]
        self.daemon.wanted[run] = {"desired": desired, "config": config, "digest": digest, "starts": starts}

    def runs(self, **wanted: Any) -> None:
        """Has a run as it is wanted, and waits until it trains."""
        self.want(**wanted)
        self.state("running")

    def report(self, run: str = "r") -> dict[str, Any]:
        found: dict[str, Any] = self.made[-1].runs[run].report
        return found

    def until(self, reached: Callable[[], object], limit_s: float = 300.0) -> None:
        end = time.monotonic() + limit_s
        while not reached():
            assert time.monotonic() < end, (self.report(), self.said, self.words())
            self.made[-1].turn()
            time.sleep(0.01)

    def state(self, wanted: str, run: str = "r") -> None:
        self.until(lambda: run in self.made[-1].runs and self.report(run).get("state") == wanted)

    def history(self, run: str = "r") -> list[tuple[int, int, float]]:
        path = self.run.parent / run / "history"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def words(self, run: str = "r") -> str:
        path = self.run.parent / run / "trainer.log"
        return path.read_text() if path.exists() else ""

    def pid(self, run: str = "r") -> int | None:
        return held.holder(self.run.parent / run)

    def close(self) -> None:
        for folder in (self.folder / "runs").iterdir():
            if folder.is_dir() and not folder.is_symlink() and (pid := held.holder(folder)) is not None:
                os.kill(pid, signal.SIGKILL)
        for made in self.made:
            made._lock.close()
            for kept in made.runs.values():
                if kept.process is not None:
                    kept.process.wait(300)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.supervisor()
    yield made
    made.close()


def test_a_folder_that_cannot_be_asked_keeps_no_other_run_from_its_trainer(site: Site) -> None:
    odd = site.folder / "runs" / "odd" / LOCK
    odd.mkdir(parents=True)
    site.supervisor()
    site.runs()
    assert site.report("odd")["state"] == "failed" and "it cannot be told who holds" in site.report("odd")["reason"]
    odd.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be somebody else")
def test_a_folder_that_nobody_may_read_is_no_run(site: Site) -> None:
    """As ``lost+found`` is."""
    host = site.made[-1]._host
    with tempfile.TemporaryDirectory() as runs:  # of the host, where pytest's are closed
        Path(runs).chmod(0o755)
        Path(runs, "closed").mkdir(0o700)
        host = replace(host, allowed=replace(host.allowed, runs=Path(runs)))
        if (child := os.fork()) == 0:
            os.setuid(65534)
            with suppress(OSError):
                os._exit(found_in(host) != {})
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_run_is_started_and_stopped_and_goes_on_where_it_was(site: Site) -> None:
    site.runs()
    site.until(lambda: len(site.history()) > 3)
    assert site.report()["config"] == site.daemon.wanted["r"]["digest"]
    site.want(desired="stopped")
    site.state("stopped")
    assert site.report()["phase"] == "stopped"
    made = len(site.history())
    site.want(starts=2)
    site.until(lambda: len(site.history()) > made + 3)
    assert [step for _, step, _ in site.history()] == list(range(1, len(site.history()) + 1))
    assert len({pid for pid, _, _ in site.history()}) == 2


def test_a_live_change_reaches_the_trainer_that_runs(site: Site) -> None:
    site.runs()
    site.want(rate=0.5, total_steps=10_000)
    site.until(lambda: site.history()[-1][2] == 0.5 if site.history() else False)
    site.until(lambda: site.report()["config"] == site.daemon.wanted["r"]["digest"])
    assert len({pid for pid, _, _ in site.history()}) == 1
    assert site.report()["of"] == 10_000


def test_a_report_says_why_a_change_is_not_in_force(site: Site) -> None:
    site.runs(model_name="stubborn")
    site.want(rate=0.5, model_name="stubborn")
    site.until(lambda: site.report()["reason"] == "the rate stays" if "reason" in site.report() else False)
    assert site.report()["config"] != site.daemon.wanted["r"]["digest"]
    site.want(model_name="stubborn")
    site.until(lambda: site.report()["reason"] is None)


def test_another_start_ends_the_trainer_and_begins_one(site: Site) -> None:
    site.runs()
    site.want(starts=2, max_tokens=64)
    site.until(lambda: site.report().get("starts") == 2 and site.report().get("state") == "running")
    site.until(lambda: len({pid for pid, _, _ in site.history()}) == 2)
    assert [step for _, step, _ in site.history()] == list(range(1, len(site.history()) + 1))


def test_a_run_that_made_all_its_steps_is_done_until_there_are_more(site: Site) -> None:
    site.want(total_steps=3)
    site.state("done")
    assert (site.report()["reason"], len(site.history())) == ("it has made all its steps", 3)
    site.supervisor()
    site.state("done")
    site.want(total_steps=5)
    site.until(lambda: len(site.history()) == 5)
    site.state("done")


def test_a_run_stays_done_where_the_host_has_another_folder_for_its_model(site: Site) -> None:
    site.want(total_steps=3)
    (site.folder / "moved").mkdir()
    (site.folder / "allow.toml").write_text(f'runs = "{site.folder}/runs"\n[models]\nsmall = "{site.folder}/moved"\n')
    site.supervisor()
    site.state("done")
    assert len(site.history()) == 3


def test_what_cannot_be_used_is_said_and_not_tried_again(site: Site) -> None:
    site.want(model_name="refused")
    site.state("failed")
    assert site.report()["reason"] == "ended with 2: ajet-trainer: this cannot be used"
    assert site.report()["exit_code"] == 2
    site.now += 10_000
    for _ in range(5):
        site.made[-1].turn()
    assert site.words().count("this cannot be used") == 1
    site.runs(starts=2)


def test_a_trainer_that_dies_is_started_again_after_pauses_that_grow(site: Site) -> None:
    site.want(model_name="dying")
    for number in range(1, 5):
        site.until(lambda: site.words().count("the engine is gone") == number)  # noqa: B023
        site.state("failed")
        pause = 2 ** (number - 1)
        assert f"it starts again in {pause} s" in site.report()["reason"]
        site.now += pause - 0.5
        site.made[-1].turn()
        assert site.report()["state"] == "failed"
        site.now += 0.6
    site.want(desired="stopped", model_name="dying")
    site.state("stopped")


def test_a_killed_trainer_comes_back(site: Site) -> None:
    site.want()
    site.until(lambda: len(site.history()) > 2)
    os.kill(site.pid() or 0, signal.SIGKILL)
    site.state("failed")
    assert "ended by signal 9" in site.report()["reason"]
    site.now += 2
    site.until(lambda: len({pid for pid, _, _ in site.history()}) == 2)
    assert [step for _, step, _ in site.history()] == list(range(1, len(site.history()) + 1))


def test_a_supervisor_that_was_killed_takes_its_trainer_over(site: Site) -> None:
    site.runs()
    before = site.pid()
    site.supervisor()
    site.state("running")
    made = len(site.history())
    site.until(lambda: len(site.history()) > made + 3)
    assert site.pid() == before
    site.want(desired="stopped", model_name="deaf")
    site.state("stopping")
    site.supervisor()
    site.state("stopped")
    assert site.pid() is None


def test_a_trainer_is_asked_to_end_once_whoever_asks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = held.tell_to_end
    monkeypatch.setattr(held, "tell_to_end", lambda folder, pid: (asked.append(pid), real(folder, pid)))
    site.runs(model_name="deaf")
    site.want(desired="stopped", model_name="deaf")
    site.state("stopping")
    site.supervisor()
    for _ in range(5):
        site.made[-1].turn()
    site.state("stopped")
    assert len(asked) == 1


def test_without_a_daemon_trainers_go_on_and_nothing_else_happens(site: Site) -> None:
    site.runs()
    before = site.pid()
    site.daemon.fault = ProxyUnreachable("no answer")
    for known in (False, True):
        if known:
            site.supervisor()
        for _ in range(3):
            site.made[-1].turn()
        assert site.pid() == before
    site.daemon.fault = None
    site.until(lambda: "r" in (site.made[-1].wanted or {}))
    assert site.said[-1] == f"the daemon at {PROXY} is there again"
    assert len([line for line in site.said if "the daemon is away, trainers go on" in line]) == 2


def test_another_of_its_name_has_the_runs(site: Site) -> None:
    site.runs()
    site.daemon.fault = Conflict("there is another supervisor s")
    site.until(lambda: site.pid() is None)
    assert "there is another supervisor s" in site.said


def test_what_is_not_wanted_ends(site: Site) -> None:
    site.runs()
    site.daemon.wanted.clear()
    site.until(lambda: site.pid() is None)


def test_one_trainer_at_a_time(site: Site) -> None:
    site.runs()
    site.want("second")
    site.state("waiting", "second")
    assert site.report("second")["reason"] == "run r is at work on this host: one trainer at a time"
    site.want(desired="stopped")
    site.state("running", "second")
    assert site.pid() is None


def test_a_stranger_in_the_folder_is_left_alone(site: Site) -> None:
    folder = site.run
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", STRANGER, str(folder / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        site.want()
        site.state("waiting")
        assert f"process {stranger.pid}, which is no trainer of ours" in site.report()["reason"]
        stranger.kill()
    site.state("running")


def test_a_link_in_the_place_of_a_run_is_not_followed(site: Site, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (site.run).symlink_to(elsewhere)
    site.want()
    site.state("failed")
    assert "is a link" in site.report()["reason"]
    assert list(elsewhere.iterdir()) == []


def test_a_host_that_allows_less_than_before_says_so(site: Site) -> None:
    site.runs()
    (site.folder / "allow.toml").write_text(f'runs = "{site.folder}/runs"')
    site.supervisor()
    site.until(lambda: "must be one of none" in (site.report().get("reason") or ""))
    assert site.report()["state"] == "running"
    os.kill(site.pid() or 0, signal.SIGKILL)
    site.state("failed")
    assert "must be one of none" in site.report()["reason"]


def test_verdicts(site: Site) -> None:
    site.daemon.checks = {
        "good": {"run": "r", "config": {"trainer.model": "small"}},
        "bad": {"run": "r", "config": {"trainer.model": f"/{SECRET}"}},
        "worse": {"run": "../r", "config": {}},
        "empty": {"run": "r", "config": {}},
    }
    site.made[-1].turn()
    site.daemon.checks = {}
    site.made[-1].turn()
    assert site.daemon.said is not None
    verdicts = site.daemon.said.verdicts
    assert set(verdicts["good"]) == {"digest"}
    assert verdicts["bad"]["param"] == "trainer.model"
    assert verdicts["worse"]["param"] == "run"
    assert "model is required" in verdicts["empty"]["error"]
    assert SECRET not in json.dumps(dict(verdicts))


def test_lines_reach_the_daemon_without_secrets(site: Site) -> None:
    site.runs()
    with (site.run / "trainer.log").open("a") as log:
        log.write(f"key {SECRET}\n")
    site.until(lambda: any("key ***" in line for line in site.daemon.log.get("r", [])))
    assert SECRET not in str(site.daemon.log)
    assert SECRET not in (site.run / "config.toml").read_text()


def test_nothing_of_the_host_is_seen_from_afar(site: Site) -> None:
    """Neither in the log, nor in metrics, nor in the phase."""
    site.runs()
    folder = site.run
    told = f"{folder}/x of {PROXY} by http://me:pass@engine:1/v1, {SECRET}"
    with (folder / "trainer.log").open("a") as log:
        log.write(f"{told}\n")
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 99, "why": [told]}) + "\n")
    shown = "…/r/x of the daemon by http://***@engine:1/v1, ***"
    site.until(lambda: shown in site.daemon.log.get("r", []))
    site.until(lambda: any(line.get("why") == [shown] for line in site.daemon.metrics))


@pytest.mark.parametrize("odd", [
    '{"phase": "training", "step": 1e999}', '{"phase": "\\ud800", "step": 9}', '{"step": 36893488147419103232}',
    '{"step": "9"}', "[" * 100_000, "[]", '{"phase": 7}',
])  # fmt: skip
def test_a_phase_that_cannot_be_shown_costs_itself_alone(site: Site, odd: str) -> None:
    site.runs()
    (site.run / "phase.json").write_text(odd)
    site.made[-1].turn()
    check_storable(site.report(), "report")
    assert all(type(site.report()[name]) is int for name in ("step", "of"))
    site.want(desired="stopped")
    site.state("stopped")


def test_a_report_that_the_daemon_does_not_take_does_not_end_supervision(site: Site) -> None:
    site.runs()
    taken = site.daemon.supervise

    def refuses(said: Supervise) -> dict[str, Any]:
        if said.runs:
            raise BadRequest("runs.r: nobody can read that")
        return taken(said)

    site.daemon.supervise = refuses  # type: ignore[method-assign]
    site.want(desired="stopped")
    site.until(lambda: site.pid() is None)
    assert any("does not take what is said of the runs: runs.r" in line for line in site.said)


def test_two_supervisors_do_not_share_a_folder(site: Site) -> None:
    serve = ["-m", "ajet_trainer.cli", "serve", "--proxy", PROXY, "--allow", str(site.folder / "allow.toml")]
    done = subprocess.run(
        [sys.executable, *serve], capture_output=True, text=True, check=False,
    )
    assert "another supervisor keeps the runs in" in done.stderr


def test_at_its_end_trainers_save_first(site: Site) -> None:
    site.runs(model_name="deaf")
    site.made[-1].end()
    site.made[-1].loop()
    assert site.pid() is None
    assert json.loads((site.run / "phase.json").read_text())["phase"] == "stopped"
    assert site.daemon.said is not None
    assert site.daemon.said.runs["r"]["state"] in ("stopping", "stopped")


def test_a_second_end_asks_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(held, "tell_to_end", lambda folder, pid: asked.append(pid))
    site.runs()
    site.made[-1].end()
    for _ in range(3):
        site.made[-1].turn()
    assert len(asked) == 1
    site.made[-1].end()
    site.made[-1].turn()
    site.made[-1].turn()
    assert len(asked) == 2


def test_what_trainers_inherit() -> None:
    env = {"PATH": "/bin", "AJET_TRAINER_KEY": "k", "AJET_PROXY_URL": "x", "AJET_ADMIN_SECRET": "s"}
    assert environment(env) == {"PATH": "/bin", "AJET_TRAINER_KEY": "k"}
    with pytest.raises(ConfigError, match="AJET_TRAINER_GROUPS: a run's configuration says it"):
        environment({"AJET_TRAINER_GROUPS": "3"})


def test_no_log_shows_what_a_variable_keeps_secret() -> None:
    environ = {"HF_TOKEN": "hf_0123456789", "API_KEY": "", "MY_SECRET": "short", "PATH": "/usr/local/bin"}
    config = Config(proxy_url=PROXY, key="the trainer's key", tls_cert="/etc/ajet/cert.pem")
    hidden = ("/etc/ajet/cert.pem", "hf_0123456789", "the trainer's key")
    assert hidden_in(environ, config) == dict.fromkeys(hidden, "***")
    assert hidden_in({}, Config(proxy_url=PROXY)) == {}
