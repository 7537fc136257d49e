"""Signs of life, and what else was heard since the proxy started that is no fact of the journal.

Idea: nobody needs a beat after a restart, which grants everybody its whole time again, and thousands of clients would
fill the journal with them. So beats are noted here, in memory, by whoever takes the request. Commands read them and
note nothing. Everything that follows of them is an event: that a client is gone, and that what it had open is
discarded. So it is with who judges what, and with keys that are void, which a file of the daemon's has.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from ajet_proxy.core.ledger.clients import Client
from ajet_proxy.core.ledger.weights import Trainer
from ajet_sdk.limits import MAX_TTL_S


class Presence:
    """When clients and the trainers of models were last heard, in Unix seconds. ``leads`` has the `max_lead` of the
    latest lease of each model, if that had one. ``judged`` has until when somebody judges an episode, and ``void`` the
    time until which the keys of a tenant were issued that are revoked."""

    def __init__(self) -> None:
        self._clients: dict[str, float] = {}
        self._trainers: dict[str, float] = {}
        self.leads: dict[str, int] = {}
        self.judged: dict[str, float] = {}
        self.void: Mapping[str, float] = {}

    def client_beats(self, client: Client, at: float) -> None:
        """`client`, which is live, gives a sign of life. Those that have been silent for longer than any client may be
        are forgotten."""
        self._clients.pop(client.id, None)
        self._clients[client.id] = at
        while at - self._clients[first := next(iter(self._clients))] > MAX_TTL_S:
            del self._clients[first]

    def trainer_beats(self, model: str, at: float) -> None:
        """The trainer of `model` says how it is."""
        self._trainers[model] = at

    def lead(self, model: str | None, most: int | None) -> None:
        """A lease of `model` asks for at most so many updates more than the slowest of its team has made."""
        if most is None:
            self.leads.pop(model or "", None)
        else:
            self.leads[model or ""] = most

    def judge(self, episodes: Iterable[str], until: float, awaiting: Container[str]) -> None:
        """Somebody judges `episodes` until then. What is not `awaiting` a judgement any more is forgotten."""
        self.judged = {name: end for name, end in self.judged.items() if name in awaiting}
        self.judged |= dict.fromkeys(episodes, until)

    def give_back(self, episodes: Iterable[str]) -> None:
        """Nobody judges `episodes` now."""
        for name in episodes:
            self.judged.pop(name, None)

    def client(self, client: Client) -> float:
        """When `client` last gave a sign of life."""
        return max(self._clients.get(client.id, 0.0), client.heard_at)

    def trainer(self, trainer: Trainer) -> float:
        """When `trainer` last gave a sign of life."""
        return max(trainer.heard_at, self._trainers.get(trainer.came.model, 0.0))
