"""Differences that count between a direct run and one through the proxy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.compare import Outcome, asked, counts, differences, read, unlike

PASS, SKIP = Outcome("passed"), Outcome("skipped")
REPORT = """<testsuites><testsuite>
<testcase classname="t.A" name="fine" />
<testcase classname="t.A" name="left[out]"><skipped type="pytest.skip" message="not here" /></testcase>
<testcase classname="t.A" name="wrong"><failure message="openai.BadRequestError: Error code: 400">…</failure></testcase>
<testcase classname="t.A" name="asserted"><failure message="assert 1 == 2">…</failure></testcase>
<testcase classname="t.A" name="odd"><failure message="">…</failure></testcase>
<testcase classname="t.A" name="torn"><system-out>words</system-out></testcase>
<testcase classname="t.A" name="torn"><error message="RuntimeError: teardown">…</error></testcase>
</testsuite></testsuites>"""


def test_a_report_gives_each_test_one_outcome(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    outcomes = read(report)
    assert {test.removeprefix("t.A::"): str(outcome) for test, outcome in outcomes.items()} == {
        "fine": "passed", "left[out]": "skipped", "wrong": "failed (openai.BadRequestError)",
        "asserted": "failed (assert)", "odd": "failed (?)", "torn": "error (RuntimeError)",
    }  # fmt: skip
    assert counts(outcomes) == {"passed": 1, "skipped": 1, "failed": 3, "error": 1}


@pytest.mark.parametrize(
    ("direct", "proxied", "found"),
    [
        ({"a": PASS, "b": SKIP}, {"b": SKIP, "a": PASS}, []),
        ({"a": PASS}, {"a": SKIP}, ["a: passed directly, skipped through the proxy"]),
        ({"a": PASS}, {}, ["a: passed directly, missing through the proxy"]),
        ({}, {"a": PASS}, ["a: missing directly, passed through the proxy"]),
        ({"a": Outcome("failed", "assert")}, {"a": Outcome("failed", "assert")}, []),
        ({"a": Outcome("failed", "assert")}, {"a": Outcome("failed", "KeyError")},
         ["a: failed (assert) directly, failed (KeyError) through the proxy"]),
        ({"b": PASS, "a": PASS}, {"b": SKIP, "a": SKIP},
         ["a: passed directly, skipped through the proxy", "b: passed directly, skipped through the proxy"]),
    ],
)  # fmt: skip
def test_a_test_differs_when_its_outcome_does(
    direct: dict[str, Outcome], proxied: dict[str, Outcome], found: list[str]
) -> None:
    assert list(differences(direct, proxied).values()) == found


def test_what_differs_between_two_direct_runs_is_not_judged() -> None:
    first, second = {"a": PASS, "b": PASS, "c": PASS}, {"a": SKIP, "b": PASS}
    unjudged = differences(first, second)
    assert list(unjudged) == ["a", "c"]
    proxied = {"a": Outcome("failed", "assert"), "b": SKIP}
    assert list(differences(first, proxied, unjudged)) == ["b"]


def test_requests_are_compared_by_how_often_they_came() -> None:
    direct = Counter({"GET /v1/a 200": 2, "GET /v1/b 200": 1})
    proxied = Counter({"GET /v1/a 200": 2, "GET /v1/c 404": 1})
    assert unlike(direct, direct) == []
    assert unlike(direct, proxied) == [
        "GET /v1/b 200: 1 times directly, 0 times through the proxy",
        "GET /v1/c 404: 0 times directly, 1 times through the proxy",
    ]


def test_the_looks_of_a_daemon_are_no_requests_of_the_suite() -> None:
    direct = Counter({"GET /v1/models 200": 15, "GET /v1/models?a=1 200": 2})
    looks = Counter({"GET /v1/models 200": 5, "GET /is_paused 404 E2001": 5, "GET /weight_info 404 E2001": 5})
    assert asked(direct) == direct
    assert asked(direct + looks) == direct
