"""`make estimators`: a real step of every estimator with every loss and mean of verl, written into a page.

It takes longer than all other tests of the trainer, so its name keeps it out of them: `test_choices` repeats a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from ajet_trainer.backends.verl.refused import ESTIMATORS, LOSSES, MEANS, PAIRS
from tests.kit.source import ROOT
from tests.trainer.engine.whole_step import AT_REST, CHOOSES, EQUAL, LIMIT, SEES, Steps, verdict

PAGE = ROOT / "docs" / "reference" / "estimators.md"
Verdicts = Mapping[tuple[str, str, str], tuple[str, float]]
"""By estimator, loss and mean."""
HEAD = f"""# Estimators and losses

Which of verl's estimators, losses and means work here, and whether their gradient depends on how episodes came apart
into rows. `make estimators` runs a step of each on a small model and writes this page.

A step is compared with the same step after half of the episodes have split into one row a call, and the batch was
filled up with padding. *{EQUAL.capitalize()}* means that the gradient moves by less than {LIMIT:g} of its size. Some
losses have a term of their own for a row. They are *{AT_REST}*: in the first
update of a step, where all ratios are 1. Those that treat some tokens otherwise *choose* them *in a micro-batch*, at
least one in each. So their gradient depends on how rows are packed.

Advantages are computed before rows go to training processes. `tests/trainer/engine/test_two_processes.py` repeats each
loss and mean with two of them: all but those that choose are equal to one process.
"""
WITH_ALL = "With every loss and mean of the next table."


@pytest.mark.timeout(7200)
def test_every_choice_runs(tiny: Path, worker: Any) -> None:
    found = {}
    for estimator in sorted(set(ADV_ESTIMATOR_REGISTRY) - set(ESTIMATORS)):
        steps = Steps(tiny, worker, estimator)
        for loss in sorted(set(POLICY_LOSS_REGISTRY) - set(LOSSES)):
            for mean in MEANS if (estimator, loss) not in PAIRS else ():
                found[estimator, loss, mean] = verdict(steps, loss, mean)
    PAGE.write_text(page(found, ESTIMATORS, LOSSES, MEANS))


def page(found: Verdicts, estimators: Mapping[str, str], losses: Mapping[str, str], means: tuple[str, ...]) -> str:
    """The page that says all this; `estimators` and `losses` are the refused ones and why."""
    lines = [HEAD, "## Estimators\n", f"{WITH_ALL}\n", "| estimator | a step |", "|---|---|"]
    for name in sorted({name for name, _, _ in found} | set(estimators)):
        said = f"refused: {estimators[name]}" if name in estimators else _moves(found, name)
        lines.append(f"| `{name}` | {said} |")
    lines += ["", "## Losses and means\n", "With every estimator that works.\n"]
    lines += ["| loss | " + " | ".join(f"`{mean}`" for mean in means) + " |", "|---" * (len(means) + 1) + "|"]
    for name in sorted({name for _, name, _ in found}):
        lines.append(f"| `{name}` | " + " | ".join(cell(found, name, mean) for mean in means) + " |")
    lines += [f"| `{name}` | refused: {why} |" + " |" * (len(means) - 1) for name, why in sorted(losses.items())]
    moved = max(moved for word, moved in found.values() if word not in (SEES, CHOOSES))
    said = f"{len(found)} combinations were run. Where a gradient is called equal, it moved by at most {moved:.0e}."
    lines += ["", said]
    return "\n".join(lines) + "\n"


def cell(found: Verdicts, loss: str, mean: str) -> str:
    """The results of all estimators."""
    return "; ".join(sorted({word for (_, name, each), (word, _) in found.items() if (name, each) == (loss, mean)}))


def _moves(found: Verdicts, estimator: str) -> str:
    words = [word for (name, _, _), (word, _) in found.items() if name == estimator]
    pairs = "".join(f"; refused with `{loss}`: {why}" for (name, loss), why in PAIRS.items() if name == estimator)
    equal = f"equal with {words.count(EQUAL)} of {len(words)} pairs, and {AT_REST} with {words.count(AT_REST)}"
    return f"works; {equal}{pairs}"
