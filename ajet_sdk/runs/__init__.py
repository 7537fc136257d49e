"""Runs that are started, changed and watched from afar: the form of their configuration, and the command for them."""

from __future__ import annotations

from ajet_sdk.runs.config import (
    LEARNING_RATE,
    LIVE,
    MAX_CONFIG,
    MIX,
    TABLES,
    changed,
    check_name,
    flat,
    line_digest,
    merged,
    restarts,
    tables,
)

__all__ = [
    "LEARNING_RATE", "LIVE", "MAX_CONFIG", "MIX", "TABLES", "changed", "check_name", "flat", "line_digest", "merged",
    "restarts", "tables",
]
