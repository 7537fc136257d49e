"""The routes of who plays: what is wanted, plays of data sets, and clients."""

from __future__ import annotations

from functools import partial
from typing import Any

from ajet_proxy.core.control.asked import Answer, Asked, Body
from ajet_proxy.core.ledger import views
from ajet_sdk.errors import Forbidden
from ajet_sdk.limits import MAX_PLAY


def wanted(asked: Asked) -> Answer:
    asked.whole_tenant("it does not say what is wanted")

    def show() -> Body:
        missing = asked.state.plays.wanted()
        nexts = {model: asked.state.plays.evaluations[model].due for model in missing}
        return {"eval": missing, "next": nexts} | views.wanted(asked.state)

    return Answer(show)


# -- plays


def play(asked: Asked) -> Answer:
    name, tenant = asked.body.name, _players(asked)
    events = asked.commands.play(asked.body, tenant=tenant, at=asked.at)
    return Answer(lambda: asked.state.plays.play(tenant, name).to_json(), events)


def get_play(asked: Asked) -> Answer:
    known, after = asked.state.plays.play(_players(asked), asked.id), asked.number("after", -1, -1, MAX_PLAY)
    return Answer(lambda: known.to_json(after))


def end_play(asked: Asked) -> Answer:
    known = asked.state.plays.play(_players(asked), asked.id)
    return Answer(known.to_json, asked.commands.end_play(known.name, tenant=known.tenant, at=asked.at))


def _players(asked: Asked) -> str:
    """The tenant whose plays these are."""
    return asked.whole_tenant("it has no plays")


# -- clients


def join(asked: Asked) -> Answer:
    tenant, name = asked.whole_tenant("no client joins with it"), asked.name("client")
    events = asked.commands.clients.join(asked.body, client=name, tenant=tenant, at=asked.at)
    return Answer(lambda: _client(asked, name), events)


def clients(asked: Asked) -> Answer:
    own = asked.whole_tenant("it sees no clients")
    tenant = None if asked.claims.scope == "admin" else own
    at = asked.state.time(asked.at)
    return Answer(lambda: {"now": at, "clients": asked.commands.clients.shown(tenant, at)})


def beat(asked: Asked) -> Answer:
    client = asked.commands.clients.live(_own_client(asked))
    note = partial(asked.presence.client_beats, client, asked.state.time(asked.at))
    return Answer(partial(_client, asked, asked.id), note=note)


def leave(asked: Asked) -> Answer:
    return Answer(partial(_client, asked, asked.id), asked.commands.clients.leave(_own_client(asked), at=asked.at))


def _own_client(asked: Asked) -> str:
    """The client in the path, if it is known and the caller may reach it."""
    tenant, client = asked.whole_tenant("it is no client's"), asked.commands.clients.known(asked.id)
    if tenant != client.tenant and asked.claims.scope != "admin":
        raise Forbidden(f"client {client.id} is another tenant's", code="foreign_client")
    return client.id


def _client(asked: Asked, name: str) -> dict[str, Any]:
    client = asked.commands.clients.known(name)
    state = "joined" if client.reason is None else "gone"
    return {"client": client.id, "name": client.name, "ttl_s": client.ttl_s, "state": state}
