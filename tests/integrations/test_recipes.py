"""Recipes that need nothing but this environment run here, and every recipe is short, tested and in the table."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.integrations import test_environments, test_frameworks, test_programs
from tests.integrations.stage import AJET, FOLDER, LOCKS, Stage
from tests.kit.engine_script import Rule
from tests.kit.proxy_process import PROXY
from tests.kit.rig import Rig

RECIPES = sorted(path.name for path in FOLDER.iterdir() if path.name.startswith("with_"))
NEEDS_PROXY = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")


@NEEDS_PROXY
@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the openai package")
def test_with_openai(theatre: Stage) -> None:
    recipe = str(FOLDER / "with_openai.py")
    theatre.script(())
    told = ("run", "--task", "sum", "--repeat", "2", "--parallel", "2")
    out = theatre.run(*AJET, *told, "--", sys.executable, recipe, "1", "2")
    assert "2 episodes: 2 rewarded, mean reward 0" in out  # the stub cannot add
    with Rig(theatre.proxy) as rig:
        for episode in re.findall(r"^sum +\d +(\S+)", out, re.MULTILINE):
            record = rig.record(episode)
            assert (record["state"], record["task"], len(record["calls"])) == ("ready", "sum", 3)


@NEEDS_PROXY
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("wanted", "reward"), [("4", 0.0), ("number", 1.0)])
def test_with_curl(theatre: Stage, wanted: str, reward: float) -> None:
    question = f'What is "2" + \\2? ({wanted})'
    theatre.script((Rule("What is", "It is a number."),))
    assert theatre.run("sh", str(FOLDER / "with_curl.sh"), question, wanted) == f"reward {reward:g}\n"
    with Rig(theatre.proxy) as rig:
        newest = rig.get("/episodes").json()["episodes"][0]
    assert newest["episode"].startswith("curl-")
    assert (newest["task"], newest["reward"], newest["state"]) == (question, reward, "ready")


def test_every_recipe_is_short_tested_and_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text()
    played = {*(item.recipe for item in test_frameworks.FRAMEWORKS), *test_programs.PROGRAMS, *test_frameworks.TEAMS}
    played |= {*test_environments.PACKAGES}
    assert RECIPES
    for name in RECIPES:
        most = 40 if name in test_environments.PACKAGES else 60
        assert len((FOLDER / name).read_text().splitlines()) <= most
        dated = rf"^\| \[{name}\]\({name}\) \|.*\| \d{{4}}-\d\d-\d\d \|$"
        assert re.search(dated, table, re.MULTILINE)
        tests = {*globals(), *vars(test_frameworks)}
        assert name in played or f"test_{Path(name).stem}" in tests or f"test_{Path(name).stem[5:]}" in tests


def test_the_table_names_the_versions_that_are_locked() -> None:
    locks = [LOCKS.parent / "daemon.lock", *LOCKS.glob("*.lock")]
    locked = {line.strip() for lock in locks for line in lock.read_text().splitlines()}
    from_npm = json.loads((LOCKS / "node" / "package.json").read_text())["dependencies"]
    locked |= {f"{package}=={version}" for package, version in from_npm.items()}
    named = re.findall(r"`([@a-z][\w@/-]*) (\d[\w.]*)`", (FOLDER / "README.md").read_text())
    assert len(named) >= len(test_frameworks.FRAMEWORKS) + len(from_npm)
    assert [f"{package}=={version}" for package, version in named if f"{package}=={version}" not in locked] == []
