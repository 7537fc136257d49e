"""The word of supervisors: who is believed, which lines are kept, and how a difference is explained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.events import RunWanted
from ajet_proxy.core.ledger.supervisors import (
    FORGOTTEN_S,
    MAX_BYTES,
    MAX_LINE,
    MAX_LINES,
    SILENT_S,
    Followed,
    Report,
    Supervisors,
    Tail,
    Verdict,
    difference,
)
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import Supervise
from ajet_sdk.runs import line_digest
from tests.kit.refused import refused

RUN = RunWanted(5.0, "r", "s", "running", '{"trainer.groups": 4}', "d1", 2)
RUNS = {"r": RUN}
UP = {"state": "running", "starts": 2, "step": 3, "of": 9, "phase": "training", "config": "d1"}


def said(at: float = 0.0, runs: Any = None, *, name: str = "s", instance: str = "i", **more: Any) -> Supervisors:
    made = more.pop("of", None) or Supervisors()
    made.hear(Supervise(name, instance, runs or {}, more.pop("verdicts", {})), more.pop("wanted", RUNS), at)
    return made


def test_nobody_is_believed_who_was_never_heard_or_is_silent() -> None:
    made = Supervisors()
    shown = made.show(RUN, 0.0)
    assert (shown["actual"], shown["reason"]) == (
        {"state": "unknown"}, "supervisor s was not heard since the daemon started",
    )
    said(0.0, {"r": UP}, of=made)
    assert (made.show(RUN, SILENT_S)["actual"]["state"], made.show(RUN, SILENT_S)["reason"]) == ("running", None)
    shown = made.show(RUN, SILENT_S + 1)
    assert (shown["actual"]["state"], shown["actual"]["step"]) == ("unknown", 3)
    assert shown["reason"] == "supervisor s was last heard 11 s ago"
    assert (made.alive(SILENT_S), made.alive(SILENT_S + 1)) == (["s"], [])
    assert made.runs_now(RUN, SILENT_S + 1)


def test_a_supervisor_of_no_run_is_forgotten_once_it_is_silent_for_long() -> None:
    made = said(0.0)
    made.hear(Supervise("idle", "i"), RUNS, 1.0)
    made.hear(Supervise("other", "i"), RUNS, 1.0 + FORGOTTEN_S)
    assert set(made.heard) == {"s", "idle", "other"}
    made.hear(Supervise("other", "i"), RUNS, 2.0 + FORGOTTEN_S)
    assert set(made.heard) == {"s", "other"}


def test_the_second_of_one_name_is_refused_while_the_first_is_heard() -> None:
    made = said(0.0)
    with refused(Conflict, "supervisor_exists"):
        said(SILENT_S, instance="other", of=made)
    said(SILENT_S, of=made)
    said(2 * SILENT_S + 1, instance="other", of=made)
    with pytest.raises(Conflict):
        said(2 * SILENT_S + 1, of=made)


def test_a_report_counts_for_the_runs_of_its_supervisor_alone() -> None:
    made = said(0.0, {"r": UP, "unknown": UP}, name="another")
    assert made.runs == {}
    said(0.0, {"r": UP}, of=made)
    assert set(made.runs) == {"r"}
    said(1.0, {}, of=made, wanted={})
    assert made.runs == {}


@pytest.mark.parametrize("report", [
    "running", {}, {"state": "asleep"}, {"state": "unknown"}, {**UP, "step": "3"}, {**UP, "log": {"start": 0}},
    {**UP, "metrics": [{"step": "1"}]}, {**UP, "metrics": [{}]}, {**UP, "metrics": [{"step": True}]}, [UP],
])  # fmt: skip
def test_a_report_that_cannot_be_read_changes_nothing(report: Any) -> None:
    made = Supervisors()
    with refused(BadRequest, param="runs"):
        said(0.0, {"r": report}, of=made)
    assert (made.heard, made.runs) == ({}, {})


def test_a_name_that_is_none_is_refused() -> None:
    with refused(BadRequest, param="name"):
        said(0.0, name="../s")


def test_a_verdict_is_taken_from_the_supervisor_that_was_asked() -> None:
    made = said(0.0)
    made.checks["c"] = ("s", {"run": "r", "config": {}})
    assert made.told("s", RUNS)["checks"] == {"c": {"run": "r", "config": {}}}
    assert made.told("t", RUNS)["checks"] == {}
    said(1.0, name="t", verdicts={"c": {"digest": "x"}}, of=made)
    assert "c" in made.checks
    said(1.0, verdicts={"c": {"error": "no", "param": "p"}, "other": {"digest": "x"}}, of=made)
    assert (made.checks, made.verdicts) == ({}, {"c": Verdict(error="no", param="p")})
    with pytest.raises(BadRequest):
        said(1.0, verdicts={"c": 1}, of=made)


def test_what_a_supervisor_is_told() -> None:
    made = said(0.0, {"r": UP})
    told = made.told("s", {**RUNS, "other": RunWanted(0.0, "other", "t", "running", "{}", "", 1)})
    assert told["runs"] == {
        "r": {"desired": "running", "config": {"trainer.groups": 4}, "digest": "d1", "starts": 2}
    }
    assert told["have"] == {"r": {"log": 0, "step": -1, "line": line_digest("")}}
    assert told["known"] == made.told("s", RUNS)["known"] != made.told("s", {})["known"]


def stands(desired: str, **actual: Any) -> str | None:
    run = RunWanted(0.0, "r", "s", desired, "{}", "d1", 2)
    return difference(run, {**UP, "reason": None, **actual})


@pytest.mark.parametrize(("desired", "actual", "reason"), [
    ("running", {}, None),
    ("running", {"config": "d0"}, "it takes up its new configuration at its next step"),
    ("running", {"config": "d0", "reason": "not allowed any more"}, "not allowed any more"),
    ("running", {"starts": 1}, "it is running, and will start anew"),
    ("running", {"state": "starting", "phase": "loading"}, "it is starting: loading"),
    ("running", {"state": "stopped"}, "it is about to start"),
    ("running", {"state": "failed", "reason": "ended with 2"}, "ended with 2"),
    ("running", {"state": "waiting"}, "it is waiting"),
    ("running", {"state": "unknown"}, "its supervisor has said nothing of it yet"),
    ("stopped", {"state": "stopping", "phase": "saving"}, "it is stopping: saving"),
    ("stopped", {"state": "stopped"}, None),
    ("stopped", {"state": "failed"}, None),
])  # fmt: skip
def test_why_what_runs_is_not_what_is_wanted(desired: str, actual: dict[str, Any], reason: str | None) -> None:
    assert stands(desired, **actual) == reason


# -- lines


def test_a_tail_has_limits_in_lines_and_in_bytes() -> None:
    tail = Tail()
    for place in range(1, MAX_LINES + 11):
        tail.add(place, "x")
    assert (len(tail.lines), tail.first, tail.end) == (MAX_LINES, 10, MAX_LINES + 10)
    tail.add(MAX_LINES + 11, "y" * MAX_BYTES)
    assert [len(line) for _, line in tail.lines] == [MAX_BYTES]
    assert tail.size == MAX_BYTES


def log(after: int, text: str, start: int | None = None) -> dict[str, Any]:
    start = after if start is None else start
    return {"after": after, "start": start, "end": start + len(text), "lines": text.splitlines()}


def taking(*logs: dict[str, Any]) -> Followed:
    made = Followed()
    for one in logs:
        made.take(_report(log=one))
    return made


def _report(**more: Any) -> Report:
    made = said(0.0, {"r": {**UP, **more}}).of("r").report
    assert made is not None
    return made


def test_the_log_is_put_together_of_its_pieces() -> None:
    made = taking(log(0, "a\nbb\n"), log(0, "a\nbb\n"), log(5, "c\n"))
    assert list(made.log.lines) == [(2, "a"), (5, "bb"), (7, "c")]
    assert list(made.log.after(2)) == [(5, "bb"), (7, "c")]
    assert made.have["log"] == 7


def test_a_log_with_a_gap_or_from_its_beginning_starts_anew() -> None:
    for again in (log(5, "later\n", 100), log(5, "first\n", 0)):
        made = taking(log(0, "a\nbb\n"), again)
        assert [line for _, line in made.log.lines] == again["lines"]
        assert (made.log.first, made.have["log"]) == (again["start"], again["end"])


def test_a_sender_that_is_mistaken_about_what_we_have_sends_again() -> None:
    made = taking(log(0, "a\nbb\n"), log(0, "other\n"), log(9, "later\n"))
    assert [line for _, line in made.log.lines] == ["a", "bb"]
    made.take(_report(metrics=[{"step": 7}], last=6, follows=line_digest("other")))
    assert (made.have, list(made.metrics.lines)) == ({"log": 5, "step": -1, "line": line_digest("")}, [])


def test_a_long_line_is_cut() -> None:
    made = taking(log(0, "x" * (MAX_LINE + 1) + "\n"))
    assert made.log.lines[0] == (MAX_LINE + 2, "x" * MAX_LINE)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=6))
def test_metrics_have_each_step_once_as_it_was_made_last(attempts: list[tuple[int, int]]) -> None:
    """Runs go back to a checkpoint, and make steps again."""
    made, truth = Followed(), dict[int, int]()
    for number, (first, count) in enumerate(attempts):
        start = min(first, max(truth, default=0) + 1)
        truth = {step: made_in for step, made_in in truth.items() if step < start}
        made.take(_report(last=start - 1, follows=made.have["line"]))
        lines = [{"step": step, "made_in": number} for step in range(start, start + count)]
        truth |= {line["step"]: number for line in lines}
        made.take(_report(metrics=lines, last=start - 1, follows=made.have["line"]))
        assert {json.loads(line)["step"]: json.loads(line)["made_in"] for _, line in made.metrics.lines} == truth
        newest = made.metrics.lines[-1][1]
        assert made.have == {"log": 0, "step": start + count - 1, "line": line_digest(newest)}


def test_reasons_are_cut() -> None:
    made = said(0.0, {"r": {**UP, "state": "failed", "reason": "x" * 5000, "phase": "y" * 5000}})
    actual = made.actual(RUN, 0.0)
    assert (len(actual["reason"]), len(actual["phase"])) == (1000, 1000)
