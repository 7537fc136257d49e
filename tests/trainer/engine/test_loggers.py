"""verl's loggers get every step, and none of them can end a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.engine.test_settings import composed


class Log:
    """What the loggers `wandb` (raises), `swanlab` (cannot be made) and `file` (verl's own) do with three steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from verl.utils.tracking import Tracking

        from ajet_trainer.verl_backend import loggers

        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "log.jsonl"))

        class Odd(Tracking):  # type: ignore[misc]
            def __init__(self, project: str, experiment: str, name: str, config: Any) -> None:
                if name == "swanlab":
                    raise ModuleNotFoundError("No module named 'swanlab'")
                self.name = name
                super().__init__(project, experiment, "file", config)

            def log(self, data: Any, step: int, backend: Any = None) -> None:
                if self.name == "wandb":
                    raise OSError("no network\nat all")
                super().log(data, step, backend)

        monkeypatch.setattr(loggers, "Tracking", Odd)
        self.said: list[str] = []
        made = loggers.Loggers(composed({"trainer.logger": ["wandb", "swanlab", "file"]}), self.said.append)
        for step in (1, 2, 3):
            made.log({"reward": step}, step)


def test_a_logger_that_fails_costs_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verl_here: None) -> None:
    log = Log(monkeypatch, tmp_path)
    assert log.said == [
        "warning: the logger swanlab cannot be started, training continues: ModuleNotFoundError: "
        "No module named 'swanlab'",
        "warning: the logger wandb failed, training continues: OSError: no network",
    ]


def test_the_others_get_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verl_here: None) -> None:
    Log(monkeypatch, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_without_a_name_nothing_is_logged(verl_here: None) -> None:
    from ajet_trainer.verl_backend.loggers import names

    assert names(composed({})) == names(composed({"trainer.logger": None})) == []
    assert names(composed({"trainer.logger": "console"})) == ["console"]
