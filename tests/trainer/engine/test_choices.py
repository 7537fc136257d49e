"""The page of estimators and losses says what verl has and what is refused; a part of its verdicts is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from ajet_trainer.backends.verl.refused import ESTIMATORS, LOSSES, MEANS
from tests.trainer.engine.every_choice import PAGE
from tests.trainer.engine.whole_step import CHOOSES, CHOOSING, SEES, Steps, verdict


def rows() -> dict[str, list[str]]:
    """The cells behind each name, of both tables: ``gpg`` is an estimator and a loss."""
    out: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            out.setdefault(name.strip("`"), []).extend(cells)
    return out


def test_the_page_has_every_name_and_the_reason_of_every_refusal() -> None:
    found = rows()
    assert set(found) - {"loss"} == {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}
    for name, why in (ESTIMATORS | LOSSES).items():
        assert f"refused: {why}" in found[name]
    assert f"| {' | '.join(f'`{mean}`' for mean in MEANS)} |" in PAGE.read_text()
    assert {name for name, cells in found.items() if any(cell.startswith("refused") for cell in cells)} == {
        *ESTIMATORS, *LOSSES,
    }  # fmt: skip


def test_the_page_says_which_losses_choose() -> None:
    assert {name for name, cells in rows().items() if CHOOSES in cells} == {*CHOOSING}
    assert all(set(rows()[name]) == {CHOOSES} for name in CHOOSING)


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        ("vanilla", "seq-mean-token-sum"), ("sapo", "token-mean"), ("geo_mean", "token-mean"),
        ("dro", "seq-mean-token-mean"),
    ],
)
def test_a_loss_is_what_the_page_says(loss: str, mean: str, tiny: Path, worker: Any) -> None:
    word, _ = verdict(Steps(tiny, worker), loss, mean)
    assert word != SEES
    assert rows()[loss][MEANS.index(mean)] == word
