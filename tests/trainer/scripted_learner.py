"""A learner and a proxy in memory, to run a training run without verl and kill it at every instant.

The learner's weights are the list of episodes that it was trained on, and its disk is what a checkpoint would hold. The
proxy leases episodes in whole groups, takes them back when a lease expires, and counts what it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.errors import NotFound, ProxyUnreachable
from ajet_sdk.routes import Lease, SetMix
from ajet_sdk.sample import Batch, BatchEpisode, Group
from ajet_trainer.batch import Row, group_name
from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost
from ajet_trainer.sampling import Rule
from tests.trainer.making import episode


class Killed(BaseException):
    """The process ends here; nothing after this line runs."""


@dataclass
class Instants:
    """Counts the instants at which a process could die, and dies at one of them; at others something else happens."""

    fatal: int | None = None
    happens: dict[int, Callable[[], None]] = field(default_factory=dict)
    seen: int = 0
    names: list[str] = field(default_factory=list)

    def pass_by(self, name: str) -> None:
        self.names.append(name)
        self.seen += 1
        self.happens.get(self.seen - 1, lambda: None)()
        if self.seen - 1 == self.fatal:
            raise Killed(name)


@dataclass
class Disk:
    """The newest complete checkpoint."""

    version: int = 0
    weights: tuple[str, ...] = ()
    batches: Mapping[str, Any] = field(default_factory=dict)


class ScriptedLearner:
    colocated = True
    rule = Rule(max_tokens=1000)

    def __init__(self, disk: Disk, instants: Instants, *, fail_push: Exception | None = None) -> None:
        self.disk, self.instants, self.fail_push = disk, instants, fail_push
        self.version, self.weights = disk.version, list(disk.weights)
        self.served = disk.version
        self.rows: list[Row] = []
        self.checks = 0
        self.proposed: int | None = None
        self.away: list[EngineLost] = []
        """Why the candidate's engine does not take it, as often as it is asked."""
        self.compared: list[int] = []
        self.logged: dict[int, dict[str, float]] = {}

    @property
    def batches(self) -> Mapping[str, Any]:
        return self.disk.batches

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        self.instants.pass_by("before training")
        self.rows = list(rows)
        self.weights += [f"{row.group}/{row.session}" for row in rows if row.index == 0]
        self.version += 1
        self.instants.pass_by("after training")
        return {"actor/pg_loss": 0.5, "timing_s/update_actor": 1.5, "actor/something": 2.0}

    def tune(self, config: Config) -> None:
        self.tuned = config

    def save(self, batches: Mapping[str, Any]) -> None:
        self.instants.pass_by("before the checkpoint is complete")
        self.disk.version, self.disk.weights, self.disk.batches = self.version, tuple(self.weights), batches
        self.instants.pass_by("after the checkpoint is complete")

    def push(self) -> None:
        self.instants.pass_by("before the push")
        if self.fail_push is not None:
            raise self.fail_push
        self.served = self.version
        self.instants.pass_by("after the push")

    def propose(self) -> None:
        self.instants.pass_by("before a candidate")
        if self.away:
            raise self.away.pop()
        self.proposed = self.version

    def compare(self) -> None:
        self.compared.append(self.served)

    def check(self) -> None:
        self.checks += 1

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.logged[step] = dict(figures)

    def upstreams(self) -> Sequence[str] | None:
        return ("http://engine",) if self.colocated else None


