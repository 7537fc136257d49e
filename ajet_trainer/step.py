"""A training run: lease, admit, train, save, push, acknowledge; in this order, the gate closed where it must be.

`Run.step` is one training step. What trains stands behind the `Learner` protocol, so that the order, which is what
crashes test, is the same for verl and for a script in a test.

- The gate is closed while the engine sleeps or takes weights, and opens only with weights that are checkpointed
  (``save_freq = 1``) or that a checkpoint will soon hold.
- A batch is acknowledged only when a checkpoint with it in its history is complete; until then its lease is extended.
- However a step ends, the gate does not stay closed: `Run.close` opens it with the version the engine last took, and
  gives back every batch whose gradient no checkpoint holds.

Next: ajet_trainer/verl_backend/trainer.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from ajet_sdk.errors import AjetError, Conflict, NotFound
from ajet_sdk.routes import Lease
from ajet_sdk.sample import Batch, BatchEpisode
from ajet_trainer.admission import Admission, admit
from ajet_trainer.batch import Row, to_rows
from ajet_trainer.config import Config
from ajet_trainer.history import Entry, History
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress

CLOSE_S = 10.0
"""How long the end of a run keeps trying to reach a proxy that is not there."""
POLL_S = 2.0
"""How long one request for a batch waits at the proxy, which is also how long a stop signal may go unnoticed."""


class Learner(Protocol):
    """What a run asks of what trains. `version` counts its steps, and is the policy version of its weights."""

    version: int
    colocated: bool
    """True when the engine gives up its devices for the time of `train`."""
    max_tokens: int

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        """One step on `rows`; raises `version` by one. Returns the learner's own metrics and ``timing_s/…``."""
        ...

    def save(self, history: Mapping[str, Any]) -> None:
        """A checkpoint of `version` with `history` in its folder, complete when this returns."""
        ...

    def push(self) -> None:
        """The engine now serves `version`. Raises when that takes too long."""
        ...

    def upstreams(self) -> Sequence[str] | None:
        """Base URLs of the engines launched here, or None when others look after them."""
        ...

    def check(self) -> None:
        """Raises when an engine has died. Asked while no batch is ready, since a dead engine makes none."""
        ...


