"""A short slice of the fault harness, and that it finds what it is there to find."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet_proxy.io.storage.journal import Journal
from tests.faults import __main__ as faults
from tests.faults import judges, tears
from tests.faults.agent import ABSENT, MODELS
from tests.faults.audit import Audit
from tests.faults.notes import Notes, Reader
from tests.faults.stage import Stage, Worker, forked
from tests.faults.storm import STRUCK, fewer
from tests.faults.team import Team, check_state
from tests.faults.trainer import INSTANTS
from tests.kit.source import ROOT


@pytest.mark.slow
def test_a_slice_of_the_storm(tmp_path: Path) -> None:
    counts = Counter[str]()
    faults.storm(tmp_path, seed=1, kills=2, others=1, agents=4, progress=faults.Progress(), counts=counts)
    killed = ("the proxy", "a trainer", "an agent", "the supervisor", "the supervisor's trainer")
    assert min(counts[f"kills of {who}"] for who in killed) >= 2
    assert counts["kills of a trainer at an instant of its own"] == len(MODELS) * len(INSTANTS)
    assert counts["kills of the proxy between two acknowledgements of one episode"] == 1
    assert min(counts["shares that one trainer refused and the other trained"], counts["… of judge ready"]) > 0
    assert counts["requests that were held at the gate of their own model"] > 0
    assert min(counts["groups leased"], counts["steps of the supervised run, each made once"]) > 2
    assert min(counts["times that the disk was full"], counts["times that the engine was frozen"]) == 1
    assert counts["… for longer than agents wait"] == 1
    assert counts["… and calls that they gave up meanwhile"] >= 1
    assert min(counts["acknowledged calls, found once with their ids"], counts["batches delivered"]) > 5


@pytest.mark.slow
def test_a_slice_of_the_storm_over_worker_processes(tmp_path: Path) -> None:
    counts, told = Counter[str](), faults.Progress()
    faults.storm(tmp_path, seed=1, kills=2, others=0, agents=3, progress=told, counts=counts, workers=2)
    assert min(counts[f"kills of {who}"] for who in ("the proxy", "a worker process", "an agent")) >= 2
    assert counts["acknowledged calls, found once with their ids"] > 5


@pytest.mark.slow
def test_a_slice_of_the_storm_of_judges(tmp_path: Path) -> None:
    counts = Counter[str]()
    judges.storm(tmp_path, seed=1, kills=6, proxy_kills=1, chats=60, progress=faults.Progress(), counts=counts)
    assert sum(number for name, number in counts.items() if name.startswith("kills of a judge")) == 6
    assert min(counts[name] for name in ("… judged once", "judgements acknowledged, found whole")) > 20
    assert sum(number for name, number in counts.items() if name.startswith("failures of the model")) > 0
    assert counts["episodes leased, of which nothing was taken back before"] > 20


ONE, TWO = ({"call": "c", "value": value} for value in (0.5, 1.0))


@pytest.mark.parametrize("wrong", [
    {"rewards": [ONE, ONE]}, {"rewards": [TWO]}, {"rewards": []}, {"judged_by": "k"}, {"state": "discarded"},
    {"reason": "filtered"}, {"rewards": [], "judged_by": None}, {"episode": "other", "judged_by": None, "rewards": []},
])  # fmt: skip
def test_a_judgement_that_is_not_there_once_is_found(tmp_path: Path, wrong: dict[str, Any]) -> None:
    audit = judges.Audit(SimpleNamespace(notes=tmp_path), Counter())  # type: ignore[arg-type]
    for name in ("j", "j"):  # the same again
        Notes(tmp_path / "j.log").add("judged", episode="one", judge=name, rewards={"c": 0.5})
    audit.read()
    right = {"episode": "one", "state": "ready", "rewards": [ONE], "judged_by": "j"}
    audit.check(right)
    with pytest.raises(AssertionError):
        audit.check({name: value for name, value in (right | wrong).items() if value is not None})
    Notes(tmp_path / "k.log").add("judged", episode="one", judge="k", rewards={"c": 0.5})
    with pytest.raises(AssertionError, match="judged twice"):
        audit.read()


def test_faults_that_did_not_strike_are_missed() -> None:
    asked = {"proxy": 2, "write": 2, "clock": 0}
    assert fewer(asked, {"kills of the proxy": 1, "times that fsync failed": 1}) == ["proxy: 1 of 2", "write: 1 of 2"]
    assert fewer(asked, {"kills of the proxy": 3, "times that fsync failed": 1, "times that pwrite failed": 1}) == []
    assert set(STRUCK) == {*faults.KILLED, *faults.OTHERS, "worker", "instant"}


def test_a_kill_strikes_only_who_was_alive() -> None:
    worker = Worker(lambda life: forked(time.sleep, 0 if life == 0 else 6000))
    worker.process.join(300)
    assert not worker.kill()
    worker.again()
    assert worker.kill()


def test_a_slice_of_the_torn_tails(tmp_path: Path) -> None:
    counts = tears.run(tmp_path, 1, 30, faults.Progress())
    assert counts["torn or spoiled tails, each cut at its last whole record"] == 30
    assert counts["kinds of records that were the last"] > 5


def test_a_journal_that_keeps_its_torn_tail_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tears, "DAEMONS", 0)
    monkeypatch.setattr(Journal, "_cut_tail", lambda *_: None)
    with pytest.raises(AssertionError):
        tears.run(tmp_path, 1, 5, faults.Progress())


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"), 1, agents=1)
    try:
        yield stage
    finally:
        stage.close()


REWARD = {"id": "of-nobody", "value": 1.0}
OF: dict[str, Any] = {"model": "planner"}
ALL = OF | {"filtered": ()}


@pytest.mark.parametrize(("found", "notes"), [
    ("404", [("call", {"episode": "nobody", "call": "call-0", "ids": [1]} | OF)]),
    ("404", [("offer", {"episode": "nobody"} | REWARD), ("reward", {"episode": "nobody"} | REWARD)]),
    ("404", [("leased", {"batch": "b", "samples": {"nobody": []}} | OF), ("acked", {"batch": "b"} | ALL)]),
    ("two batches", [("leased", {"batch": name, "samples": {"one": []}} | OF) for name in "ab"]
     + [("acked", {"batch": name} | ALL) for name in "ab"]),
    ("judge trained", [("leased", {"batch": "b", "samples": {"absent0": []}} | OF | {"model": ABSENT}),
                       ("acked", {"batch": "b"} | ALL | {"model": ABSENT})]),
    ("one call", [("call", {"episode": "nobody", "call": "call-0", "ids": [1]} | OF)] * 2),
    ("that retries failed", [("failed", {"why": "refused"})]),
])  # fmt: skip
def test_a_promise_that_was_not_kept_is_found(
    stage: Stage, found: str, notes: list[tuple[str, dict[str, Any]]]
) -> None:
    audit, liar = Audit(stage, Counter()), stage.notes / "liar.log"
    for kind, fields in notes:
        Notes(liar).add(kind, **fields)
    try:
        with pytest.raises(AssertionError, match=found):
            audit.after_a_fault()
    finally:
        liar.unlink()


def record(state: str, **shares: str) -> dict[str, Any]:
    return {"episode": "one", "state": state, "model": None, "members": {}, "shares": shares}


@pytest.mark.parametrize(("state", "shares"), [
    ("trained", {"planner": "trained", "coder": "ready"}), ("trained", {}), ("ready", {"planner": "trained"}),
    ("ready", {"planner": "leased", "coder": "ready"}), ("leased", {"planner": "ready"}),
])  # fmt: skip
def test_a_state_that_is_not_what_its_shares_add_up_to_is_found(state: str, shares: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="its shares are"):
        check_state(record(state, **shares))
    check_state(record("trained", planner="trained", coder="trained"))


@pytest.mark.parametrize(("found", "share"), [
    ("trained by coder in name alone", {"coder": "trained"}), ("trained by judge in name alone", {ABSENT: "trained"}),
    ("nobody leased nothing to the trainer of planner", {"planner": "leased"}),
])  # fmt: skip
def test_a_share_that_its_trainer_never_had_is_found(stage: Stage, found: str, share: dict[str, str]) -> None:
    (state,) = share.values()
    with pytest.raises(AssertionError, match=found):
        Team(stage, lambda path: None, Counter()).check([record(state, **share) | {"episode": "nothing"}])


def test_a_request_that_waits_at_anothers_gate_is_found(stage: Stage) -> None:
    team = Team(stage, lambda path: None, Counter())
    team.check_holds()
    before = stage.holds.read_bytes() if stage.holds.exists() else b""
    stage.holds.write_bytes(before + b'{"model": "planner", "held_s": 2.0, "free_s": 1.5}\n')
    with pytest.raises(AssertionError, match="its gate was open"):
        team.check_holds()
    stage.holds.write_bytes(before)


def test_half_a_line_is_no_note_yet(tmp_path: Path) -> None:
    reader, path = Reader(), tmp_path / "a.log"
    assert list(reader.new(path)) == []
    path.write_text('{"kind": "began"}\n{"ki')
    assert [note["kind"] for note in reader.new(path)] == ["began"]
    with path.open("a") as file:
        file.write('nd": "call"}\n')
    assert [note["kind"] for note in reader.new(path)] == ["call"]
    assert list(reader.new(path)) == []


def test_the_makefile_passes_seed_and_counts_on() -> None:
    line = next(line for line in Path(ROOT, "Makefile").read_text().splitlines() if "tests.faults" in line)
    assert re.findall(r"--(\w+) \$\((\w+)\)", line) == [
        ("seed", "SEED"), ("kills", "KILLS"), ("others", "OTHERS"), ("agents", "AGENTS"), ("tears", "TEARS"),
        ("workers", "WORKERS"), ("judges", "JUDGES"), ("chats", "CHATS"),
    ]  # fmt: skip
