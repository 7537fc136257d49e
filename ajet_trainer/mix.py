"""The shares of the lanes in what is trained: ``[mix]`` in the trainer's file, constant or by step.

One table holds for the whole run. A list says from which step on each of its tables holds::

    mix = [{step = 0, math = 1}, {step = 50, math = 0.4, code = 0.6}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import check_shares
from ajet_sdk.settings import ConfigError

STEP = "step"


@dataclass(frozen=True, slots=True)
class Mixture:
    """From `step` finished steps on, each lane has its share of the groups."""

    step: int
    shares: Mapping[str, float]


def read_mix(given: Any, label: str) -> tuple[Mixture, ...]:
    """Read what ``mix`` says in a file, which errors call `label`. Raises `ConfigError`."""
    tables = [given] if isinstance(given, Mapping) else given
    if not isinstance(tables, Sequence) or not tables or not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(f"{label}mix must be a table of lanes, or a list of such tables, each with its step")
    found = [_mixture(table, label, several=tables is given) for table in tables]
    steps = [one.step for one in found]
    if steps[0] != 0 or steps != sorted(set(steps)):
        raise ConfigError(f"{label}mix must begin with step = 0, and go on with later and later ones, not {steps}")
    return tuple(found)


def _mixture(table: Mapping[str, Any], label: str, *, several: bool) -> Mixture:
    step = table.get(STEP, 0) if several else 0
    if several and (STEP not in table or type(step) is not int or step < 0):
        raise ConfigError(f"{label}mix: each table of a list needs its step, an integer of at least 0")
    if not several and STEP in table:
        raise ConfigError(f"{label}mix: step is of a list of tables: mix = [{{step = 0, LANE = SHARE}}, …]")
    shares = {lane: share for lane, share in table.items() if lane != STEP}
    for lane, share in shares.items():
        if type(share) not in (int, float):
            raise ConfigError(f"{label}mix: the share of {lane!r} must be a number, not {share!r}")
    try:
        check_shares(shares)
    except BadRequest as error:
        raise ConfigError(f"{label}mix: {error.message}") from None
    return Mixture(step, {lane: float(share) for lane, share in shares.items()})


def shares_at(mix: Sequence[Mixture], step: int) -> Mapping[str, float] | None:
    """The shares that hold after `step` finished steps; None if the run leaves them to others."""
    return next((one.shares for one in reversed(mix) if one.step <= step), None)
