"""The routes of trainers: batches, the mix, weights and evaluations."""

from __future__ import annotations

from functools import partial
from typing import Any

from ajet_proxy.core.control.asked import Answer, Asked, Body
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import Events
from ajet_sdk.errors import NotFound

# -- batches


def lease(asked: Asked) -> Answer:
    asked.check_trainer(asked.body.model)
    batch = asked.new_id("batch")
    events = asked.commands.leases.lease(asked.body, batch=batch, at=asked.at)
    note = partial(asked.presence.lead, asked.body.model, asked.body.max_lead)
    if not any(isinstance(event, ev.BatchLeased) for event in events):
        return Answer(lambda: None, events, 204, note)
    return Answer(lambda: {"batch": batch}, events, note=note)


def ack(asked: Asked) -> Answer:
    return Answer(partial(_batch, asked), asked.commands.leases.ack(_own_batch(asked), asked.body, at=asked.at))


def nack(asked: Asked) -> Answer:
    return Answer(partial(_batch, asked), asked.commands.leases.nack(_own_batch(asked), at=asked.at))


def extend(asked: Asked) -> Answer:
    return Answer(partial(_batch, asked), asked.commands.leases.extend(_own_batch(asked), asked.body, at=asked.at))


def _own_batch(asked: Asked) -> str:
    """The batch in the path, if it exists and is of a model that the caller may train."""
    batch = asked.state.batches.known(asked.id)
    asked.check_own(batch.model)
    asked.check_trainer(batch.model)
    return batch.id


def _batch(asked: Asked) -> Body:
    batch = asked.state.batches.known(asked.id)
    return {"batch": batch.id, "state": batch.state, "lease_until": batch.lease_until}


def flush(asked: Asked) -> Answer:
    ended = len(asked.state.seats.progress.unended(asked.body.lane, asked.body.task))
    return Answer(lambda: {"tasks": ended}, asked.commands.leases.flush(asked.body, at=asked.at))


# -- the mix


def mix(asked: Asked) -> Answer:
    return _mix(asked, asked.asked_model())


def set_mix(asked: Asked) -> Answer:
    asked.check_trainer(asked.body.model)
    return _mix(asked, asked.body.model, asked.commands.leases.set_mix(asked.body, at=asked.at))


def drop_mix(asked: Asked) -> Answer:
    model = asked.asked_model()
    return _mix(asked, model, asked.commands.leases.drop_mix(model, at=asked.at))


def _mix(asked: Asked, model: str | None, events: Events = ()) -> Answer:
    return Answer(lambda: views.mix(asked.state, model), events)


# -- weights


def gate_close(asked: Asked) -> Answer:
    asked.check_trainer(asked.body.model)
    return Answer(partial(_gate, asked), asked.commands.trainers.gate_close(asked.body, at=asked.at))


def gate_open(asked: Asked) -> Answer:
    asked.check_trainer(asked.body.model)
    return Answer(partial(_gate, asked), asked.commands.trainers.gate_open(asked.body, at=asked.at))


def _gate(asked: Asked) -> Body:
    model, gates = asked.state.weights.meant(asked.body.model), asked.state.gates
    return {"gate": gates.state(model), "in_flight": gates.in_flight(model)}


def policy(asked: Asked) -> Answer:
    asked.check_trainer(asked.body.candidate_of or asked.body.model)
    model, events = asked.body.model, asked.commands.trainers.announce(asked.body, at=asked.at)

    def show() -> Body:
        version, upstreams = asked.state.weights.policy_version(model), asked.state.weights.upstreams(model)
        out = {"model": model, "policy_version": version, "upstreams": list(upstreams)}
        return out | (_run(asked, events) if asked.body.run else {})

    return Answer(show, events)


def trainers(asked: Asked) -> Answer:
    events = asked.commands.trainers.attend(asked.body, at=asked.at)
    note = partial(asked.presence.trainer_beats, asked.body.model, asked.state.time(asked.at))
    return Answer(lambda: {"model": asked.body.model} | _run(asked, events), events, note=note)


def _run(asked: Asked, events: Events) -> dict[str, Any]:
    """Which run has the model, and what of another one goes with `events`."""
    all_events = *asked.before, *events
    discarded = sum(isinstance(event, ev.EpisodeDiscarded) for event in all_events)
    void = sum(isinstance(event, ev.BatchReturned) for event in all_events)
    return {"run": asked.state.weights.born(asked.body.model).run or None, "discarded": discarded, "void": void}


# -- evaluations


def evaluate(asked: Asked) -> Answer:
    name, model = asked.name("eval"), asked.body.model
    asked.check_trainer(model)
    events = asked.commands.trainers.evaluate(asked.body, evaluation=name, at=asked.at)
    known = asked.state.plays.evaluation(name)
    version = asked.state.weights.policy_version(model) if known is None else known.policy_version
    return Answer(lambda: {"evaluation": name, "policy_version": version}, events)


def evaluation(asked: Asked) -> Answer:
    known = asked.state.plays.evaluation(asked.id)
    if known is None:
        raise NotFound(f"no evaluation {asked.id}, or there is a later one of its model", code="unknown_evaluation")
    asked.check_own(known.model)
    return Answer(known.to_json)
