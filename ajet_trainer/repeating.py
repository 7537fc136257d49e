"""A thread that does one thing every few seconds, whatever the rest of the process is at."""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)


class Repeating:
    """Does `turn` every so many seconds, from the start of the block to its end. A turn that fails is logged, and the
    next one is as good."""

    def __init__(self, name: str, every_s: float) -> None:
        self._name, self._every_s = name, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def turn(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.turn()
            except Exception:
                logger.warning("%s: a turn has failed", self._name, exc_info=True)
