"""The trainer that is killed: `ajet_trainer`'s own run, link, lease keeper and trained batches, a stub in verl's place.

verl's start takes half a minute, which is why it is not killed hundreds of times
(`tests/e2e/training/test_trainer_restart.py` kills the whole thing a few times). The stub's weights are the names of
the episodes whose gradient they hold; its checkpoint is a file that is renamed into its place.

Each model has such a process. At an instant that an order names (`INSTANTS`), it ends by SIGKILL, or stands still.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet_sdk.routes import Attend, Lease
from ajet_sdk.sample import Batch
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.mix import Mixture
from ajet_trainer.presence import Presence, trainer_of
from ajet_trainer.progress import Progress
from ajet_trainer.sampling import Rule
from ajet_trainer.step import Run
from tests.faults.agent import MODELS
from tests.faults.notes import Notes
from tests.faults.player import GROUP
from tests.faults.swarm import GROUPS, LEAST, SHARES
from tests.kit.still_learner import StillLearner

LEASE_S = 1.5
INSTANTS = (
    "before a lease", "during a lease", "after a lease", "in a step", "after a step", "in a checkpoint",
    "after a checkpoint", "as its gate closes", "when its gate is closed", "when weights are pushed",
    "when its gate is open", "before an ack", "during an ack", "after an ack",
)  # fmt: skip
SHUT = ("as its gate closes", "when its gate is closed", "when weights are pushed")
"""When a trainer dies there, its gate may stay shut."""
MOST_TOKENS = dict(zip(MODELS, (100_000, 151), strict=True))
"""Samples that are longer are refused: one trains what the other refuses. Those of three turns have about as many."""


class Orders:
    """The orders of this process: ``kill INSTANT`` or ``stop INSTANT``, in a file that an order leaves when it is
    carried out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reached(self, instant: str) -> None:
        if (what := self._wanted(instant)) is not None:
            os.kill(os.getpid(), what)

    def during(self, instant: str, most_s: float = 0.02) -> None:
        """Carries an order out at some moment of what comes next, which lasts for a while."""
        if (what := self._wanted(instant)) is not None:
            threading.Timer(random.uniform(0, most_s), os.kill, (os.getpid(), what)).start()

    def _wanted(self, instant: str) -> signal.Signals | None:
        try:
            what, _, wanted = self._path.read_text().partition(" ")
        except FileNotFoundError:
            return None
        if wanted != instant:
            return None
        self._path.unlink()
        return signal.SIGKILL if what == "kill" else signal.SIGSTOP


def checkpoint(folder: Path) -> dict[str, Any]:
    """The latest one."""
    try:
        found: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
    except FileNotFoundError:
        return {"version": 0, "weights": [], "history": {}}
    return found


class Stub(StillLearner):
    """Trains nothing, at random speed, and keeps what it was given."""

    def __init__(self, folder: Path, model: str, orders: Orders) -> None:
        self._folder, self._orders = folder, orders
        self.rule = Rule(max_tokens=MOST_TOKENS[model], compares=False)
        self._saved = checkpoint(folder)
        self.version, self.batches = self._saved["version"], self._saved["history"]
        self._dice = random.Random(self.version)

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        assert any(row.sampled for row in rows)
        self._pass()
        self._orders.reached("in a step")
        self.version += 1
        self._orders.reached("after a step")
        return {}

    def save(self, batches: Mapping[str, Any]) -> None:
        before = self._saved["version"]
        taken = [name for entry in batches["saved"] if entry["version"] > before for name in entry["episodes"]]
        weights = [*self._saved["weights"], *taken]
        self._saved = {"version": self.version, "weights": weights, "history": dict(batches)}
        new = self._folder / "checkpoint.new"
        with new.open("w") as file:
            json.dump(self._saved, file)
            file.flush()
            os.fsync(file.fileno())
        self._pass()
        self._orders.reached("in a checkpoint")
        os.replace(new, self._folder / "checkpoint.json")
        self._orders.reached("after a checkpoint")
        self._pass()

    def push(self) -> None:
        self._pass()
        self._orders.reached("when weights are pushed")

    def _pass(self) -> None:
        time.sleep(self._dice.uniform(0, 0.03))


class NotedLink(Link):
    """Notes what was delivered and what was acknowledged."""

    def __init__(self, url: str, notes: Notes, orders: Orders, trainer: Attend) -> None:
        super().__init__(url, model=(model := trainer.model), trainer=trainer)
        self._of, self._notes, self._orders = model, notes, orders

    def lease(self, ask: Lease) -> Batch | None:
        self._orders.reached("before a lease")
        self._orders.during("during a lease")
        batch = super().lease(ask)
        if batch is not None:
            self._orders.reached("after a lease")
            episodes = [episode for group in batch.groups for episode in group.episodes]
            samples = {
                item.episode: [
                    {
                        "sample": sample.sample, "ids": list(sample.token_ids), "mask": list(sample.loss_mask),
                        "logprobs": list(sample.logprobs), "spans": list(sample.spans),
                    }
                    for sample in item.samples
                ]
                for item in episodes
            }  # fmt: skip
            self._notes.add("leased", model=self._of, batch=batch.batch, samples=samples)
        return batch

    def ack(self, batch: str, policy_version: int, filtered: Mapping[str, str] | None = None) -> None:
        self._notes.add("acks", model=self._of, batch=batch, filtered=dict(filtered or {}))
        self._orders.reached("before an ack")
        self._orders.during("during an ack")
        super().ack(batch, policy_version, filtered)
        self._orders.reached("after an ack")
        self._notes.add("acked", model=self._of, batch=batch, filtered=sorted(filtered or ()))

    def close_gate(self, reason: str, wait_s: float) -> None:
        self._orders.during("as its gate closes")
        super().close_gate(reason, wait_s)
        self._orders.reached("when its gate is closed")

    def open_gate(self, policy_version: int) -> Sequence[str]:
        frozen = super().open_gate(policy_version)
        self._orders.reached("when its gate is open")
        return frozen


def run(url: str, model: str, folder: Path, notes: Path, stop: Path) -> None:
    """Runs in the process until the file `stop` is there."""
    orders = Orders(folder / "order")
    learner = Stub(folder, model, orders)
    config = Config(
        model="none", model_name=model, proxy_url=url, run_dir=str(folder), groups=GROUPS, group_size=GROUP,
        min_group_size=LEAST, group_wait_s=1.0, max_staleness=6, save_freq=2, mix=(Mixture(0, SHARES),),
    )
    link = NotedLink(url, Notes(notes), orders, trainer_of(config))
    link.meet()
    with Presence(link), Keeper(link, LEASE_S) as keeper:
        training = Run(
            config, link, learner, keeper, Progress(folder, 0, lambda line: None), stopping=stop.exists
        )
        training.start()
        try:
            training.loop()
        finally:
            training.close()
