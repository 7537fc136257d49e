"""Importing the SDK is quick, because it loads next to nothing; every public name is there all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ajet_sdk
from tests.kit.source import ROOT


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded after `code` in a fresh interpreter without site packages' own start-up files."""
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )
    return set(out.stdout.split())


def test_importing_it_loads_nothing_heavy() -> None:
    loaded = loaded_by("import ajet_sdk")
    assert {name for name in loaded if name.startswith("ajet")} == {"ajet_sdk"}
    assert not {"httpx", "click", "msgpack", "asyncio", "ssl"} & loaded


def test_not_even_the_functions_load_httpx_before_a_request() -> None:
    loaded = loaded_by("import ajet_sdk; ajet_sdk.reward, ajet_sdk.episode, ajet_sdk.join, ajet_sdk.Client('http://p')")
    assert not {"httpx", "click", "msgpack", "asyncio"} & loaded


def test_help_loads_click_and_little_else() -> None:
    loaded = loaded_by("import ajet_sdk.cli")
    assert "click" in loaded
    assert {name for name in loaded if name.startswith("ajet")} == {
        "ajet_sdk", "ajet_sdk.cli", "ajet_sdk.commands", "ajet_sdk.errors", "ajet_sdk.output",
    }
    assert "httpx" not in loaded


@pytest.mark.parametrize("name", ajet_sdk.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ajet_sdk, name) is not None
    assert name in dir(ajet_sdk)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rewrad'"):
        ajet_sdk.rewrad  # noqa: B018


def test_submodules_do_not_hide_functions() -> None:
    code = "import ajet_sdk.play.episode, ajet_sdk.play.rollouts, ajet_sdk.aio\nimport ajet_sdk as a\n"
    loaded_by(code + "assert all(map(callable, (a.episode, a.run, a.reward, a.abort, a.aio.run, a.aio.episode)))")


def test_the_version_is_the_distributions() -> None:
    project = Path(ROOT, "pyproject.toml").read_text().split("[project]")[1]
    assert f'\nversion = "{ajet_sdk.__version__}"\n' in project
