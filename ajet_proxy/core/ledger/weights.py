"""The weights of each model: which version serves, from which engines, and whose training has made them.

Idea: a model is announced once its trainer says which version serves. A request may name no model, or one that is not
announced: then the only one that is announced is meant, if there is just one (`Serving.key`). What was said before any
model was announced is kept for the first that is.

A candidate has weights that may come to serve, and is evaluated by a name of its own. It is no announced model: nothing
waits for it, and it counts for no pace, mix or team.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.births import Births
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.queues import ReadyQueues
from ajet_proxy.core.ledger.teams import Team, moved
from ajet_proxy.core.trajectory.timeline import POLICIES, Policy
from ajet_sdk.errors import Conflict


@dataclass(slots=True)
class Trainer:
    """The latest of a model, as it came. ``heard_at`` is when that was, or when the proxy started again, in Unix
    seconds: its signs of life are no events (`ajet_proxy.core.ledger.presence`)."""

    came: ev.TrainerCame
    heard_at: float
    left: bool = False
    begun: bool = False
    """True if its run has begun with it."""


class Served(Struct, frozen=True):
    """The weights and engines of one model, as the trainer announced them."""

    version: int
    upstreams: tuple[str, ...]


class Candidate(Served, frozen=True):
    """The weights of a candidate of the model ``of``, since when, in Unix seconds."""

    of: str
    since: float


class Serving:
    """Which weights and engines serve: in the ledger's process, and as a worker knows it. ``policy_updates`` counts the
    events that may have changed a `policy_version`. ``default_version`` is that of a model
    that is not announced: the one with which a gate was opened before any was."""

    __slots__ = ()
    served: Mapping[str, Served]
    candidates: Mapping[str, Candidate]
    default_version: int
    policy_updates: int
    merge_policy: Policy

    def only_model(self) -> str:
        """The only model that is announced; "" if none is, or several are."""
        return next(iter(self.served)) if len(self.served) == 1 else ""

    def key(self, model: str) -> str:
        """The announced model as whose a request for `model` counts: its own, else the only one, else ""."""
        return model if model in self.served else self.only_model()

    def policy_version(self, model: str) -> int:
        """The version that serves `model`, or that its candidate of this name has."""
        served = self.served.get(model) or self.candidates.get(model)
        return self.default_version if served is None else served.version

    def upstreams(self, model: str) -> tuple[str, ...]:
        """The engines announced for `model`."""
        served = self.served.get(model) or self.candidates.get(model)
        return () if served is None else served.upstreams

    def owner(self, model: str) -> str:
        """The model whose trainer `model` belongs to: that which it is a candidate of, else itself."""
        known = self.candidates.get(model)
        return model if known is None else known.of

    def models(self) -> tuple[str, ...]:
        """Every model that was announced."""
        return tuple(self.served)


class Weights(Serving):
    """Of every model that was announced or has sampled anything."""

    KEPT = ("served", "candidates", "births", "trainers", "teams", "default_version", "policy_updates", "merge_policy")

    def __init__(self, episodes: Mapping[str, Episode], queues: ReadyQueues) -> None:
        self._episodes, self._queues = episodes, queues
        self.served: dict[str, Served] = {}
        self.candidates: dict[str, Candidate] = {}
        self.births: dict[str, Births] = {}
        self.trainers: dict[str, Trainer] = {}
        self.teams: list[Team] = []
        self.default_version = self.policy_updates = 0
        self.merge_policy: Policy = "strict"

    def meant(self, model: str | None) -> str:
        """The model that a request is about: the one that it names, else the only one that is announced, or "" if none
        is. `Conflict` if several are."""
        if not model and len(self.served) > 1:
            message = f"several models are announced ({', '.join(self.served)[:200]}): say which one is meant"
            raise Conflict(message, code="several_models", param="model")
        return model or self.only_model()

    def born(self, model: str) -> Births:
        """The branches on which the versions of `model` lie."""
        return self.births.get(model) or Births()

    def oldest(self, episode: Episode, model: str) -> int:
        """The oldest version, as it is counted now, that sampled a token of what `model` learns from the episode."""
        return self.born(model).oldest(episode.transcript.sampled_by(model).values())

    def may_train(self, named: tuple[str, ...] = (), teaching: Collection[str] = ()) -> tuple[str, ...]:
        """The models that an episode may train: of those that were `named` those that are announced, or all if none is;
        else whichever is announced and not `teaching`."""
        announced = tuple(one for one in self.served if one not in teaching)
        return tuple(one for one in named if one in self.served) or named or announced

    def _announced(self, event: ev.PolicyAnnounced) -> None:
        known = self.served.get(event.model, Served(event.version, ()))
        upstreams = known.upstreams if event.upstreams is None else event.upstreams
        self.policy_updates += 1
        self._serves(event.model, known.version, Served(event.version, upstreams))
        self.candidates.pop(event.model, None)

    def _stands(self, event: ev.CandidateAnnounced) -> None:
        self.candidates[event.model] = Candidate(event.version, event.upstreams, event.of, event.at)

    def _gate_opened(self, event: ev.GateOpened) -> None:
        self.policy_updates += 1
        if not self.served:
            self.default_version = event.policy_version
        elif (known := self.served.get(event.model)) is not None:
            served = Served(event.policy_version, known.upstreams)
            if self.born(event.model).announced:
                self._serves(event.model, known.version, served)
            else:  # whose weights these are, only an announcement tells
                self.served[event.model] = served

    def _serves(self, model: str, before: int, served: Served) -> None:
        """`model` has these weights. Where they begin a branch, all that waits is of another age by that."""
        self.served[model] = served
        born = self.births.setdefault(model, Births())
        moved(self.teams, model, before, served.version, anew=not born.announced)
        if born.serves(served.version, self.policy_updates):
            self._queues.of(model).age(lambda name: self.oldest(self._episodes[name], model))

    def _run_began(self, event: ev.RunBegan) -> None:
        self.policy_updates += 1
        births = self.births.setdefault(event.model, Births())
        if births.run not in ("", event.run):
            self._queues.of(event.model).part()
        births.begin(event.run, self.policy_updates)
        if (trainer := self.trainers.get(event.model)) is not None:
            trainer.begun = trainer.came.run == event.run

    def _trainer_came(self, event: ev.TrainerCame) -> None:
        self.trainers[event.model] = Trainer(event, event.at)

    def _trainer_left(self, event: ev.TrainerLeft) -> None:
        self.trainers[event.model].left = True

    def _started(self, event: ev.ProxyStarted) -> None:
        self.candidates = {
            name: replace(one, since=one.since + event.back) for name, one in self.candidates.items()
        }
        self.merge_policy = next(policy for policy in POLICIES if policy == event.merge_policy)
        for trainer in self.trainers.values():
            trainer.heard_at = event.at
