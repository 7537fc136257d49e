"""A run of verl that computes trees has the figures of one that computes timelines, to five digits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.source import ROOT
from tests.kit.tiny_model import build

pytestmark = pytest.mark.slow
COUNTS = ("tokens", "operations")
"""The figures that a step over trees tells of an update besides: the size of its rows, and the part that was
computed."""


def test_a_run_over_trees_has_the_figures_of_one_over_timelines(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    argv = [sys.executable, "-m", "tests.kit.steps_of_trees", str(model), str(tmp_path)]
    subprocess.run(argv, cwd=ROOT, check=True)
    flat, trees = (json.loads((tmp_path / f"{rows}.json").read_text()) for rows in ("timeline", "tree"))
    assert len(flat) == len(trees) == 3
    for one, other in zip(flat, trees, strict=True):
        compare(one, other)
    assert flat[0] != flat[1], "something is trained"


def compare(one: dict[str, float], other: dict[str, Any]) -> None:
    for name in COUNTS:
        of_rows, computed = (other.pop(f"actor/{which}_{name}") for which in ("row", "computed"))
        assert 0 < computed < 0.4 * of_rows, "it is the engine over trees"
    assert set(one) == set(other)
    told = {name for name in one if not re.match("timing|global_seqlen|.*perf/|.*mfu", name)}
    assert {"actor/grad_norm", "actor/kl_loss", "actor/entropy"} <= told
    for name in sorted(told):
        assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name
