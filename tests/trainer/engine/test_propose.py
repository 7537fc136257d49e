"""The way of a candidate's weights: once to its engines, and never in the place of those that serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet_trainer.engines import EngineLost
from tests.kit.learner import verl_learner

TREE: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(optim=SimpleNamespace(lr=1.0))),
                            trainer=SimpleNamespace(logger=[]))  # fmt: skip


class Place:
    """Engines that note what they are given."""

    def __init__(self, folder: Path, candidate: Any = None, *, apart: bool = False) -> None:
        self.folder, self.candidate, self.apart, self.did = folder, candidate, apart, list[str]()

    def push(self, version: int, write: Callable[[Path], None]) -> bool:
        write(self.folder / str(version))
        self.did.append(f"push {version}: {(self.folder / str(version) / 'w').read_text()}")
        return False

    def check(self) -> bool:
        self.did.append("check")
        return False


@pytest.mark.parametrize("apart", [False, True], ids=["whole weights", "an adapter"])
def test_a_version_is_proposed_once_and_then_looked_after(
    tmp_path: Path, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_trainer.backends.verl.learner.Loggers", lambda *_: None)
    monkeypatch.setattr("ajet_trainer.backends.verl.learner.weights.wait", lambda *_: None)
    candidate = Place(tmp_path / "next", apart=apart)
    serving = Place(tmp_path / "served", candidate, apart=apart)

    def writes(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "w").write_text("weights")

    def update_weights(global_steps: int, mode: str) -> None:
        writes(serving.folder / str(global_steps))

    group = SimpleNamespace(write_adapter=lambda folder: writes(Path(folder)), update_weights=update_weights)
    learner = verl_learner(TREE, engines=serving, global_steps=4, actor_rollout_wg=group)
    learner.propose()
    learner.propose()
    assert candidate.did == ["push 4: weights", "check"] and serving.did == []
    assert not (serving.folder / "4").exists()
    learner.push()
    assert serving.did == ["push 4: weights"]


def test_weights_that_cannot_be_written_wait_like_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_trainer.backends.verl.learner.Loggers", lambda *_: None)
    candidate = Place(tmp_path, apart=True)

    def full(folder: str) -> None:
        raise OSError("no space left")

    learner = verl_learner(
        TREE, engines=Place(tmp_path, candidate, apart=True), global_steps=4,
        actor_rollout_wg=SimpleNamespace(write_adapter=full),
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(EngineLost, match="the candidate did not reach its engines: no space left"):
            learner.propose()
