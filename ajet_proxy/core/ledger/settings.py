"""The ledger's settings: with the events, all that its state is a function of."""

from __future__ import annotations

from dataclasses import dataclass

from ajet_proxy.core.trajectory.timeline import POLICIES


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """What the operator decides. Timeouts are in seconds; `group_size` counts where a lease names no size; when more
    than the share `drift_limit` of a model's turns drift, that is an alert (0: never)."""

    idle_timeout: float = 1800.0
    wall_timeout: float = 86400.0
    merge_policy: str = "strict"
    group_size: int = 8
    drift_limit: float = 0.05

    def __post_init__(self) -> None:
        if self.merge_policy not in POLICIES:
            raise ValueError(f"merge_policy must be one of {', '.join(POLICIES)}, not {self.merge_policy!r}")
        if not 0 <= self.drift_limit <= 1:
            raise ValueError("drift_limit must be a share between 0 and 1")
        if self.group_size < 1 or self.idle_timeout <= 0 or self.wall_timeout <= 0:
            raise ValueError("group_size and the timeouts must be positive")
