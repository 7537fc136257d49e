"""Finds the checkpoint that a run resumes from: a whole one, whenever a crash came.

verl writes the actor, then `data.pt` (our trained batches), then the marker ``latest_checkpointed_iteration.txt``,
which it truncates before it fills it. So a crash can leave a folder without `data.pt`, a `data.pt` cut short, or an
empty marker. `repair_marker` keeps a marker that names a whole folder, and otherwise names the newest whole one. It
removes later folders, since their steps will be trained and saved again under the same names.

verl removes old checkpoints before the new one is whole, and knows none of an earlier process. So it keeps two at least
(`settings`), and `prune` does the rest once a checkpoint is whole.
"""

from __future__ import annotations

import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import GPUS
from ajet_trainer.run_folder import put

MARKER = "latest_checkpointed_iteration.txt"
DTYPE = "dtype"
"""The name in `data.pt` of the dtype of the model that the run began with. The weights are trained in another."""


def repair_marker(folder: Path) -> int | None:
    """The step that verl will resume from, or None for a start from scratch; `folder` holds ``global_step_N``."""
    steps, whole = _steps(folder)
    marked = None
    with suppress(OSError, ValueError):
        marked = int((folder / MARKER).read_text())
    newest = marked if marked in whole else (whole[-1] if whole else None)
    for step in steps:
        if newest is None or step > newest:
            shutil.rmtree(folder / f"global_step_{step}")
    if newest is None:
        (folder / MARKER).unlink(missing_ok=True)
    elif newest != marked:
        put(folder / MARKER, str(newest))
    return newest


def prune(folder: Path, keep: int) -> None:
    """Leaves the newest `keep` whole checkpoints in `folder`. What goes loses `data.pt` first, so that a crash leaves
    nothing that looks whole."""
    steps, whole = _steps(folder)
    for step in steps:
        if step not in whole[-keep:] and step < max(whole, default=0):
            (folder / f"global_step_{step}" / "data.pt").unlink(missing_ok=True)
            shutil.rmtree(folder / f"global_step_{step}")


def set_aside(folder: Path, step: int, place: Path) -> list[int]:
    """Has a run go on from the checkpoint of `step`: later ones are in the folder `place` from now on. Returns their
    steps. Raises `ConfigError` if it is not there. Killed in between, it can be done again."""
    steps, there = _steps(folder)
    if step not in there:
        said = f"there is no whole checkpoint of step {step} in {folder}"
        raise ConfigError(f"{said}; those that are: {', '.join(map(str, there)) or 'none'}", param="step")
    later = [one for one in steps if one > step]
    for one in reversed(later):
        place.mkdir(parents=True, exist_ok=True)
        (folder / f"global_step_{one}").replace(place / f"global_step_{one}")
    put(folder / MARKER, str(step))
    return later


def is_whole(checkpoint: Path) -> bool:
    """True when `data.pt`, which is written after everything else, is there to its last byte (torch saves a zip). After
    a power cut, or in a copy, parts before it may lack theirs: those that fsdp's processes have saved are looked at."""
    parts = (checkpoint / "data.pt", *checkpoint.glob("*/*_world_size_*.pt"))
    return (checkpoint / "actor").is_dir() and all(map(zipfile.is_zipfile, parts))


def must_fit(checkpoint: Path, processes: int) -> None:
    """Raises `ConfigError` if fsdp cannot resume with so many `processes`: each reads the part that it has saved."""
    parts = checkpoint.glob("actor/model_world_size_*_rank_0.pt")
    saved = {int(path.name.split("_")[3]) for path in parts}
    if saved and processes not in saved:
        said = f"{checkpoint} was saved by {max(saved)} processes, and a run with {processes} cannot go on from it"
        raise ConfigError(f"{said}: have {max(saved)} GPUs in all, or a new run_dir", param=GPUS)


def whole(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in `folder`, from the oldest on."""
    return _steps(folder)[1]


def _steps(folder: Path) -> tuple[list[int], list[int]]:
    """All steps that have something in `folder`, and those whose checkpoint is whole; both from the oldest on."""
    names = (path.name.removeprefix("global_step_") for path in folder.glob("global_step_*"))
    steps = sorted(int(name) for name in names if name.isdecimal())
    return steps, [step for step in steps if is_whole(folder / f"global_step_{step}")]
