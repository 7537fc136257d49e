"""The gates: each model has one, and requests wait at it while the weights change.

Idea: only a trainer moves a gate. It stays shut over a restart of the proxy, because the weights may be half written.
While one model is announced, its gate holds whatever model a request names. A gate that was shut before any model was
announced becomes that of the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode, models_played
from ajet_proxy.core.ledger.weights import Serving

GateState = Literal["open", "closing", "closed"]


@dataclass(frozen=True, slots=True)
class Gate:
    """``since`` is when it was last moved, in Unix seconds; ``reason`` is why the trainer closed it, in its own words.
    ``stood`` is for how many seconds it was shut in all until then."""

    shut: bool = False
    since: float = 0.0
    reason: str | None = None
    stood: float = 0.0

    def turned(self, shut: bool, at: float, reason: str | None = None) -> Gate:
        """The gate once it is shut, or open, from `at` on; the same if it is so already."""
        return self if shut == self.shut else Gate(shut, at, reason, self.stood_at(at))

    def stood_at(self, at: float) -> float:
        """For how long it has been shut in all until `at`, in seconds."""
        return self.stood + (max(0.0, at - self.since) if self.shut else 0.0)

    def moved(self, back: float) -> Gate:
        """The same gate by a clock that went `back` so many seconds (0 or below)."""
        return Gate(self.shut, self.since + back if self.since else 0.0, self.reason, self.stood)


class Gates:
    """The gate of each model by its name, and how many of its calls are in flight. The one called "" is that of any
    model, while none is announced."""

    KEPT = ("table", "stopped_s")

    def __init__(self, weights: Serving) -> None:
        self._weights = weights
        self.table: dict[str, Gate] = {}
        self.stopped_s = 0.0
        """For how long the proxy has not run."""
        self.running: Counter[str] = Counter()
        """The number of calls of each model that are in flight, if any are."""

    def of(self, model: str) -> Gate:
        """The gate that holds requests for `model`."""
        return self.table.get(model) or self.table.get(self._weights.key(model)) or Gate()

    def over(self, episode: Episode) -> Gate:
        """The gate that may hold requests of an episode: that of a model that it plays; any, if nobody can say which
        these are."""
        plays = models_played(episode)
        known = plays and plays <= self._weights.served.keys()
        return _first_shut(map(self.of, plays)) if known else self.any()

    def any(self) -> Gate:
        """A gate that is shut; if none is, the one that was moved last. Once models are announced, only theirs count:
        one of another name holds nothing of theirs."""
        return _first_shut(map(self.of, self._weights.served) if self._weights.served else self.table.values())

    def shut(self) -> set[str]:
        """The models whose gates are shut; "" stands for any."""
        return {model for model, gate in self.table.items() if gate.shut}

    def state(self, *models: str) -> GateState:
        """The state of the gates of announced `models`, as their requests find them. ``closing``: closed to newcomers
        while calls are still in flight; ``closed``: nothing is in flight."""
        shut = [model for model in models if self.of(model).shut]
        return "open" if not shut else "closing" if any(map(self.in_flight, shut)) else "closed"

    def overall(self) -> GateState:
        """The same of all gates together that count (see `any`)."""
        return self.state(*(self._weights.served or self.table))

    def stood(self, model: str, at: float) -> float:
        """For how many seconds nobody could play `model`, until `at`: its gate was shut, or the proxy did not run."""
        return self.stopped_s + self.of(model).stood_at(at)

    def in_flight(self, model: str) -> int:
        """Count the calls that the gate of `model` waits for, as far as the ledger knows: all, if it is the only
        one."""
        model = self._weights.key(model) or model
        return self.running[model] if self._weights.served.keys() - {model} else self.running.total()

    def opened_by(self, model: str) -> tuple[str, ...]:
        """The gates that open with that of `model`: also the one without a name, while no model is announced. Without a
        name, all of them."""
        if self._weights.served:
            return (model,)
        return (model, "") if model else tuple(self.table)

    def _closed(self, event: ev.GateClosed) -> None:
        known = self.table.get(event.model, Gate())
        self.table[event.model] = known.turned(True, event.at, event.reason)

    def _opened(self, event: ev.GateOpened) -> None:
        for model in self.opened_by(event.model):
            if (known := self.table.get(model)) is not None:
                self.table[model] = known.turned(False, event.at)

    def _announced(self, event: ev.PolicyAnnounced) -> None:
        """This listener comes before the weights know the model."""
        if event.model in self._weights.served:
            return
        before = Gate(stood=self.of(event.model).stood_at(event.at))
        own = [gate for name in ("", event.model) if (gate := self.table.pop(name, None)) is not None]
        self.table[event.model] = max(own, key=lambda gate: (gate.shut, gate.since), default=before)

    def _started(self, event: ev.ProxyStarted) -> None:
        self.stopped_s += event.away
        self.table = {name: gate.moved(event.back) for name, gate in self.table.items()}


def _first_shut(gates: Iterable[Gate]) -> Gate:
    """The first of `gates` that is shut; if none is, the one that was moved last."""
    known = [*gates] or [Gate()]
    return next((gate for gate in known if gate.shut), max(known, key=lambda gate: gate.since))
