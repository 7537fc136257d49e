"""One fault after another while agents and two trainers work, and a look at the ledger after each.

Idea: a seed gives the order and the kinds; when each strikes is chance, and so is what it strikes. Kills come in pairs
and triples too (a trainer or an agent dies while the proxy is dead, or everybody does), proxies die while their journal
is compacted, while their disk is full or refuses, and while an engine stands still. Each trainer also dies at each of
its instants, and stays dead until the other has trained, or until agents have had answers if its gate is shut. Now and
then agents play with another revision, and another state is wanted of the supervised run.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.faults import agent
from tests.faults.agent import MODELS
from tests.faults.audit import Audit
from tests.faults.stage import Stage, Worker
from tests.faults.trainer import INSTANTS, SHUT
from tests.kit.proxy_process import ProxyFailed

ERRORS = ("EIO", "ENOSPC", "EDQUOT")
FAULTS = ("reset", "cut", "silent_close", "status")
CLOCK_S = 3600.0
SHORT_S, LONG_S = (0.2, 1.5), agent.TIMEOUT_S + 2.0
"""Seconds for which the engine stands still: less, or more, than an agent waits."""
CHANGES, LENDS_FROM = 0.1, 0.7
"""So often something else is wanted; and after this part of the faults, lanes lend their turns at once."""
STRUCK = {
    "proxy": ("kills of the proxy",),
    "worker": ("kills of a worker process",),
    "trainer": ("kills of a trainer",),
    "instant": ("kills of a trainer at an instant of its own",),
    "between": ("kills of the proxy between two acknowledgements of one episode",),
    "lost": ("times that the engine of one model was lost",),
    "agent": ("kills of an agent",),
    "supervisor": ("kills of the supervisor",),
    "supervised": ("kills of the supervisor's trainer",),
    "write": ("times that pwrite failed", "times that fdatasync failed", "times that fsync failed"),
    "full": ("times that the disk was full",),
    "freeze": ("times that the engine was frozen",),
    "reset": ("answers of the engine that were broken off or refused",),
    "clock": ("jumps of the clock",),
}
"""By which counts it is known how often a kind of fault struck."""


def fewer(asked: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """The kinds of faults that struck less often than was asked for."""
    struck = {kind: sum(counts.get(name, 0) for name in STRUCK[kind]) for kind in asked}
    return [f"{kind}: {struck[kind]} of {number}" for kind, number in asked.items() if struck[kind] < number]


@dataclass
class Storm:
    """`left` says how many of each kind are still to come."""

    stage: Stage
    audit: Audit
    dice: random.Random
    left: Counter[str]
    told: Callable[[str], None]
    counts: Counter[str]
    _lends: bool = False
    _instants: list[tuple[str, str]] = field(default_factory=list)

    def run(self) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "proxy": self.proxy, "worker": self.worker, "trainer": self.trainer, "agent": self.agent,
            "supervisor": self.supervisor, "supervised": self.supervised, "instant": self.instant,
            "between": self.between, "lost": self.lost,
            "write": self.write, "full": self.full, "freeze": self.freeze, "reset": self.reset, "clock": self.clock,
        }  # fmt: skip
        asked, done, total = dict(self.left), 0, self.left.total()
        while self.left.total():
            time.sleep(self.dice.uniform(0.0, 0.3))
            kind = self.dice.choice(list(self.left.elements()))
            self.left[kind] -= 1
            if self.dice.random() < CHANGES:
                self.change(done)
            if done > LENDS_FROM * total:
                self._lend()
            kinds[kind]()
            if kind in ("write", "full"):
                self.audit.swarm.restarted()
            self.audit.after_a_fault(wrote=kind not in ("write", "full", "freeze"))
            self._revive()
            done += 1
            self.told(f"{done} of {total} faults")
        assert not fewer(asked, self.counts), f"fewer faults struck than were asked for: {fewer(asked, self.counts)}"

    def proxy(self) -> None:
        """SIGKILL, and a start; a third of them while the journal is being compacted."""
        if self.dice.random() < 0.33:
            self._await_compaction()
        during = self.stage.compacting()
        self._kill_proxy()
        self.counts["… while it compacted its journal"] += during
        self._others_too()
        self._start()

    def worker(self) -> None:
        """A worker process alone: the daemon replaces it."""
        self.until(lambda: self.stage.kill_worker(self.dice))
        self.counts["kills of a worker process"] += 1

    def trainer(self) -> None:
        self._kill(self.stage.trainers[self.dice.choice(MODELS)], "kills of a trainer")

    def instant(self) -> None:
        """A trainer at an instant of its own. While it is dead, the other one and its agents go on."""
        if not self._instants:
            self._instants = [(model, instant) for model in MODELS for instant in INSTANTS]
            self.dice.shuffle(self._instants)
        model, instant = self._instants.pop()
        other, worker = MODELS[model == MODELS[0]], self.stage.trainers[model]
        self.stage.order(model, f"kill {instant}")
        while not worker.killed():
            worker.again()
        self.counts["kills of a trainer at an instant of its own"] += 1
        self._goes_on(other, trains=instant not in SHUT)
        worker.again()

    def between(self) -> None:
        """The proxy dies when one trainer has acknowledged an episode that the other is about to acknowledge."""
        model = self.dice.choice(MODELS)
        other, worker = MODELS[model == MODELS[0]], self.stage.trainers[model]

        def half() -> bool:
            self.audit.after_a_fault()
            return self.audit.half_acknowledged(model, other)

        while True:
            self.stage.order(model, "stop before an ack")
            self.until(lambda: worker.stopped)
            if self.until(half, 10.0, must=False):
                break
            worker.go_on()
        self._kill_proxy()
        self._start()
        assert half()
        before = self.audit.team.acks[model]
        worker.go_on()
        self.until(lambda: bool(self.audit.after_a_fault()) and self.audit.team.acks[model] > before)
        self.counts["kills of the proxy between two acknowledgements of one episode"] += 1

    def lost(self) -> None:
        """The engine of one model is killed. Agents of the other have their answers; its own have theirs later."""
        model = self.dice.choice(MODELS)
        engine = self.stage.engines[model]
        engine.stop()
        self._goes_on(MODELS[model == MODELS[0]], trains=False)
        engine.start()
        self._goes_on(model, trains=False)
        self.counts["times that the engine of one model was lost"] += 1

    def _goes_on(self, model: str, *, trains: bool) -> None:
        """Waits until agents of a model have had more answers, and, if it `trains`, until its trainer has trained."""
        team = self.audit.team
        self.audit.after_a_fault()
        answers, acks = team.answers[model], team.acks[model]

        def on() -> bool:
            self.audit.after_a_fault()
            return team.answers[model] > answers + 1 and (team.acks[model] > acks or not trains)

        self.until(on, 180.0)

    def agent(self) -> None:
        self._kill(self.dice.choice(self.stage.agents), "kills of an agent")

    def supervisor(self) -> None:
        """The supervisor of a run; half of the time with its trainer."""
        self.until(self.stage.run.kill)
        self.counts["kills of the supervisor"] += 1
        if self.dice.random() < 0.5:
            self.counts["kills of the supervisor's trainer"] += self.stage.run.kill_trainer()

    def supervised(self) -> None:
        """The trainer of a supervisor alone. One that is to be stopped is wanted first."""
        if self.stage.run.desired == "stopped":
            self.stage.run.change(random.Random(0))
        self.until(self.stage.run.kill_trainer)
        self.counts["kills of the supervisor's trainer"] += 1

    def change(self, number: int) -> None:
        """Agents play with other code; or something else is wanted of the run."""
        if self.dice.random() < 0.5:
            self.stage.revise(number)
        else:
            self.stage.run.change(self.dice)

    def _lend(self) -> None:
        """Lanes are hardly waited for from now on."""
        if not self._lends:
            for model in MODELS:
                self.audit.ask("PUT", "/mix", {"lane_wait_s": 0.1, "model": model})
            self._lends = True

    def write(self) -> None:
        """Writes or syncs fail for a while; a proxy in three is killed meanwhile."""
        call, error = self.dice.choice(("pwrite", "fdatasync", "fsync")), self.dice.choice(ERRORS)
        with self.stage.failing(call, error):
            time.sleep(self.dice.uniform(0.1, 0.8))
            dead = self.dice.random() < 0.33
            if dead:
                self._kill_proxy()
        self.counts[f"times that {call} failed"] += 1
        if dead:
            self._start()
        self.until(self.stage.healthy)

    def full(self) -> None:
        """The disk is full until the daemon has noticed; half of the time it dies of something else meanwhile."""
        self.stage.disk.fill(self.stage.proxy, self.dice.randrange(4096, 65536))
        noticed = self.until(lambda: not self.stage.healthy(), 15.0, must=False)
        self.counts["times that the disk was full"] += 1
        self.counts["… and the daemon said so"] += noticed
        self.audit.after_a_fault(wrote=False)
        dead = self.dice.random() < 0.5
        if dead:
            self._kill_proxy()
        self.stage.disk.free(self.stage.proxy)
        if dead:
            self._start()
        self.until(self.stage.healthy)

    def freeze(self) -> None:
        """The engine stands still. The first time, and every third one, that is until agents have given up calls that
        they had in flight there."""
        lasts = self.counts["times that the engine was frozen"] % 3 == 0
        before = self.stage.given_up()
        with self.stage.engines[self.dice.choice(MODELS)].frozen():
            time.sleep(LONG_S if lasts else self.dice.uniform(*SHORT_S))
            if lasts:
                self.until(lambda: self.stage.given_up() > before)
        self.counts["times that the engine was frozen"] += 1
        self.counts["… for longer than agents wait"] += lasts
        self.counts["… and calls that they gave up meanwhile"] += self.stage.given_up() - before

    def reset(self) -> None:
        """The next answers break off, by a reset or a close, before or in the middle of their bytes."""
        faults = [
            {"kind": self.dice.choice(FAULTS), "after": self.dice.randrange(1, 3000), "status": 503}
            for _ in range(self.dice.randint(1, 6))
        ]
        self.stage.engines[self.dice.choice(MODELS)].spoil(*faults)
        self.counts["answers of the engine that were broken off or refused"] += len(faults)

    def clock(self) -> None:
        """The wall clock jumps, by up to an hour to either side, with or without a restart."""
        self.stage.clock(self.dice.uniform(-CLOCK_S, CLOCK_S))
        self.counts["jumps of the clock"] += 1
        if self.dice.random() < 0.5:
            self._kill_proxy()
            self._start()

    def _kill(self, worker: Worker, name: str) -> None:
        """One that ended by itself in that moment is started, and killed after all."""
        while not worker.kill():
            worker.again()
        self.counts[name] += 1
        self.audit.swarm.killed(self.stage.clients(worker.process))
        worker.again()

    def _kill_proxy(self) -> None:
        assert self.stage.kill_proxy(self.dice), f"the proxy ended by itself: {self.stage.proxy.status}"
        self.counts["kills of the proxy"] += 1

    def _others_too(self) -> None:
        """While the proxy is dead."""
        everybody = self.dice.random() < 0.05
        self.counts["… and of everybody at once"] += everybody
        for other in (self.trainer, self.supervisor, self.agent):
            if everybody or self.dice.random() < 0.1:
                other()

    def _await_compaction(self) -> None:
        if self.until(self.stage.compacting, 3.0, must=False):
            time.sleep(self.dice.uniform(0.0, 0.4))

    def _revive(self) -> None:
        """A trainer that gave up by itself is started anew, as its service manager would. Agents never give up."""
        for worker in self.stage.agents:
            assert worker.process.is_alive(), f"an agent ended by itself: {worker.process.exitcode}"
        for worker in self.stage.trainers.values():
            if not worker.process.is_alive():
                self.counts["times that a trainer ended by itself and was started anew"] += 1
                worker.again()

    def _start(self) -> None:
        try:
            self.stage.proxy.start()
        except ProxyFailed:
            self.counts["starts that were refused"] += 1
            raise
        self.audit.swarm.restarted()

    def until(self, reached: Callable[[], bool], limit_s: float = 600.0, *, must: bool = True) -> bool:
        give_up = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > give_up:
                assert not must, f"not within {limit_s} s: {reached}"
                return False
            time.sleep(0.02)
        return True
