"""Backends, which compute gradients: a folder for each backend, and one small protocol in front of them.

A backend brings a model with its optimizer, its checkpoints, and the export of one. All else of a run is outside:
leases, the gate, evaluations, figures, and the way of weights into engines that stand alone (`ajet_trainer.engines`).
Nothing outside of a backend's folder names it but `backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ajet_trainer.config import Config
from ajet_trainer.engines.attached import Attached
from ajet_trainer.learner import Learner
from ajet_trainer.progress import Progress


class Backend(Protocol):
    """All that a run, and the commands that read its folder, ask of a backend."""

    log: str
    """The file of the run folder that takes what its libraries print."""

    def open(
        self, config: Config, engines: Attached | None, progress: Progress, signals: Callable[[], None]
    ) -> AbstractContextManager[Learner]:
        """Loads the model, from its last checkpoint if there is one, and leaves nothing behind at the end. Launches
        engines of its own if there are no `engines`. `signals` puts our handlers back, which a library has replaced.
        Raises `ConfigError`."""
        ...

    def export(self, run_dir: Path, step: int | None, folder: Path, say: Callable[[str], None]) -> None:
        """Writes the model of the checkpoint of `step`, or of the latest, as a Hugging Face folder."""
        ...

    def set_aside(self, run_dir: Path, step: int, place: Path) -> list[int]:
        """Has the run go on from its checkpoint of `step`: later ones are in the folder `place` from now on. Returns
        their steps. Raises `ConfigError` if it has none of `step`."""
        ...

    def tokenizers(self, run_dir: Path) -> Sequence[Path]:
        """The folders of the run in which its tokenizer may be, the likeliest first."""
        ...


def backend() -> Backend:
    """The backend that trains here. Its libraries are imported when it is asked for something."""
    from ajet_trainer.backends.verl.backend import Verl

    return Verl()
