"""The rows of the last steps as they were trained, in files for reading: ``rows/N.npz`` of the run folder.

A file holds plain arrays and no pickle. They have the tokens of all rows one after the other, and of what only sampled
tokens have, these alone. ``head`` is JSON: what belongs to a row as a whole. A file appears whole or not at all. Those
of steps that a resumed run takes back are removed, as their lines of `metrics.jsonl` are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ajet_trainer.batch import Row

KEPT_STEPS = 20
"""Files of so many steps stay."""
ARRAYS = ("prompt", "response", "mask", "logprobs", "spans", "advantages", "versions")
"""Fields of a row that do not stand in ``head`` as they are."""
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """A row, and what its step knew of the tokens of its response. `mask` is 1 where a token was trained: sampled, and
    not rejected. `trainer` has the trainer's logprobs before the step. `weight`, if there is one, is what multiplies a
    token in the policy term: its importance weight, and what its row counts. Of tokens that were not sampled, nothing
    but the mask means anything."""

    row: Row
    mask: NDArray[np.int64]
    trainer: Floats
    advantage: Floats
    weight: Floats | None = None


def write(run_dir: Path, step: int, trained: Sequence[TrainedRow], model: str) -> None:
    """Keeps what was trained in `step`, and forgets what is too old. `model` is the folder that the run began with."""
    folder = run_dir / "rows"
    folder.mkdir(exist_ok=True)
    rows = [one.row for one in trained]

    def of_sampled(pick: Callable[[TrainedRow], Floats]) -> Floats:
        return np.concatenate([pick(one)[one.row.mask == 1] for one in trained]).astype(np.float32)

    arrays: dict[str, NDArray[Any]] = {
        "head": np.frombuffer(json.dumps({"model": model, "rows": [*map(_head, rows)]}).encode(), np.uint8),
        "ids": np.concatenate([part for row in rows for part in (row.prompt, row.response)]).astype(np.int32),
        "sampled": np.concatenate([row.mask for row in rows]).astype(np.uint8),
        "mask": np.concatenate([one.mask for one in trained]).astype(np.uint8),
        "engine": of_sampled(lambda one: one.row.logprobs),
        "trainer": of_sampled(lambda one: one.trainer),
        "advantage": of_sampled(lambda one: one.advantage),
    }
    weights = [one.weight for one in trained if one.weight is not None]
    if len(weights) == len(trained):
        arrays["weight"] = np.concatenate(
            [weight[row.mask == 1] for weight, row in zip(weights, rows, strict=True)]
        ).astype(np.float32)
    temporary = folder / f".{step}.new"
    try:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its own options are no arrays
        os.replace(temporary, folder / f"{step}.npz")
    finally:
        temporary.unlink(missing_ok=True)
    for old in steps(run_dir)[:-KEPT_STEPS]:
        (folder / f"{old}.npz").unlink()


def _head(row: Row) -> dict[str, Any]:
    whole = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in ARRAYS}
    return whole | {"sizes": [len(row.prompt), len(row.response)], "spans": row.spans}


def read(run_dir: Path, step: int) -> tuple[list[TrainedRow], str]:
    """Reads what was trained in `step`, row by row, and the model folder. `OSError` where no file of it is whole."""
    path = run_dir / "rows" / f"{step}.npz"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
    except (EOFError, ValueError, BadZipFile) as error:  # after a power cut
        raise OSError(f"{path} is not whole: {error}") from error
    out, known = [], json.loads(stored["head"].tobytes())
    token = response = sampled = 0
    for head in known["rows"]:
        size, length = head.pop("sizes")
        ids = stored["ids"][token : token + size + length].astype(np.int64)
        token += size + length
        mask = stored["sampled"][response : response + length].astype(np.int64)
        kept = stored["mask"][response : response + length].astype(np.int64)
        response += length
        values = {name: np.zeros(length, np.float32) for name in ("engine", "trainer", "advantage", "weight")}
        for name in values.keys() & stored.keys():
            values[name][mask == 1] = stored[name][sampled : sampled + int(mask.sum())]
        sampled += int(mask.sum())
        spans = tuple((call, start, end) for call, start, end in head.pop("spans"))
        row = Row(prompt=ids[:size], response=ids[size:], mask=mask, logprobs=values["engine"], spans=spans, **head)
        weight = values["weight"] if "weight" in stored else None
        out.append(TrainedRow(row, kept, values["trainer"], values["advantage"], weight))
    return out, known["model"]


def steps(run_dir: Path) -> list[int]:
    """The steps whose rows are kept, the oldest first."""
    names = (path.stem for path in (run_dir / "rows").glob("*.npz"))
    return sorted(int(name) for name in names if name.isdecimal())


def take_back(run_dir: Path, step: int) -> None:
    """Removes what is kept of steps after `step`, whose weights are gone, and what a kill left of a file."""
    for later in [number for number in steps(run_dir) if number > step]:
        (run_dir / "rows" / f"{later}.npz").unlink()
    for cut_short in (run_dir / "rows").glob(".*.new"):
        cut_short.unlink()


def listed(steps: Sequence[int]) -> str:
    """Steps in order, in few words: ``steps 1, 3 to 7``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"step {words[0]}" if len(steps) == 1 else f"steps {', '.join(words)}"
