"""verl's loggers get every step, and none of them can end a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.utils.tracking import Tracking

from ajet_trainer.backends.verl import loggers
from ajet_trainer.backends.verl.backend import environment
from ajet_trainer.backends.verl.loggers import Loggers, names
from tests.trainer.engine.test_settings import composed
from tests.trainer.scripted_learner import ScriptedLearner
from tests.trainer.test_step import Setting


class Odd(Tracking):  # type: ignore[misc]
    """Of the loggers `wandb` raises, and `swanlab` cannot be made. All others are verl's own `file`."""

    def __init__(self, project: str, experiment: str, name: str, config: Any) -> None:
        if name == "swanlab":
            raise ModuleNotFoundError("No module named 'swanlab'")
        self.name = name
        super().__init__(project, experiment, "file", config)

    def log(self, data: Any, step: int, backend: Any = None) -> None:
        if self.name == "wandb":
            raise OSError("no network\nat all")
        super().log(data, step, backend)


def test_a_logger_that_fails_costs_one_line_and_the_others_get_every_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr(loggers, "Tracking", Odd)
    said: list[str] = []
    made = Loggers(composed({"trainer.logger": ["wandb", "swanlab", "file"]}), said.append)
    for step in (1, 2, 3):
        made.log({"reward": step}, step)
    assert said == [
        "warning: the logger swanlab cannot be started, training continues: ModuleNotFoundError: "
        "No module named 'swanlab'",
        "warning: the logger wandb failed, training continues: OSError: no network",
    ]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_tensorboard_has_our_figures_beside_verls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tensorboard"
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    assert environment("cpu", tmp_path / "run")["TENSORBOARD_DIR"] == str(folder)
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
    assert environment("cpu", tmp_path / "other")["TENSORBOARD_DIR"] == str(folder), "what the user set counts"
    made = Loggers(composed({"trainer.logger": "tensorboard"}), pytest.fail)
    setting = Setting(tmp_path / "run", 3)
    monkeypatch.setattr(ScriptedLearner, "log", lambda _, figures, step: made.log(figures, step))
    setting.whole()
    made.finish()
    events = EventAccumulator(str(folder)).Reload()
    assert {"actor/pg_loss", "ajet/reward_mean", "ajet/reward_std", "ajet/episodes", "ajet/timing/train"} <= set(
        events.Tags()["scalars"]
    )
    points = {name: [(one.step, one.value) for one in events.Scalars(name)]
              for name in ("ajet/reward_mean", "ajet/episodes", "actor/pg_loss")}  # fmt: skip
    assert points == {
        "ajet/reward_mean": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "ajet/episodes": [(1, 4.0), (2, 4.0), (3, 4.0)],
        "actor/pg_loss": [(1, 0.5), (2, 0.5), (3, 0.5)],
    }


def test_wandb_has_our_figures_beside_verls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By verl's own adapter for it, over a module that keeps what it is given."""
    kept = ModuleType("wandb")
    kept.began, kept.logged = [], []  # type: ignore[attr-defined]
    kept.init = lambda **how: kept.began.append(how)  # type: ignore[attr-defined]
    kept.log = lambda data, step: kept.logged.append((step, data))  # type: ignore[attr-defined]
    kept.finish = lambda exit_code: kept.logged.append("end")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", kept)
    made = Loggers(composed({"trainer.logger": ["wandb"]}), pytest.fail)
    made.log({"actor/pg_loss": 0.5, "ajet/reward_mean": 0.25}, 7)
    made.finish()
    assert [how["project"] for how in kept.began] == ["ajet"]
    assert kept.logged == [(7, {"actor/pg_loss": 0.5, "ajet/reward_mean": 0.25}), "end"]


def test_a_logger_that_fails_at_its_end_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends:
        def __init__(self, *_: Any) -> None: ...

        def log(self, **_: Any) -> None: ...

        def finish(self) -> None:
            raise OSError("gone")

    monkeypatch.setattr(loggers, "Tracking", Ends)
    said: list[str] = []
    made = Loggers(composed({"trainer.logger": ["wandb"]}), said.append)
    made.finish()
    assert said == []
    made.log({}, 1)
    made.finish()
    assert said == ["warning: the logger wandb failed at its end, training continues: OSError: gone"]


def test_without_a_name_nothing_is_logged() -> None:
    assert names(composed({})) == names(composed({"trainer.logger": None})) == []
    assert names(composed({"trainer.logger": "console"})) == ["console"]
