"""Which engines do not tell what they sampled. Each has an alert, from the first call that is lost because of it until
a whole call shows that it does tell.

An engine that has told is trusted for `TRUST` calls more, since single calls may be beyond any engine (a response of
several generations has no ids). So such calls do not make the alert come and go. If the engine is replaced by one that
tells nothing, the alert comes that many calls later.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from ajet_sdk.untrainable import UNTRAINABLE

TRUST = 10


class EngineAlerts:
    """Puts its alerts into `alerts`, by their subject. `trusted` are the routes of engines whose latest call was whole,
    so that another whole one says nothing new."""

    def __init__(self, alerts: MutableMapping[str, str]) -> None:
        self.trusted: set[str] = set()
        self._alerts = alerts
        self._failures: dict[str, int] = {}
        """The number of calls in a row that an engine's route has not told, from `TRUST` below 0 where it once has."""

    def whole(self, engine: str) -> None:
        """A call that `engine` answered is whole. `engine` is the address of its route."""
        self.trusted.add(engine)
        self._failures[engine] = -TRUST
        self._alerts.pop(_about(engine), None)

    def lost(self, engine: str, reason: str) -> None:
        """A call that `engine` answered is lost for `reason`, one of `UNTRAINABLE`."""
        self.trusted.discard(engine)
        self._failures[engine] = self._failures.get(engine, 0) + 1
        if self._failures[engine] > 0:
            self._alerts[_about(engine)] = (
                f"{engine} {UNTRAINABLE[reason].fault} ({reason}), so nothing that it samples can be trained: "
                f"{UNTRAINABLE[reason].remedy}"
            )

    def keep(self, engines: Iterable[str]) -> None:
        """From now on there are only `engines`, named by their base URLs."""
        bases = tuple(f"{engine}/" for engine in engines)
        for engine in [engine for engine in self._failures if not engine.startswith(bases)]:
            self.trusted.discard(engine)
            del self._failures[engine]
            self._alerts.pop(_about(engine), None)


def _about(engine: str) -> str:
    return f"what {engine} tells"
