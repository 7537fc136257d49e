"""A request to a control route, with all that it takes to answer it, and its answer.

The caller commits `Answer.events` and only then calls `Answer.body`, which is made at that moment and so shows the
state after the events. Waiting (leases, the gate) and encoding belong to `ajet_proxy.io.control`.

Invariant: a caller sees and changes only what its claims reach. A key of scope ``agent`` reaches one episode, or those
of its tenant; scope ``admin`` reaches all. Whether a scope reaches a route at all is checked before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.events import Events
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.supervisors import Supervisors
from ajet_proxy.core.ledger.weights import Weights
from ajet_sdk.bodies import check_length, parse
from ajet_sdk.errors import BadRequest, Forbidden
from ajet_sdk.limits import MAX_LABEL
from ajet_sdk.routes import Route

Body = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """``body`` makes the JSON object to answer with; call it after the events are committed. An iterator in it stands
    for a list whose items are written one by one, and a function for what it returns. ``status`` is 204 for a lease
    that found nothing. If ``events`` are a `Part`, they are committed, and the same is asked again. ``note`` notes what
    was heard and is no fact of the journal, once this is the answer; it may refuse what it cannot read."""

    body: Callable[[], Body]
    events: Events = ()
    status: int = 200
    note: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Asked:
    """``id`` is the one in the path, and ``body`` that of the route, None if it has none. ``trainer`` is the process of
    a trainer that asks, if it says so. ``issue`` makes the key of a tenant's episode; ``base`` is the caller's URL of
    this proxy. ``before`` has the events that were committed for this very request, in parts."""

    route: Route
    claims: Claims
    commands: Commands
    presence: Presence
    supervisors: Supervisors
    at: float
    new_id: Callable[[str], str]
    issue: Callable[[str, str], str]
    id: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    trainer: str = ""
    base: str = ""
    before: Events = ()

    @property
    def state(self) -> State:
        return self.commands.state

    def name(self, kind: str) -> str:
        """The id that the body gives, or a new one."""
        return self.new_id(kind) if self.body.id is None else str(self.body.id)

    def check_own(self, model: str) -> None:
        """Raises `Forbidden` if the key is for another model, of which this is no candidate."""
        _check_own(self.claims.model, self.state.weights.owner(model))

    def check_trainer(self, model: str | None) -> None:
        """Raises `Conflict` if another trainer of `model` has taken the place of the one that asks."""
        weights = self.state.weights
        self.commands.trainers.check(weights.owner(model or weights.only_model()), self.trainer)

    def asked_model(self) -> str:
        """The model in the query, or that of the key."""
        model = self.query.get("model", self.claims.model)
        self.check_own(model)
        check_length(model, "model", 0, MAX_LABEL)
        return model

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """The integer of that name in the query."""
        text = self.query.get(name, str(default))
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and least <= int(text) <= most):
            raise BadRequest(f"{name} must be an integer from {least} to {most}", param=name)
        return int(text)

    def whole_tenant(self, why: str) -> str:
        """The tenant of the key. Raises `Forbidden` for the key of one episode, and says `why`."""
        if (episode := self.claims.episode) is not None:
            raise Forbidden(f"this key is for episode {episode} alone: {why}", code="foreign_episode")
        return self.claims.tenant


def read(route: Route, body: Any, claims: Claims, weights: Weights) -> Any:
    """Decoded JSON as the body of `route`. If it should name a model and does not, it is for that of the key. Raises
    `Forbidden` if it is for another's, and no candidate of that of the key."""
    own = claims.model
    if own and route.of_model == "all":
        raise Forbidden(f"this key is for model {own!r} alone, and this concerns others too", code="foreign_model")
    if own and route.of_model == "one" and isinstance(body, Mapping | None):
        body = body or {}
        named = own if body.get("model") is None else body["model"]
        _check_own(own, body.get("candidate_of") or (weights.owner(named) if isinstance(named, str) else named))
        body = {**body, "model": named}
    return None if route.body is None else parse(route.body, body)


def _check_own(own: str, model: Any) -> None:
    if own not in ("", model):
        raise Forbidden(f"this key is for model {own!r} alone", code="foreign_model", param="model")
