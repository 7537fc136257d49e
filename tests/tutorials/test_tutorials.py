"""Each tutorial of `docs/start` runs as a reader runs it, with a scripted engine, and ends in its table or curve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ajet_trainer.config import load
from tests.kit.hosts import lacking
from tests.kit.pages import broken_links
from tests.kit.proxy_process import PROXY
from tests.kit.source import ROOT
from tests.tutorials.pages import NAMES, page_of

pytestmark = [
    pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon"),
    pytest.mark.slow,
]
FOLDER = ROOT / "integrations" / "tutorials"
NEEDS_ENGINE = pytest.mark.skipif(
    not (ROOT / ".venv-engine/bin/python").exists(), reason="the curve needs .venv-engine: .ci/setup engine"
)


def played(name: str, clone: Path, *options: str) -> str:
    """The text that the reader's terminal shows."""
    argv = [sys.executable, "-m", "tests.tutorials", "--stub", str(clone), *options, name]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(shown: str, head: str) -> dict[str, list[str]]:
    """The lines under the one that begins with `head`, without their first word, by it."""
    lines = re.split(rf"^{head} .*\n", shown, flags=re.MULTILINE)[-1].splitlines()
    rows = [line.split() for line in lines[: next(place for place, line in enumerate(lines) if not line.strip())]]
    return {row[0]: row[1:] for row in rows}


@NEEDS_ENGINE
def test_math(tmp_path: Path) -> None:
    shown = played("math", tmp_path)
    assert "16 episodes: 16 rewarded, mean reward 0.75" in shown
    rewards = re.findall(r"^ +\d +8 +([\d.]+)$", shown, re.MULTILINE)
    assert len(rewards) == 2 and sum(map(float, rewards)) / 2 == pytest.approx(0.75)
    assert (tmp_path / "runs/tutorials/math/curve.png").read_bytes().startswith(b"\x89PNG")


def test_cocktail(tmp_path: Path) -> None:
    shown = played("cocktail", tmp_path)
    mix = re.findall(r"^(sum|word|fact) +(0\.\d+) +(\d+) +-?\d+ +0 +0$", shown, re.MULTILINE)
    assert sorted(mix) == [("fact", "0.25", "2"), ("sum", "0.5", "4"), ("word", "0.25", "2")]
    assert table(shown, "lane +episodes") == {
        "sum": ["16", "16", "0.250"], "word": ["8", "8", "0.500"], "fact": ["8", "8", "0.500"]
    }  # fmt: skip


def test_live(tmp_path: Path) -> None:
    shown = played("live", tmp_path)
    found = table(shown, "revision")
    assert len(found) == 2
    (_, trained_before, first), (_, trained_after, second) = found.values()
    assert int(trained_before) >= 16 and int(trained_after) > 0, "two steps under the old code, and then the new one"
    assert float(first) < 0.5 < float(second)
    steps = [json.loads(line) for line in (tmp_path / "runs/tutorials/live/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8], "the trainer went on"


def test_critic(tmp_path: Path) -> None:
    assert table(played("critic", tmp_path), "agent") == {
        "proposer": ["16", "16", "0.500"], "critic": ["16", "16", "0.500"]
    }  # fmt: skip


@NEEDS_ENGINE
def test_team(tmp_path: Path) -> None:
    """The receiver always names the sun, which is right every other time. Each model learns from every episode."""
    shown = played("team", tmp_path)
    assert re.search(r"^\d+ episodes: 64 rewarded,.* mean reward 0.5$", shown, re.MULTILINE)
    assert "opened 64 = open 0 + sealed 0 + ready 0 + leased 0 + trained 64 +" in shown
    shares = re.findall(r"^ +(sender|receiver) +1 +1 +[01] +trained, policy version ([12])$", shown, re.MULTILINE)
    assert len(shares) == 2 and {model for model, _ in shares} == {"sender", "receiver"}
    for model in ("sender", "receiver"):
        folder = tmp_path / "runs/tutorials/team" / model
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [(step["episodes"], step["policy_version"]) for step in steps] == [(32, 1), (32, 2)]


MENDED = {"repo/median": ["4", "0", "1.000"], "repo/spread": ["4", "0", "0.000"]}


def test_coding(tmp_path: Path) -> None:
    assert table(played("coding", tmp_path), "task") == MENDED


@NEEDS_ENGINE
def test_traffic(tmp_path: Path) -> None:
    """The best chat ends with the first guess. In the worst one the app says 10 and 15, and then it is lost."""
    shown = played("traffic", tmp_path)
    rewards = [float(reward) for reward in re.findall(r"^ +\d +16 +(-?[\d.]+)$", shown, re.MULTILINE)]
    assert len(rewards) == 2 and all(-1.5 <= reward <= 1 for reward in rewards)
    assert (tmp_path / "runs/tutorials/traffic/curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_laptop(tmp_path: Path) -> None:
    shown = played("laptop", tmp_path)
    assert "opened 16 = open 0 + sealed 0 + ready 0 + leased 0 + trained 16 +" in shown
    assert table(shown, "client")["laptop"][5] == "16"


def test_every_tutorial_has_a_page_that_leads_to_the_next() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"__pycache__"} == {*NAMES}
    index = page_of("tutorials").read_text()
    assert tuple(re.findall(r"^\| \[[^\]]+\]\((\w+)\.md\) \|", index, re.MULTILINE)) == NAMES
    for name, following in pairwise(NAMES):
        assert re.search(rf"^Next: \[[^\]]+\]\({following}\.md\)\.$", page_of(name).read_text(), re.MULTILINE)
    page = FOLDER / "README.md"
    assert [*broken_links(page, page.read_text())] == []


@pytest.mark.parametrize("name", ["math", "cocktail", "critic", "laptop", "team"])
def test_what_is_played_is_what_is_trained(name: str) -> None:
    """Or agents would wait for an engine that has ended with its trainer, or a trainer for agents."""
    page = page_of(name).read_text()
    epochs, repeat = (int(re.findall(rf"--{option} (\d+)", page)[0]) for option in ("epochs", "repeat"))
    source = FOLDER / ("math" if name == "laptop" else name)
    tasks = sum(len(file.read_text().splitlines()) for file in source.glob("*.jsonl"))
    trainers = list((FOLDER / name).glob("*.toml"))
    assert trainers
    for config in map(load, map(str, trainers)):
        assert (repeat, tasks * epochs) == (config.group_size, config.total_steps * config.groups)
