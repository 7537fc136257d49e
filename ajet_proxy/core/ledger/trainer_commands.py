"""The commands of trainers: who trains a model, with which weights, and which run begins.

Idea: a trainer says every few seconds that it is at work. While it is heard, no other one of its model is let in. One
that is silent is taken over, and whatever it says from then on is refused. So it never reaches the engines again. A
folder is no second trainer: a process in the same folder of the same run takes over at once, because the folder's lock
let it in. As with clients, a beat is no event.

Another run discards what waits for the one before, and voids its leases. What is open goes on: when it settles, its
calls tell whose it is (`ajet_proxy.core.ledger.births`).
"""

from __future__ import annotations

from itertools import chain

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.events import Events
from ajet_proxy.core.ledger.life import OTHER_RUN
from ajet_proxy.core.ledger.parts import Part, parted
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.weights import Trainer
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import Attend, Evaluate, GateClose, GateOpen, Policy

HEARD_S = 30.0
"""So long is a trainer heard after a beat, and after a start of the proxy."""


class TrainerCommands:
    """The decisions about trainers and weights, over `state`. They return events, as all commands do."""

    def __init__(self, state: State, presence: Presence) -> None:
        self.state, self.presence = state, presence

    def attend(self, body: Attend, *, at: float) -> Events:
        """A trainer says how it is. Raises `Conflict` if another one is at work, or has taken its place."""
        at = self.state.time(at)
        known = self.state.weights.trainers.get(body.model)
        came: Events = ()
        if known is None or (body.says == "comes" and known.came.instance != body.instance):
            self._let_in(body, at)
            came = (ev.TrainerCame(at, body.model, body.run, body.instance, body.host, body.folder),)
        else:
            self.check(body.model, body.instance)
        if body.says == "leaves":
            return () if known is None or known.left else (ev.TrainerLeft(at, body.model),)
        begins = body.says == "begins" and (known is None or not known.begun)
        if not begins:
            return came
        begun = self._begin(body.model, body.run, at)
        return Part((*came, *begun)) if isinstance(begun, Part) else (*came, *begun)

    def check(self, model: str, instance: str) -> None:
        """`Conflict` for an `instance` whose place another one has taken. Who names none is no trainer of ours."""
        known = self.state.weights.trainers.get(model)
        if instance and known is not None and known.came.instance != instance:
            raise Conflict(f"{_who(known)} has taken the place of this trainer", code="other_trainer")

    def announce(self, body: Policy, *, at: float) -> Events:
        """These weights serve, of that `run` if one is named; or they are a candidate's. Raises `Conflict` while the
        trainer of another run is heard."""
        if body.candidate_of is not None:
            return self._stands(body, body.candidate_of, self.state.time(at))
        at, begun, born = self.state.time(at), Events(), self.state.weights.born(body.model)
        if body.run is not None:
            trainer = self.state.weights.trainers.get(body.model)
            if trainer is not None and trainer.came.run != body.run and self._heard(trainer, at):
                raise Conflict(f"{_who(trainer)} is at work", code="other_trainer")
            begun = self._begin(body.model, body.run, at) if born.run != body.run else ()
        known = self.state.weights.served.get(body.model)
        same = known is not None and known.version == body.version and body.upstreams in (None, known.upstreams)
        if not begun and same and born.continues(body.version):
            return ()
        announced = ev.PolicyAnnounced(at, body.model, body.version, body.upstreams)
        return begun if isinstance(begun, Part) else (*begun, announced)

    def _stands(self, body: Policy, of: str, at: float) -> Events:
        """A candidate `of` an announced model has these weights, also where the version is one that it has had."""
        served, said = self.state.weights.served, ""
        if body.model in served:
            said = f"model {body.model!r} serves"
        elif of not in served:
            said = f"model {of!r} was not announced"
        elif (owner := self.state.weights.owner(body.model)) not in (of, body.model):
            said = f"{body.model!r} is a candidate of model {owner!r}"
        if said:
            raise Conflict(f"{said}: no candidate of {of!r} can be called {body.model!r}", code="no_candidate")
        return (ev.CandidateAnnounced(at, body.model, body.version, body.upstreams or (), of),)

    def evaluate(self, body: Evaluate, *, evaluation: str, at: float) -> Events:
        """`evaluation` is `body.id`, or a new one if that is None. One that was asked for before stays as it is."""
        if (known := self.state.plays.evaluation(evaluation)) is not None:
            if (known.model, known.episodes) != (body.model, body.episodes):
                raise BadRequest(f"evaluation {evaluation} is of another model or number of episodes", param="id")
            return ()
        version = self.state.weights.policy_version(body.model)
        return (ev.EvaluationWanted(self.state.time(at), evaluation, body.model, version, body.episodes),)

    def gate_close(self, body: GateClose, *, at: float) -> Events:
        model = self.state.weights.meant(body.model)
        known = self.state.gates.table.get(model)
        closed = known is not None and known.shut
        return () if closed else (ev.GateClosed(self.state.time(at), body.reason, model),)

    def gate_open(self, body: GateOpen, *, at: float) -> Events:
        weights, gates, version = self.state.weights, self.state.gates, body.policy_version
        model = weights.meant(body.model)
        goes_on = not model or weights.born(model).continues(version)
        if gates.shut().isdisjoint(gates.opened_by(model)) and weights.policy_version(model) == version and goes_on:
            return ()
        return (ev.GateOpened(self.state.time(at), version, model),)

    def _begin(self, model: str, run: str, at: float) -> Events:
        """`run` has the model from now on. What is leased to another's comes back, and what is sealed or ready for that
        is discarded."""
        state, began = self.state, ev.RunBegan(at, model, run)
        before = state.weights.born(model).run
        if before in ("", run):
            return (began,)
        if (batch := next((one for one in state.batches.leased.values() if one.model == model), None)) is not None:
            return Part((ev.BatchReturned(at, batch.id, "other_run"),))
        ready = ((state.episodes[name], name) for of, name in state.seats.queues.ready() if of == model)
        waiting = (
            ev.EpisodeDiscarded(at, name, "other_run", OTHER_RUN, () if {*one.shares.by_model} == {model} else (model,))
            for one, name in ready
        )
        sealed = (
            ev.EpisodeDiscarded(at, one.id, "other_run", OTHER_RUN)
            for one in chain(state.episodes.unsettled.values(), state.episodes.awaited())
            if one.state == "sealed" and not one.opening.eval and one.named_to_train() == (model,)
        )
        return parted(chain(waiting, sealed), began)

    def _let_in(self, body: Attend, at: float) -> None:
        known = self.state.weights.trainers.get(body.model)
        if known is None or (known.came.run, known.came.folder) == (body.run, body.folder):
            return
        if self._heard(known, at):
            left = HEARD_S - (at - self.presence.trainer(known))
            said = f"{_who(known)} is at work: two trainers of one model would push over each other"
            raise Conflict(f"{said}. If it is dead, try again in {left:.0f} s", code="other_trainer")

    def _heard(self, known: Trainer, at: float) -> bool:
        return not known.left and at - self.presence.trainer(known) < HEARD_S


def _who(trainer: Trainer) -> str:
    """A trainer, for a message."""
    came = trainer.came
    return f"the trainer of model {came.model!r} on {came.host or '?'} in {came.folder or '?'} (run {came.run})"
