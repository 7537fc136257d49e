"""`make families`: rows of a small model of every family that verl loads, computed in both ways, written into a page.

It takes some minutes, so its name keeps it out of the tests: `test_families` repeats a part.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import pytest

from ajet_trainer.backends.verl.families import PACKED, REFUSED
from ajet_trainer.backends.verl.steady import look
from tests.kit.families import RIGHT, families, save, within, wrong_by
from tests.kit.learner import training_worker
from tests.kit.source import ROOT

PAGE = ROOT / "docs" / "reference" / "models.md"
HEAD = f"""# Model families

Which families of models are trained, and how. `make families` makes a small model of each family that verl loads, with
random weights, on a CPU. It computes rows of different lengths in one micro-batch, and each row alone. Numbers are the
largest difference of a token's logprob. A family is right if they are below {RIGHT:g}.

- *Packed*: rows stand in one long row. It is the quickest way, and right for most models.
- *Padded*: rows stand side by side. That is right where a model carries something from token to token, or takes a place
  in the long row for a place in its own. What is not named here is padded too.
- *Refused*: told by name before anything is loaded.

Every run looks again before it trains, with its own model, engine and settings ([how](../guide/learning.md#models)).
In this table it found each way that is not right.

No GPU was used. With other attention than here (`flash_attention_2`), a run's own look is what tells.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one family: differences, and what a run's own look said, each packed and padded."""

    attention: str
    wrong: Mapping[bool, float]
    said: Mapping[bool, str]


class Failed(Exception):
    """The model cannot be made small, or verl does not load it."""

    def __init__(self, built: bool, error: Exception) -> None:
        super().__init__(shorten(str(error) or type(error).__name__, 110, placeholder=" …"))
        self.built = built


def look_at(family: str, folder: Path) -> Found:
    """Makes a small model of `family` and computes rows. Raises `Failed`."""
    kind, made = families()[family]
    attention, built = "sdpa" if getattr(made, "_supports_sdpa", False) else "eager", False
    try:
        with within(120):
            save(folder, kind, made, attention)
            built = True
            worker = training_worker(folder, attention, tokenizer=False)
            wrong = {packed: wrong_by(worker, packed=packed) for packed in (True, False)}
            return Found(attention, wrong, {packed: look(worker, packed=packed).said for packed in (True, False)})
    except Exception as error:  # whatever a model's code may raise
        raise Failed(built, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(7200)
def test_every_family(tmp_path: Path) -> None:
    found: dict[str, Found | Failed] = {}
    for family in families():
        try:
            found[family] = look_at(family, tmp_path / family)
        except Failed as failed:
            found[family] = failed
    PAGE.write_text(page(found, REFUSED))
    right = {name for name, one in found.items() if isinstance(one, Found) and one.wrong[True] < RIGHT}
    assert right - {*REFUSED} == PACKED
    for family, one in found.items():
        if isinstance(one, Found):
            check(family, one)


def check(family: str, found: Found) -> None:
    """A family is right as it is computed, or refused; and a run's own look finds what is not right."""
    packed = family in PACKED
    assert family in REFUSED or (found.wrong[packed] < RIGHT and found.said[packed] == "")
    for way, wrong in found.wrong.items():
        assert wrong < RIGHT or found.said[way], f"{family} is wrong and nobody sees it"


def page(found: Mapping[str, Found | Failed], refused: Mapping[str, str]) -> str:
    """The page that says all this."""
    tried = {name: one for name, one in found.items() if isinstance(one, Found)}
    lines = [HEAD, "| family | rows are | packed | padded |", "|---|---|---|---|"]
    for name, one in tried.items():
        way = "packed" if one.wrong[True] < RIGHT else "padded"
        said = f"refused: it {refused[name]}" if name in refused else way
        eager = ", with `eager` attention" if one.attention == "eager" else ""
        lines.append(f"| `{name}` | {said}{eager} | {one.wrong[True]:.0e} | {one.wrong[False]:.0e} |")
    lines += ["", "## Not trained by verl\n", "verl 0.9.1 fails when it loads these, or computes text with them.\n"]
    lines += ["| why | families |", "|---|---|"]
    for built in (True, False):
        if not built:
            lines += ["", "## Not tried\n", "| why no small model could be made | families |", "|---|---|"]
        whys: dict[str, list[str]] = {}
        for name, one in found.items():
            if isinstance(one, Failed) and one.built is built:
                why = str(one).replace(one_word(str(one)), "…") if "object has no attribute" in str(one) else str(one)
                whys.setdefault(why.replace("|", "/"), []).append(name)
        lines += [f"| {why} | {', '.join(f'`{name}`' for name in names)} |" for why, names in whys.items()]
    return "\n".join(lines) + "\n"


def one_word(said: str) -> str:
    """The class that an error is about, so that errors of a kind are one line."""
    return said.split(" ")[0]
