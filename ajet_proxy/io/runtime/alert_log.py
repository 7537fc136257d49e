"""Says in the log what went wrong while nobody watched: each alert once when it begins, and once when it is over."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Alarm:
    """Remembers which alerts are on."""

    def __init__(self) -> None:
        self._on: set[str] = set()

    def look(self, alerts: Mapping[str, str]) -> None:
        """`alerts` are all that are on now: what each is about, and its line."""
        for name in alerts.keys() - self._on:
            logger.warning("alert: %s", alerts[name])
        for name in self._on - alerts.keys():
            logger.info("alert over: %s", name)
        self._on = set(alerts)
