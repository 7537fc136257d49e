"""The daemon's state as a fold over events: `State.apply`, and the rooms that it sends each event to. It decides
nothing and refuses nothing.

Idea: a room keeps one kind of thing. Each of its methods that takes an `event` hears of the events of that kind
(`_listeners`). ``KEPT`` are the fields that a snapshot has of it; the others follow from them. Rooms that know others
are made after them, and hear of an event after them, unless a room says otherwise.

Invariant: the state is a function of the sequence of events, so a replay of the journal is the live state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.batches import Batches
from ajet_proxy.core.ledger.calls import Calls
from ajet_proxy.core.ledger.clients import Clients
from ajet_proxy.core.ledger.episodes import Archive, Episodes
from ajet_proxy.core.ledger.gates import Gates
from ajet_proxy.core.ledger.life import Life
from ajet_proxy.core.ledger.mixes import Mixes
from ajet_proxy.core.ledger.plays import Plays
from ajet_proxy.core.ledger.queues import ReadyQueues
from ajet_proxy.core.ledger.runs import Runs
from ajet_proxy.core.ledger.seats import Seats
from ajet_proxy.core.ledger.tallies import Tallies
from ajet_proxy.core.ledger.weights import Weights

Listener = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Settings of the operator. Timeouts are in seconds; `group_size` is for leases that name no size."""

    idle_timeout: float = 1800.0
    wall_timeout: float = 86400.0
    merge_policy: str = "strict"
    group_size: int = 8
    member_wait: float = 4.0
    """An open episode is waited for so many times as long as the slowest other of its group took."""
    traffic_sample: float = 1.0
    traffic_holdout: float = 0.1
    """Shares of users' traffic: what is judged, and what of that is recorded and not trained."""
    traffic_idle: float = 900.0
    traffic_backlog: int = 10_000


class State:
    """Everything the daemon remembers. Read it freely; only `apply` changes it."""

    def __init__(self, settings: LedgerSettings, archive: Archive | None = None) -> None:
        self.settings = settings
        self.now = 0.0
        """The time of the latest event. It never runs backwards, except over a restart."""
        queues = ReadyQueues(settings.group_size)
        self.clients, self.runs, self.tallies = Clients(), Runs(), Tallies()
        self.episodes = episodes = Episodes(archive)
        self.weights = weights = Weights(episodes, queues)
        self.gates = gates = Gates(weights)
        self.mixes = mixes = Mixes(weights, episodes, queues, settings.group_size)
        self.plays = plays = Plays(weights)
        self.seats = seats = Seats(episodes, queues, weights, gates, mixes)
        life = Life(
            episodes, seats, weights=weights, mixes=mixes, plays=plays, tallies=self.tallies, clients=self.clients
        )
        self.batches = Batches(episodes, seats, life, weights, mixes)
        calls = Calls(episodes, life, weights, gates, mixes, self.tallies)
        listeners: dict[type[Any], list[Listener]] = {}
        for room in (*self.rooms().values(), life, calls):
            for kind, listener in _listeners(room):
                listeners.setdefault(kind, []).append(listener)
        self.listeners = listeners

    def rooms(self) -> dict[str, Any]:
        """Whatever keeps anything, by its name in a snapshot. Gates hear of a model before the weights know it."""
        return {
            "clients": self.clients, "runs": self.runs, "tallies": self.tallies, "gates": self.gates,
            "weights": self.weights, "mixes": self.mixes, "plays": self.plays, "queues": self.seats.queues,
            "seats": self.seats, "episodes": self.episodes, "batches": self.batches,
        }

    def time(self, at: float) -> float:
        """The time `at`, or that of the latest event if that is later."""
        return max(at, self.now)

    def apply(self, event: ev.Event) -> None:
        """Take `event` as having happened."""
        for listener in self.listeners[type(event)]:
            listener(event)
        self.now = event.at if isinstance(event, ev.ProxyStarted) else max(self.now, event.at)

    def derive(self) -> None:
        """Rebuild whatever follows from what a snapshot has."""
        self.episodes.derive()
        self.batches.derive()
        self.gates.running = Counter(
            entry.asked.model for episode in self.episodes.values() if episode.transcript.running
            for entry in episode.transcript.calls.values() if entry.state == "running"
        )
        self.seats.queues.derive()
        self.seats.progress.derive()
        self.mixes.recount()

    def leasable(self) -> object:
        """A value that stays equal as long as no lease can find anything new."""
        return (
            self.seats.changes, self.seats.flushes, self.episodes.changes, self.weights.policy_updates,
            self.mixes.orders,
        )

    def alerts(self) -> dict[str, str]:
        """List what an operator should look at, by subject."""
        served = self.weights.served
        missing = {model for model in self.seats.queues.models() if served and model not in served}
        waits = {
            f"trainer of {model!r}": f"episodes wait for a trainer of model {model!r}, and none has announced it"
            for model in sorted(missing)
        }
        return self.tallies.alerts() | waits | self.episodes.alerts() | self.plays.alerts(self.now)

    def arrived(self, episodes: Iterable[str], batches: Iterable[str]) -> None:
        """These episodes and batches are in the archive now."""
        for name in episodes:
            del self.episodes.leaving[name]
        for name in batches:
            del self.batches.leaving[name]


def _listeners(room: object) -> Iterator[tuple[type[Any], Listener]]:
    """The methods of a room that take an `event`, each behind the kind that it is annotated with."""
    for name, method in vars(type(room)).items():
        if (kind := getattr(method, "__annotations__", {}).get("event")) is not None:
            yield getattr(ev, kind.removeprefix("ev.")), getattr(room, name)
