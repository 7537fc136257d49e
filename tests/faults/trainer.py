"""The trainer that is killed: `ajet_trainer`'s own run, link, lease keeper and trained batches, a stub in verl's place.

verl's start takes half a minute, which is why it is not killed hundreds of times
(`tests/e2e/training/test_trainer_restart.py` kills the whole thing a few times). The stub's weights are the names of
the episodes whose gradient they hold; its checkpoint is a file that is renamed into its place.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet_sdk.routes import Lease
from ajet_sdk.sample import Batch
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.daemons import Daemons, Keeper
from ajet_trainer.link import Link
from ajet_trainer.mix import Mixture
from ajet_trainer.overlong import Shaping
from ajet_trainer.progress import Progress
from ajet_trainer.step import Run
from ajet_trainer.trained_batches import TrainedBatches
from ajet_trainer.turns import ByTurn
from tests.faults.notes import Notes
from tests.faults.player import GROUP
from tests.faults.swarm import GROUPS, LEAST, SHARES

LEASE_S = 1.5


def checkpoint(folder: Path) -> dict[str, Any]:
    """The latest one."""
    try:
        found: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
    except FileNotFoundError:
        return {"version": 0, "weights": [], "history": {}}
    return found


class Stub:
    """Trains nothing, at random speed, and keeps what it was given."""

    colocated = False
    max_tokens = 100_000
    temperature = 1.0
    several_temperatures = True
    by_turn: ByTurn | None = None
    shaping: Shaping | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved = checkpoint(folder)
        self.version: int = self._saved["version"]
        self._dice = random.Random(self.version)

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        assert all(row.sampled for row in rows)
        self._pass()
        self.version += 1
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
        os.replace(new, self._folder / "checkpoint.json")
        self._pass()

    def tune(self, config: Config) -> None:
        pass

    def push(self) -> None:
        self._pass()

    def upstreams(self) -> Sequence[str] | None:
        return None

    def check(self) -> None:
        pass

    def log(self, figures: Mapping[str, float], step: int) -> None:
        pass

    def _pass(self) -> None:
        time.sleep(self._dice.uniform(0, 0.03))


class NotedLink(Link):
    """Notes what was delivered and what was acknowledged."""

    def __init__(self, url: str, notes: Notes) -> None:
        super().__init__(url)
        self._notes = notes

    def lease(self, ask: Lease) -> Batch | None:
        batch = super().lease(ask)
        if batch is not None:
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
            self._notes.add("leased", batch=batch.batch, samples=samples)
        return batch

    def ack(self, batch: str, policy_version: int, filtered: Mapping[str, str] | None = None) -> None:
        super().ack(batch, policy_version, filtered)
        self._notes.add("acked", batch=batch, filtered=sorted(filtered or ()))


def run(url: str, folder: Path, notes: Path, stop: Path) -> None:
    """What the process does, until the file `stop` is there."""
    learner = Stub(folder)
    config = Config(
        model="none", model_name="stub", proxy_url=(url,), run_dir=str(folder), groups=GROUPS, group_size=GROUP,
        min_group_size=LEAST, group_wait_s=1.0, max_staleness=6, save_freq=2, mix=(Mixture(0, SHARES),),
    )
    daemons = Daemons([NotedLink(url, Notes(notes))])
    batches = TrainedBatches.from_state(checkpoint(folder)["history"], daemons.urls)
    with Keeper(daemons, LEASE_S) as keeper:
        training = Run(
            config, daemons, learner, batches, keeper, Progress(folder, 0, lambda line: None), stopping=stop.exists
        )
        training.start()
        try:
            training.loop()
        finally:
            training.close()
