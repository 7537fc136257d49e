"""Backends, which compute gradients: a folder for each backend, and one door in front of them.

A backend brings a model with its optimizer, its checkpoints, and the export of one. All else of a run is outside:
leases, the gate, evaluations, figures, and the way of weights into engines that stand alone (`ajet_trainer.engines`).
Nothing outside of a backend's folder names it but `backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_trainer.backends.verl.backend import Verl


def backend() -> Verl:
    """The backend that trains here. Its libraries are imported when it is asked for something."""
    from ajet_trainer.backends.verl.backend import Verl

    return Verl()
