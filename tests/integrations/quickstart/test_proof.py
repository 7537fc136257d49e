from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from integrations.quickstart import proof, session
from integrations.quickstart.__main__ import quickstart
from integrations.quickstart.plan import Plan
from integrations.quickstart.programs import QuickstartError
from integrations.quickstart.screen import Screen

PLAN = Plan(steps=6)


def fake_summary(plan: Plan, gain: float) -> dict[str, Any]:
    return {
        "plan": asdict(plan),
        "reward": {"steps": [0.2] * 3 + [0.2 + gain] * 3, "first_third": 0.2, "last_third": 0.2 + gain, "gain": gain},
        "drift": {"mean": 0.001, "max": 0.02},
        "staleness": {"max": 0},
        "seconds": {"steps": 300.0, "of the steps": {}},
    }


class Runs:
    """Stands for `session.one_run`: gains by learning rate and seed, and a note of what was run."""

    def __init__(self, learning: list[float], control: list[float]) -> None:
        self.gains = {0.0: control, PLAN.lr: learning}
        self.done: list[tuple[int, float]] = []
        self.fail_at: int | None = None

    def __call__(self, plan: Plan, folder: Path, *, keep: bool, screen: Screen) -> dict[str, Any]:
        if len(self.done) == self.fail_at:
            raise QuickstartError("something fell over")
        self.done.append((plan.seed, plan.lr))
        summary = fake_summary(plan, self.gains[plan.lr][plan.seed])
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(summary))
        return summary


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs([0.6, 0.5, 0.7], [0.0, 0.05, -0.05])
    monkeypatch.setattr(session, "one_run", fake)
    monkeypatch.setattr(proof.plot, "compared", lambda *_: None)
    return fake


def prove(folder: Path) -> proof.Proof:
    return proof.prove(PLAN, (0, 1, 2), folder, keep=False, screen=Screen(tty=False))


def test_pairs_by_seed_interleaved_and_says_so(runs: Runs, tmp_path: Path) -> None:
    found = prove(tmp_path)
    assert runs.done == [(0, PLAN.lr), (0, 0.0), (1, 0.0), (1, PLAN.lr), (2, PLAN.lr), (2, 0.0)]
    assert found.holds
    assert found.difference.value == pytest.approx((0.6 + 0.45 + 0.75) / 3)
    text = (tmp_path / "proof.md").read_text()
    assert "Learning beats the control" in text
    assert "| 1 | 0.200 | 0.700 | +0.500 | 0.200 | 0.250 | +0.050 |" in text


def test_an_interrupted_proof_goes_on_where_it_was(runs: Runs, tmp_path: Path) -> None:
    runs.fail_at = 3
    with pytest.raises(QuickstartError):
        prove(tmp_path)
    runs.fail_at = None
    (tmp_path / "seed-1-learning").mkdir()
    (tmp_path / "seed-1-learning" / "half").touch()
    assert prove(tmp_path).holds
    assert len(runs.done) == len(set(runs.done)) == 6


def test_another_plan_is_run_again(runs: Runs, tmp_path: Path) -> None:
    prove(tmp_path)
    assert session.finished(Plan(steps=7), tmp_path / "seed-0-learning") is None
    assert session.finished(PLAN, tmp_path / "seed-0-learning") is not None


def test_no_proof_is_said_plainly_and_fails(runs: Runs, tmp_path: Path) -> None:
    runs.gains = {0.0: [0.1, 0.0, 0.3], PLAN.lr: [0.2, 0.1, 0.1]}
    done = CliRunner().invoke(quickstart, ["--proof", "--steps", "6", "--run-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "does NOT beat the control" in done.output


def test_a_beaten_control_is_success(runs: Runs, tmp_path: Path) -> None:
    done = CliRunner().invoke(quickstart, ["--proof", "--steps", "6", "--run-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("4,7", (4, 7)), ("1,1,2", (1, 2))])
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert proof.parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["one", "1", "5,5", ""])
def test_seeds_that_cannot_be(text: str) -> None:
    with pytest.raises(QuickstartError):
        proof.parse_seeds(text)