class MemoryProxy:
    """The `Link` methods over `count` batches of two groups of two episodes; a batch's id changes with every lease.

    While `down` nothing is answered. With `singly` a lease is one group. `given` maps the names of groups in rows to
    their tasks, and `asked` has for how many groups each lease asked.
    """

    def __init__(self, count: int, instants: Instants, *, singly: bool = False) -> None:
        self.instants, self.down = instants, False
        self.ready = [[f"{n}g{g}" for g in range(2)] for n in range(count)]
        if singly:
            self.ready = [[task] for batch in self.ready for task in batch]
        self.asked: list[int] = []
        self.given: dict[str, str] = {}
        self.leased: dict[str, list[str]] = {}
        self.trained: list[str] = []
        self.filtered: dict[str, str] = {}
        self.log: list[str] = []
        self.gate, self.version, self.upstreams = "open", -1, ("old",)
        self.mixes: list[SetMix] = []
        self._leases = 0
        self.deadline_s = 120.0
        self.other_run: dict[str, Any] = {}
        """The news of another run when this one begins."""
        self.busy: float | None = None
        self.slower: list[tuple[str, int] | None] = []
        self.there: tuple[int, int, Mapping[str, int]] | None = None
        self.frozen: list[str] = []
        """The faults of an engine, each time that the gate is opened."""
        """For whom the trainer waits, lease by lease, before it is given anything."""
        self.evaluations: dict[str, dict[str, Any]] = {}
        self.plays: Callable[[dict[str, Any]], None] = lambda evaluation: None
        self.make: Callable[[str], tuple[BatchEpisode, ...]] = lambda task: tuple(
            episode(f"{task}e{i}", float(i), task=task) for i in range(2)
        )

    def answer(self) -> None:
        if self.down:
            raise ProxyUnreachable("no answer")

    def says(self, word: str) -> dict[str, Any]:
        self.answer()
        return self.other_run if word == "begins" else {}

    def check(self) -> None:
        self.answer()

    def knows(self, version: int, upstreams: Sequence[str] | None, *, is_open: bool = True) -> bool | None:
        same = upstreams is None or self.upstreams == tuple(upstreams)
        return None if self.down else self.version == version and (self.gate == "open" or not is_open) and same

    def busy_s(self) -> float | None:
        return self.busy

    def waits_for(self) -> tuple[str, int] | None:
        return self.slower.pop(0)

    def played(self) -> tuple[int, int, Mapping[str, int]] | None:
        return self.there

    def lease(self, ask: Lease) -> Batch | None:
        self.answer()
        self.asked.append(ask.groups)
        self.instants.pass_by("before a lease")
        if not self.ready or self.slower:
            return None
        name = f"lease{self._leases}"
        self._leases += 1
        self.leased[name] = tasks = self.ready.pop(0)
        self.given |= {group_name(name, index): task for index, task in enumerate(tasks)}
        self.instants.pass_by("leased, answer on its way")
        return Batch(name, 0.0, self.version, tuple(Group(task, self.make(task)) for task in tasks))

    def direct(self, mix: SetMix) -> None:
        self.answer()
        self.mixes.append(mix)

    def let_go(self, ahead: int) -> None:
        if ahead in [mix.ahead for mix in self.mixes if mix.ahead is not None][-1:]:
            self.direct(SetMix(ahead=0))

    def ack(self, batch: str, policy_version: int, filtered: Mapping[str, str] | None = None) -> None:
        self.answer()
        self.instants.pass_by("before an ack")
        if batch not in self.leased:
            raise NotFound(f"no lease {batch}")
        self.trained += self.leased.pop(batch)
        self.filtered |= filtered or {}
        self.log.append(f"ack {batch} {policy_version}")
        self.instants.pass_by("acked, answer on its way")

    def nack(self, batch: str) -> None:
        self.answer()
        self.log.append(f"nack {batch}")
        self.ready.insert(0, self.leased.pop(batch))

    def extend(self, batch: str, lease_s: float) -> None:
        self.answer()
        if batch not in self.leased:
            raise NotFound(f"no lease {batch}")

    def close_gate(self, reason: str, wait_s: float) -> None:
        self.answer()
        self.instants.pass_by("before the gate closes")
        self.gate = "closed"
        self.log.append("close")

    def open_gate(self, policy_version: int) -> Sequence[str]:
        self.answer()
        self.instants.pass_by("before the gate opens")
        self.gate, self.version = "open", policy_version
        self.log.append(f"open {policy_version}")
        return [self.frozen.pop()] if self.frozen else []

    def announce(
        self, model: str, version: int, upstreams: Sequence[str] | None = None, *, candidate_of: str | None = None
    ) -> dict[str, Any]:
        self.answer()
        if candidate_of is not None:
            self.log.append(f"candidate {model} {version} of {candidate_of}")
            return {}
        self.version = version
        if upstreams is not None:
            self.upstreams = tuple(upstreams)
        self.log.append(f"announce {version}")
        return {}

    def evaluate(self, model: str, episodes: int, name: str) -> None:
        self.answer()
        self.instants.pass_by("before an evaluation")
        self.log.append(f"evaluate {episodes} at {self.version} {self.gate}")
        told = {"model": model, "wanted": episodes, "opened": 0, "done": 0, "lost": 0, "rewards": [], "played": []}
        self.evaluations[name] = told

    def evaluation(self, name: str) -> dict[str, Any]:
        """Its state once what the test `plays` of it is played."""
        self.answer()
        if name not in self.evaluations:
            raise NotFound(f"no evaluation {name}")
        self.plays(self.evaluations[name])
        return dict(self.evaluations[name])

    def take_back(self, disk: Disk) -> None:
        """A trainer gives back what it had, but for what a checkpoint on its `disk` names."""
        unheard = {entry["batch"] for entry in disk.batches.get("saved", ())}
        for batch in [name for name in self.leased if name not in unheard]:
            self.ready.insert(0, self.leased.pop(batch))

    def expire(self) -> None:
        """Every lease runs out."""
        self.ready = list(self.leased.values()) + self.ready
        self.leased = {}
