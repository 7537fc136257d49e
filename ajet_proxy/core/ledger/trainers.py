"""Who trains: the latest trainer of each model, as it came.

Signs of life are not kept here, since the state is a function of events and nobody journals a beat
(`ajet_proxy.core.ledger.trainer_commands`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Trainer:
    """The process `instance`, with its `folder` on `host`, for a `run`. ``heard_at`` is when it came, or when the proxy
    started again, in Unix seconds."""

    run: str
    instance: str
    host: str
    folder: str
    heard_at: float
    left: bool = False
    begun: bool = False
    """Whether its run has begun with it."""
