"""Which tests came out differently, from pytest's own reports of the same suite run directly and through the proxy.

A test's outcome is its verdict and, where it failed, the kind of exception: a test that fails directly with one and
through the proxy with another saw another engine. The suite runs directly twice, and a test whose two outcomes are not
the same says nothing about a proxy: it is listed as flaky and not judged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PASSED, SKIPPED, FAILED, ERROR, MISSING = "passed", "skipped", "failed", "error", "missing"
_VERDICTS = {"skipped": SKIPPED, "failure": FAILED, "error": ERROR}
_WORST_FIRST = (ERROR, FAILED, SKIPPED, PASSED)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*")
LOOK = ("/is_paused", "/weight_info", "/v1/models")


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind` is the name of the exception of a test that failed."""

    verdict: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} ({self.kind})" if self.kind else self.verdict


Outcomes = Mapping[str, Outcome]


def read(report: Path) -> dict[str, Outcome]:
    """The outcome of each test in a JUnit report; of a test that is in it twice (its teardown failed), the worse."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        outcome = _outcome(case)
        before = found.get(test, outcome)
        found[test] = min(before, outcome, key=lambda one: _WORST_FIRST.index(one.verdict))
    return found


def _outcome(case: ElementTree.Element) -> Outcome:
    for child in case:
        verdict = _VERDICTS.get(child.tag)
        if verdict in (FAILED, ERROR):
            kind = _EXCEPTION.match(child.get("message") or "")
            return Outcome(verdict, kind[0] if kind else "?")
        if verdict is not None:
            return Outcome(verdict)
    return Outcome(PASSED)


def differences(direct: Outcomes, proxied: Outcomes, unjudged: Collection[str] = ()) -> dict[str, str]:
    """The tests, less the `unjudged`, that came out in `proxied` otherwise than in `direct`, and what each was."""
    absent = Outcome(MISSING)
    pairs = {test: (direct.get(test, absent), proxied.get(test, absent)) for test in sorted({*direct, *proxied})}
    return {
        test: f"{test}: {expected} directly, {seen} through the proxy"
        for test, (expected, seen) in pairs.items() if expected != seen and test not in unjudged
    }  # fmt: skip


def counts(outcomes: Outcomes) -> Counter[str]:
    """The number of tests that had each verdict."""
    return Counter(outcome.verdict for outcome in outcomes.values())


def asked(received: Counter[str]) -> Counter[str]:
    """The requests that were `received`, without the looks of a daemon at its engine: three requests each, every few
    seconds."""
    of = {path: next((name for name in received if name.startswith(f"GET {path} ")), "") for path in LOOK}
    looks = received[of["/is_paused"]]
    return received - Counter(dict.fromkeys(filter(None, of.values()), looks))


def unlike(direct: Counter[str], proxied: Counter[str]) -> list[str]:
    """The requests that an engine received more often in one run than in the other, one line each."""
    return [
        f"{name}: {direct[name]} times directly, {proxied[name]} times through the proxy"
        for name in sorted({*direct, *proxied}) if direct[name] != proxied[name]
    ]  # fmt: skip
