"""The whole comparison, on a suite of five lines: what differs through the proxy is found, what does not is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.__main__ import conformance, main
from tests.conformance.engines import Engine
from tests.conformance.suites import Suite, SuiteFailed
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

HEAD = """import itertools, os, pathlib, urllib.request
def headers():
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models") as answer:
        return answer.headers
def test_alike(): assert headers()["Content-Type"].startswith("application/json")
def test_fails_alike(): assert "x" in headers()
"""
DIFFERS = """
def test_differs(): assert "/e/" not in os.environ["OPENAI_BASE_URL"]
"""
FLAKY = """
def test_flaky():
    count = pathlib.Path("count")
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert len(count.read_text()) == 2
"""


@dataclass(frozen=True, slots=True)
class Small(Suite):
    """A suite whose environment is this one."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def tests(self) -> list[str]:
        return ["-c", os.devnull, "--rootdir", ".", "tests.py"]


def judged(folder: Path, source: str) -> bool:
    (folder / "tests.py").write_text(source)
    with stub_process() as url:
        return conformance(Small(folder, "small", "1", folder), Engine(url), ["-p", "no:cacheprovider"])


def test_failures_that_are_the_same_do_not_matter_and_flaky_ones_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert judged(tmp_path, HEAD + FLAKY)
    said = capfd.readouterr().out
    for name in ("proxied", "by-path", "continuity-off"):
        assert f"| {name} | 1 | 2 | 0 | 0 |" in said
    assert "flaky, not judged: tests::test_flaky" in said


def test_a_test_that_the_proxy_breaks_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not judged(tmp_path, HEAD + DIFFERS)
    said = capfd.readouterr().out
    assert "by-path: tests::test_differs: passed directly, failed (AssertionError) through the proxy" in said
    assert "proxied: " not in said


def test_a_suite_without_a_test_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(SuiteFailed, match="no test"):
        judged(tmp_path, "")


def test_usage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capfd.readouterr().err == f"conformance: {tmp_path} is no checkout of a suite: it has no pyproject.toml\n"
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "checkout" in done.stderr
