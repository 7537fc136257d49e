"""`ajet train`, with a real daemon and a real supervisor; trainers are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.runs import literal
from ajet_sdk.runs.commands import figures, lines
from tests.sdk.conftest import Ajet
from tests.trainer.runs.test_supervisor_kills import RATE, Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ajet: Ajet) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        made.daemon.start()
        monkeypatch.setenv("AJET_PROXY_URL", made.daemon.url)
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_run_from_its_start_to_its_end(site: Site, ajet: Ajet, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[trainer]\nmodel = "small"\n[verl]\n{RATE} = 1e-5\n')
    assert ajet("train", "status") == (0, "supervisors: none\n", "")
    site.start()
    site.until(lambda: site.ask("GET", "/runs")["supervisors"])
    code, out, err = ajet("train", "start", "r", "--config", str(tmp_path / "run.toml"))
    assert (code, err) == (0, "")
    assert out.startswith("r: wanted running, is ")
    site.until(lambda: site.run()["reason"] is None)
    code, out, _ = ajet("train", "set", "r", f"{RATE}=0.5", "groups=3")
    assert "its new configuration" in out
    site.until(lambda: site.history()[-1][2] == 0.5)
    code, out, err = ajet("train", "set", "r", "max_tokens=64")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "trainer.max_tokens cannot change while run r runs" in err
    assert ajet("train", "set", "r", "max_tokens=64", "--restart")[0] == 0
    site.until(lambda: site.run()["reason"] is None)
    shown = json.loads(ajet("train", "status", "r", "--json")[1])
    assert shown["config"] == {"trainer": {"groups": 3, "max_tokens": 64, "model": "small"}, "verl": {RATE: 0.5}}
    assert "wanted running, is running" in ajet("train", "status")[1]
    assert [one["run"] for one in json.loads(ajet("train", "status", "--json")[1])["runs"]] == ["r"]
    site.until(lambda: "training" in ajet("train", "log", "r")[1] or "step" in ajet("train", "log", "r")[1])
    site.until(lambda: f"config {shown['digest']}" in ajet("train", "metrics", "r")[1])
    assert json.loads(ajet("train", "metrics", "r", "--json")[1].splitlines()[0])["step"] == 1
    assert ajet("train", "set", "r", "mix.math=0.25", "mix.code=0.75")[0] == 0
    assert json.loads(ajet("train", "status", "r", "--json")[1])["config"]["mix"] == {"math": 0.25, "code": 0.75}
    assert "shares must add up to 1" in ajet("train", "set", "r", "mix.math=0.5")[2]
    assert ajet("train", "set", "r", "mix.math=", "mix.code=")[0] == 0
    assert "wanted stopped" in ajet("train", "stop", "r")[1]
    site.until(lambda: site.run()["reason"] is None)
    before = len(site.history())
    assert "wanted running" in ajet("train", "start", "r")[1]
    site.until(lambda: len(site.history()) > before)
    code, _, err = ajet("train", "set", "r", "model=/etc", "--restart")
    assert (code, err.count("\n")) == (1, 1)
    assert "trainer.model must be one of small" in err


@pytest.mark.parametrize(("text", "value"), [
    ("", ""), ("1", 1), ("1e-5", 1e-5), ("true", True), ("False", False), ("[1, 2]", [1, 2]), ("grpo", "grpo"),
    ("a b", "a b"), ("null", "null"), ("[" * 9999, "[" * 9999),
])  # fmt: skip
def test_words(text: str, value: Any) -> None:
    assert literal(text) == value


def test_following_goes_on_and_says_when_the_run_went_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_sdk.runs.commands.FOLLOW_S", 0.0)
    asked: list[Any] = []
    answers = iter([
        {"lines": [1, 2], "next": 2}, {"lines": [], "next": 2}, {"lines": [], "next": 1}, {"lines": [2], "next": 2},
    ])  # fmt: skip

    class Told:
        def __init__(self, value: Any) -> None:
            self.json = lambda: value

    class Stub:
        def ask(self, route: str, *, id: str, **query: Any) -> Told:
            asked.append(query)
            return Told(next(answers))

    found = lines(Stub(), "run_metrics", "r", True)  # type: ignore[arg-type]
    assert [next(found) for _ in range(3)] == [1, 2, 2]
    assert asked == [{}, {"after": 2}, {"after": 2}, {"after": 1}]
    assert capsys.readouterr().err == "the run went back to 1\n"


def test_a_step_in_a_line() -> None:
    line = {"step": 3, "reward_mean": 0.51234, "lr": 1e-5, "pg_loss": None, "config": "c0ffee"}
    assert figures(line) == "step 3 · reward_mean 0.5123 · lr 1e-05 · config c0ffee"
