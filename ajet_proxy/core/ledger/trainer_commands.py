"""The commands of trainers and runs: a model has one trainer at a time, and a run learns from nothing of another run.

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
from ajet_proxy.core.ledger.life import OTHER_RUN
from ajet_proxy.core.ledger.parts import Part, parted
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.weights import Trainer
from ajet_sdk.errors import Conflict
from ajet_sdk.routes import Attend

HEARD_S = 30.0
"""So long is a trainer heard after a beat, and after a start of the proxy."""


class TrainerCommands:
    """The decisions about trainers, over `state`. They return events, as all commands do."""

    def __init__(self, state: State, presence: Presence) -> None:
        self.state, self.presence = state, presence

    def attend(self, body: Attend, *, at: float) -> tuple[ev.Event, ...]:
        """A trainer says how it is. Raises `Conflict` if another one is at work, or has taken its place."""
        at = max(at, self.state.now)
        known = self.state.weights.trainers.get(body.model)
        came: tuple[ev.Event, ...] = ()
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
        begun = self.begin(body.model, body.run, at)
        return Part((*came, *begun)) if isinstance(begun, Part) else (*came, *begun)

    def check(self, model: str, instance: str) -> None:
        """`Conflict` for an `instance` whose place another one has taken. Who names none is no trainer of ours."""
        known = self.state.weights.trainers.get(model)
        if instance and known is not None and known.came.instance != instance:
            raise Conflict(f"{_who(known)} has taken the place of this trainer", code="other_trainer")

    def check_run(self, model: str, run: str, at: float) -> None:
        """`Conflict` while the trainer of another run is heard."""
        known = self.state.weights.trainers.get(model)
        if known is not None and known.came.run != run and self._heard(known, at):
            raise Conflict(f"{_who(known)} is at work", code="other_trainer")

    def begin(self, model: str, run: str, at: float) -> tuple[ev.Event, ...]:
        """`run` has the model from now on. What is leased to another's comes back, and what is sealed or ready for that
        is discarded."""
        state, began = self.state, ev.RunBegan(at, model, run)
        before = state.weights.born(model).run
        if before in ("", run):
            return (began,)
        if (batch := next((one for one in state.batches.leased.values() if one.model == model), None)) is not None:
            return Part((ev.BatchReturned(at, batch.id, "other_run"),))
        waiting = (
            ev.EpisodeDiscarded(
                at, name, "other_run", OTHER_RUN, () if set(state.episodes[name].shares) == {model} else (model,)
            )
            for of, name in state.seats.queues.ready() if of == model
        )
        sealed = (
            ev.EpisodeDiscarded(at, one.id, "other_run", OTHER_RUN) for one in state.episodes.unsettled.values()
            if one.state == "sealed" and not one.opening.eval and one.named_to_train() == (model,)
        )
        return parted(chain(waiting, sealed), began)

    def void(self, batch: LeasedBatch) -> bool:
        """Tell whether a batch was leased to another run than the one that has its model now."""
        born = self.state.weights.born(batch.model)
        return born.branches[batch.branch].run != born.run

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
