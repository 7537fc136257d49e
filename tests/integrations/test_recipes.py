"""Every recipe runs, against the real proxy and the stub engine, and leaves the episodes that it says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

FOLDER = ROOT / "integrations"
RECIPES = sorted(path.name for path in FOLDER.iterdir() if path.name.startswith("with_"))
AJET = [sys.executable, "-c", "from ajet_sdk.cli import main; main()"]

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    folder = tmp_path_factory.mktemp("recipes")
    with stub_process() as engine, ProxyProcess(engine, folder / "data") as running:
        yield running


def run(proxy: ProxyProcess, *command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AJET_", "OPENAI_"))}
    done = subprocess.run(
        command, env=clean | {"AJET_PROXY_URL": proxy.url}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the openai package")
def test_with_openai(proxy: ProxyProcess) -> None:
    recipe = str(FOLDER / "with_openai.py")
    out = run(
        proxy, *AJET, "run", "--task", "sum", "--repeat", "2", "--parallel", "2", "--", sys.executable, recipe, "1", "2"
    )
    assert "2 episodes: 2 rewarded, mean reward 0" in out  # the stub cannot add
    with Rig(proxy.url) as rig:
        for episode in re.findall(r"^sum +\d +(\S+)", out, re.MULTILINE):
            record = rig.record(episode)
            assert (record["state"], record["task"], len(record["calls"])) == ("ready", "sum", 3)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("wanted", "reward"), [("4", 0.0), ("number", 1.0)])
def test_with_curl(proxy: ProxyProcess, wanted: str, reward: float) -> None:
    question = f'What is "2" + \\2? ({wanted})'
    assert run(proxy, "sh", str(FOLDER / "with_curl.sh"), question, wanted) == f"reward {reward:g}\n"
    with Rig(proxy.url) as rig:
        newest = rig.get("/episodes").json()["episodes"][0]
    assert newest["episode"].startswith("curl-")
    assert (newest["task"], newest["reward"], newest["state"]) == (question, reward, "ready")


def test_every_recipe_is_short_tested_and_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text()
    assert RECIPES
    for name in RECIPES:
        assert len((FOLDER / name).read_text().splitlines()) <= 60
        assert f"[{name}]({name})" in table
        assert f"test_{Path(name).stem}" in globals()
