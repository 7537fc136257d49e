"""The commands of clients: they join, show that they are there, leave, and are taken for gone when they are silent.

Idea: a client's sign of life (a beat) is no event (`ajet_proxy.core.ledger.presence`). Everything that follows of its
silence is one: that a client is gone, and that what it had open is discarded.

Only beats count, and joining does. A client whose agents call the model and which does not beat is silent: what asks
may be a process that it left behind. A shut gate changes nothing, because beats do not wait at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.clients import Client
from ajet_proxy.core.ledger.parts import AT_ONCE, parted
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import State
from ajet_sdk.errors import BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.routes import Join

MAX_CLIENTS = 1000
"""A tenant has no more of them at a time."""


class Played(NamedTuple):
    """Who plays an episode that is opened, under which revision and in which lane; and what that discards."""

    client: str | None = None
    revision: str | None = None
    lane: str | None = None
    older: Iterable[ev.Event] = ()


class ClientCommands:
    """The decisions about clients, over `state`. They return events, as all commands do."""

    def __init__(self, state: State, presence: Presence) -> None:
        self.state, self.presence = state, presence

    def known(self, client: str) -> Client:
        """`client`, live or gone; `NotFound` if nothing is known of it."""
        known = self.state.clients.find(client)
        if known is None:
            raise NotFound(f"no client {client}: join again", code="unknown_client")
        return known

    def join(self, body: Join, *, client: str, tenant: str, at: float) -> ev.Events:
        """`client` is `body.id`, or a new one if that is None. One that has joined stays as it is."""
        at = self.state.time(at)
        if (known := self.state.clients.find(client)) is not None:
            if (known.tenant, known.name) != (tenant, body.name):
                raise BadRequest(f"client {client} is another one", param="id")
            _check_live(known)
            return ()
        live = [one for one in self.state.clients.live.values() if one.tenant == tenant]
        same = [one for one in live if one.name == body.name]
        if same and not body.replaces:
            raise Conflict(f"there is a client {body.name!r}, which this one is not to replace", code="client_exists")
        if len(live) - len(same) >= MAX_CLIENTS:
            raise Conflict(f"there are {MAX_CLIENTS} clients, as many as may be", code="too_many_clients")
        joined = ev.ClientJoined(
            at, client, body.name, body.ttl_s, tenant, body.revision, body.lane, body.replaces_older
        )
        older = self._older(tenant, body.lane, body.revision, at) if body.replaces_older else ()
        return parted(older, *self._gone(same, "replaced", at, AT_ONCE), joined)

    def live(self, client: str) -> Client:
        """`client`, which is there; `Conflict` if it is gone."""
        known = self.known(client)
        _check_live(known)
        return known

    def leave(self, client: str, *, at: float) -> ev.Events:
        known = self.known(client)
        if known.reason is not None:
            return ()
        return tuple(self._gone([known], "left", self.state.time(at), AT_ONCE))

    def plays(self, client: str, revision: str | None, *, tenant: str, at: float) -> Played:
        """`client` opens an episode, under `revision` or its own. Raises as `live` does, and `Forbidden` for another
        tenant's client. Only a `revision` that is told makes others older."""
        known = self.known(client)
        if known.tenant != tenant:
            raise Forbidden(f"client {client} is another tenant's", code="foreign_client")
        _check_live(known)
        changed = known.replaces_older and revision is not None and revision != known.latest
        older = self._older(tenant, known.lane, revision, at) if changed else ()
        return Played(client, revision or known.revision, known.lane, older)

    def expire(self, at: float, most: int) -> list[ev.Event]:
        """The clients that are silent for too long, and at most `most` open episodes of clients that are gone."""
        clients = self.state.clients
        silent = [one for one in clients.live.values() if at - self.presence.client(one) >= one.ttl_s]
        return [*self._gone(silent, "silent", at, 0), *_discards(chain(clients.gone.values(), silent), at, most)]

    def shown(self, tenant: str | None, at: float) -> list[dict[str, Any]]:
        """The clients of a `tenant` (None: of all) at the time `at`. Live ones come in the order in which they joined,
        then those that are gone, the latest first."""
        clients = self.state.clients
        return [
            one.to_json(at, self.presence.client(one))
            for one in (*clients.live.values(), *reversed(clients.gone.values()))
            if tenant in (None, one.tenant)
        ]

    def _gone(self, clients: Sequence[Client], reason: str, at: float, most: int) -> list[ev.Event]:
        """These `clients` are gone, and at most `most` of their open episodes with them."""
        gone = (ev.ClientGone(at, one.id, reason, self.presence.client(one)) for one in clients)
        return [*gone, *_discards(clients, at, most)]

    def _older(self, tenant: str, lane: str | None, revision: str | None, at: float) -> Iterable[ev.Event]:
        """List what waits to be trained in a lane and was played under another `revision`. What is open goes on, and
        what a trainer has, or has had, stays. So do evaluations, and what names no revision."""
        return () if revision is None else (
            ev.EpisodeDiscarded(at, one.id, "older_revision") for one in self.state.episodes.values()
            if one.state in ("sealed", "ready") and not one.opening.eval and one.opening.tenant == tenant
            and one.group_key.lane == lane and one.opening.revision not in (None, revision) and not one.shares.taken
        )


def _check_live(client: Client) -> None:
    if client.reason is not None:
        raise Conflict(f"client {client.id} is gone ({client.reason}): join again", code="client_gone")


def _discards(clients: Iterable[Client], at: float, most: int) -> Iterable[ev.Event]:
    episodes = (episode for client in clients for episode in client.open)
    return (ev.EpisodeDiscarded(at, episode, "client_gone") for episode in islice(episodes, max(most, 0)))