class Run:
    """One training run, from the learner's start to the last acknowledgement."""

    def __init__(
        self,
        config: Config,
        link: Link,
        learner: Learner,
        history: History,
        keeper: Keeper,
        progress: Progress,
        *,
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.link, self.learner, self.history = config, link, learner, history
        self.keeper, self.progress, self.stopping, self.clock = keeper, progress, stopping, clock
        self.served = learner.version
        self.gate_closed = False
        self.saved_version = learner.version
        self.timing: dict[str, float] = {}

    def start(self) -> None:
        """Settles with the proxy what the checkpoint holds, and says where the engines are and what they serve."""
        self.progress.resume_at(self.learner.version)
        self.acknowledge()
        self.link.announce(self.config.model_name, self.learner.version, self.learner.upstreams())
        self.link.open_gate(self.learner.version)

    def loop(self) -> None:
        """Steps until the planned number is reached or someone asks to stop; then saves what is not saved."""
        while not self.done:
            self.step()
        if self.learner.version != self.saved_version:
            self.save()
        self.acknowledge()

    @property
    def done(self) -> bool:
        """Stop asked for, or the planned number of steps made."""
        return self.stopping() or 0 < self.config.total_steps <= self.learner.version

    def step(self) -> None:
        """Waits for a batch and trains on it. Returns early when asked to stop, or when there is nothing to train."""
        self.timing = {}
        batch = self.lease()
        if batch is None:
            return
        admission = self.admit(batch)
        rows = to_rows(batch.batch, admission.groups)
        if not rows:
            self.dismiss(batch)
            return

        if self.learner.colocated:
            self.close_gate()
        metrics = self.train(batch, admission, rows)
        if self.save_due:
            self.save()
        self.close_gate()
        self.push()
        self.open_gate()
        self.record(batch, admission, rows, metrics)
        self.acknowledge()

    def lease(self) -> Batch | None:
        """The next batch, held from here on; None when asked to stop before one is ready."""
        self.progress.phase("waiting for episodes", quiet=True)
        ask = Lease(
            groups=self.config.groups,
            group_size=self.config.group_size,
            max_staleness=self.config.max_staleness,
            model=self.config.model_name,
            wait_s=POLL_S,
            lease_s=self.config.lease_s,
        )
        with self.timed("wait"):
            while not self.stopping():
                batch = self.link.lease(ask)
                if batch is not None:
                    self.keeper.hold(batch.batch)
                    return batch
                self.learner.check()
        return None

    def admit(self, batch: Batch) -> Admission:
        """What of `batch` is trained; says what is not, and why."""
        admission = admit(
            batch,
            trained=self.history.blocked,
            max_tokens=min(self.config.max_tokens, self.learner.max_tokens),
            no_signal=self.config.no_signal,
        )
        for rejection in admission.rejected:
            self.progress.say(f"not trained: episode {rejection.episode}: {rejection.reason} ({rejection.detail})")
        return admission

    def dismiss(self, batch: Batch) -> None:
        """`batch` holds nothing to train: acknowledged as it is, so that it does not come back."""
        self.link.ack(batch.batch, self.learner.version)
        self.keeper.release(batch.batch)

    def train(self, batch: Batch, admission: Admission, rows: Sequence[Row]) -> dict[str, float]:
        """One step of the learner, entered into the history."""
        self.progress.phase("training", quiet=True)
        with self.timed("train"):
            metrics = self.learner.train(rows)
        episodes = tuple(episode.episode for episode in admission.episodes)
        self.history.trained(Entry(batch.batch, self.learner.version, episodes))
        return metrics

    @property
    def save_due(self) -> bool:
        """Every `save_freq` steps and at the end; 0 means only at the end."""
        frequency = self.config.save_freq
        return self.done or (frequency > 0 and self.learner.version % frequency == 0)

    def save(self) -> None:
        """A checkpoint whose history holds every batch trained so far."""
        self.progress.phase("saving a checkpoint", quiet=True)
        with self.timed("save"):
            self.learner.save(self.history.state())
        self.history.saved()
        self.saved_version = self.learner.version

    def close_gate(self) -> None:
        """No call is in flight and none starts until `open_gate`. Nothing happens when it is closed already."""
        if self.gate_closed:
            return
        self.progress.phase("draining calls in flight", quiet=True)
        self.gate_closed = True
        with self.timed("drain"):
            self.link.close_gate("weights", self.config.drain_s)

    def push(self) -> None:
        """The engine takes the learner's weights."""
        self.progress.phase("pushing weights", quiet=True)
        with self.timed("push"):
            self.learner.push()
        self.served = self.learner.version

    def open_gate(self) -> None:
        """Calls pass again, served by the version that the engine last took."""
        self.link.open_gate(self.served)
        self.gate_closed = False

    def acknowledge(self) -> None:
        """Tells the proxy of every batch that a checkpoint holds. A lease that is gone blocks its episodes instead."""
        for entry in self.history.unacknowledged:
            try:
                self.link.ack(entry.batch, entry.version)
                self.history.acknowledged(entry.batch)
            except (NotFound, Conflict):
                self.history.refused(entry.batch)
                self.progress.say(f"the lease of batch {entry.batch} ran out; its episodes will not be trained again")
            self.keeper.release(entry.batch)

    def record(self, batch: Batch, admission: Admission, rows: Sequence[Row], metrics: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`."""
        timing = {
            **self.timing,
            **{k.removeprefix("timing_s/"): v for k, v in metrics.items() if k.startswith("timing_s/")},
        }
        self.progress.record(
            {
                "step": self.learner.version,
                "policy_version": self.served,
                "batch": batch.batch,
                **batch_figures(batch, admission, rows),
                **learner_figures(metrics),
                "timing": {name: round(seconds, 3) for name, seconds in timing.items()},
            }
        )

    def close(self) -> None:
        """Leaves nothing behind at the proxy: untrained and unsaved batches go back, the gate opens."""
        self.link.deadline_s = min(self.link.deadline_s, CLOSE_S)
        held = set(self.keeper.held) - {entry.batch for entry in self.history.unacknowledged}
        for batch in sorted(held):
            _quietly(lambda batch=batch: self.link.nack(batch))  # type: ignore[misc]
            self.keeper.release(batch)
        if self.learner.upstreams() is not None:
            _quietly(lambda: self.link.announce(self.config.model_name, self.served, ()))
        if self.gate_closed:
            _quietly(self.open_gate)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to ``timing[name]``."""
        start = self.clock()
        try:
            yield
        finally:
            self.timing[name] = self.timing.get(name, 0.0) + self.clock() - start


def batch_figures(batch: Batch, admission: Admission, rows: Sequence[Row]) -> dict[str, Any]:
    """What `metrics.jsonl` says of the data. Rewards are of all leased episodes, the rest is of what was trained."""
    leased: list[BatchEpisode] = [episode for group in batch.groups for episode in group.episodes]
    rewards = [episode.reward for episode in leased]
    mean = math.fsum(rewards) / len(rewards)
    samples = [sample for episode in admission.episodes for sample in episode.samples]
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "groups": len(admission.groups),
        "episodes": len(admission.episodes),
        "rejected_episodes": len(admission.rejected),
        "samples": len(rows),
        "sampled_tokens": sum(row.sampled for row in rows),
        "prompt_tokens": sum(row.tokens - row.sampled for row in rows),
        "merged_calls": sum(len(sample.calls) - 1 for sample in samples),
        "merged_tokens": sum(sum(end for _, _, end in sample.spans) - len(sample.token_ids) for sample in samples),
        "min_policy_version": min(row.min_version for row in rows),
        "max_policy_version": max(row.max_version for row in rows),
        "uncertain_tokens": sum(sample.uncertain_tokens for sample in samples),
        "repaired_tokens": sum(sample.repaired_tokens for sample in samples),
    }


LEARNER_FIGURES = {
    "rollout_probs_diff_mean": "training/rollout_probs_diff_mean",
    "rollout_probs_diff_max": "training/rollout_probs_diff_max",
    "rollout_kl": "rollout_corr/kl",
    "pg_loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "ppo_kl": "actor/ppo_kl",
    "lr": "actor/lr",
}


def learner_figures(metrics: Mapping[str, float]) -> dict[str, Any]:
    """The learner's best-known figures under short names, and everything else it reported under ``learner``."""
    short = {name: metrics[key] for name, key in LEARNER_FIGURES.items() if key in metrics}
    rest = {k: v for k, v in metrics.items() if k not in LEARNER_FIGURES.values() and not k.startswith("timing_s/")}
    return {**short, "learner": rest}


def _quietly(action: Callable[[], None]) -> None:
    """`action`, whose failure must not hide the reason why the run ends."""
    with suppress(AjetError):
        action()
