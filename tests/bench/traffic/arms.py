"""The arms: who talks, who judges, what is trained and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from integrations.tutorials.traffic.users import HIGHEST, LOWEST, talk
from tests.bench.traffic import words
from tests.kit.source import ROOT
from tests.kit.tiny_model import build
from tests.kit.trainer_process import RATE

HERE = Path(__file__).parent
MODEL = ROOT / ".ajet/models/smollm2-135m-instruct"
JUDGE = ROOT / "integrations/tutorials/traffic/judge.py"
ESTIMATOR = "algorithm.adv_estimator"
BY_CALL = {"turn_gamma": 0.0}
"""An answer counts for what was said of it alone."""

Talk = Callable[[Random, Callable[[str], str]], float]
"""One chat: how well the app did, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`judge` is as in ``ajet judge --with``. `ours` and `theirs` are keys of the trainer and of verl. `model` makes
    the model of a seed in a folder."""

    judge: str
    talk: Talk
    max_tokens: int
    model: Callable[[Path, int], Path]
    ours: Mapping[str, Any] = field(default_factory=lambda: BY_CALL)
    theirs: Mapping[str, Any]


def _game(rate: float, judge: str = f"{JUDGE}:score") -> Arm:
    return Arm(
        judge=judge, talk=lambda chance, say: talk(chance.randint(LOWEST, HIGHEST), say), max_tokens=6,
        model=lambda folder, seed: MODEL, theirs={RATE: rate, ESTIMATOR: "ajet_running"},
    )  # fmt: skip


def _words(estimator: str, rate: float = 5e-3, **ours: Any) -> Arm:
    return Arm(
        judge=f"{HERE / 'words.py'}:score", talk=lambda chance, say: words.talk(say), max_tokens=1,
        model=lambda folder, seed: build(folder / "tiny", seed=seed), ours=ours,
        theirs={RATE: rate, ESTIMATOR: estimator},
    )  # fmt: skip


GAME = {
    "learning": _game(2e-5), "control": _game(0.0), "shuffled": _game(2e-5, f"{HERE / 'shuffled.py'}:score")
}
ESTIMATORS = {
    "ajet_running": _words("ajet_running", **BY_CALL),
    "reinforce_plus_plus": _words("reinforce_plus_plus"),
    "bare": _words(f"{HERE / 'bare.py'}:bare"),
    "control": _words("ajet_running", 0.0, **BY_CALL),
}
