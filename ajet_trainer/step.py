"""A training run: lease, admit, train, save, push, acknowledge; in this order, the gate closed where it must be.

`Run.step` is one training step. What trains stands behind the `Learner` protocol. So the order, which is what crashes
test, is the same for verl and for a script in a test.

- The gate is closed while the engine sleeps or takes weights. It opens only with weights that are checkpointed
  (``save_freq = 1``) or that a checkpoint will soon hold.
- A batch is acknowledged only when a checkpoint that names it is complete; until then its lease is extended.
- A batch that fails a step three times is set aside (`attempts`), or a supervisor would repeat it for ever. A step that
  made no optimizer update has failed: it has no version, and its batch goes back.
- With a candidate, each step trains on what one version has sampled until weights are promoted (`candidate`). Promotion
  is what saves. Weights that are not promoted are thrown away, with all that was trained for them (`NotPromoted`).
- An evaluation comes between the gate's opening and the next step, so that one version plays all of it.
- However a step ends, the gate does not stay closed. `Run.close` opens it with the version the engine last took, and
  gives back every batch whose gradient no checkpoint holds.

Next: ajet_trainer/link.py
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ajet_sdk.errors import Conflict, NotFound
from ajet_sdk.routes import Lease, SetMix
from ajet_sdk.sample import Batch
from ajet_sdk.settings import ConfigError
from ajet_sdk.text import counted
from ajet_trainer import running
from ajet_trainer.admission import Admission, admit
from ajet_trainer.attempts import MAX_ATTEMPTS, REASON, Attempts, NoUpdate
from ajet_trainer.batch import Row, to_rows
from ajet_trainer.candidate import REFUSED, Candidate, NotPromoted
from ajet_trainer.config import Config, digest
from ajet_trainer.engines import EngineLost
from ajet_trainer.evaluation import Evaluation
from ajet_trainer.figures import Hand, batch_figures, learner_figures, logged, penalty_figure, staleness
from ajet_trainer.gate import Gate
from ajet_trainer.idle import Idle
from ajet_trainer.keeper import Keeper
from ajet_trainer.learner import Learner
from ajet_trainer.link import Link
from ajet_trainer.mix import shares_at
from ajet_trainer.progress import Progress, line_of
from ajet_trainer.sampling import advice
from ajet_trainer.trained_batches import TrainedBatch, TrainedBatches
from ajet_trainer.turns import ByTurn

WAITING = "waiting for episodes"
CLOSE_S = 10.0
"""The time for which the end of a run keeps trying to reach a proxy that is not there."""
REPLACED = "other_trainer"
"""The code of a refusal: another trainer of the model has taken our place."""
TOLD_S, TOLD_AGAIN_S = 10.0, 60.0
"""The wait for episodes after which it is said what a batch needs and what is there, and until that is said anew."""
POLL_S = 2.0
"""The wait of one request for a batch at the proxy, which is also how long a stop signal may go unnoticed."""


class Run:
    """One training run, from the learner's start to the last acknowledgement."""

    def __init__(
        self,
        config: Config,
        link: Link,
        learner: Learner,
        keeper: Keeper,
        progress: Progress,
        *,
        stopping: Callable[[], bool] = lambda: False,
        live: Callable[[Config], Config] = lambda config: config,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config, self.link, self.learner = config, link, learner
        self.batches = TrainedBatches.from_state(learner.batches)
        self.keeper, self.progress, self.stopping, self.live = keeper, progress, stopping, live
        self.clock, self.sleep = clock, sleep
        self.attempts = Attempts(progress.run_dir)
        self.idle = Idle()
        self.candidate = Candidate(
            config, link, learner, progress, meanwhile=self.meanwhile, stopping=stopping, clock=clock, sleep=sleep
        )
        self.gate = Gate(config.model_name, link, learner, progress, self.note_other_run, self.direct)
        self.gone = Counter[str]()
        """Losses of another run, for the line of the next step."""

    def start(self) -> None:
        """Acknowledges what the checkpoint holds, and tells the proxy where the engines are and what they serve."""
        self.learner.tune(self.config)
        self.progress.resume_at(self.learner.version, self.batches.line)
        self.acknowledge()
        self.note_other_run(self.link.says("begins"))  # before the engines have any of our weights
        if not self.learner.colocated:  # engines that stand alone may serve other weights, and calls be in flight
            self.gate.close()
            self.gate.push()
        with self.progress.part("compare", "comparing what the engines compute with the trainer"):
            self.learner.compare()
        self.gate.announce(self.learner.upstreams())
        self.direct()
        self.gate.open()
        self.idle.shares(self.progress.waited, self.link.busy_s())

    def direct(self, *, shares: bool = True, pace: bool = True) -> None:
        """Says which `shares` the lanes have after this step, and the `pace`: how far ahead of training agents may
        play. Of the two, what we have not changed stays as somebody else may have set it."""
        mix = SetMix(shares_at(self.config.mix, self.learner.version) if shares else None)
        if pace:
            mix = replace(mix, ahead=self.config.pace, group_size=self.config.group_size)
        if mix != SetMix():
            self.link.direct(mix)

    def note_other_run(self, told: Mapping[str, Any]) -> None:
        """Says what is `told` of another run of the model, if anything went of it."""
        found = {name: told.get(name, 0) for name in ("discarded", "void")}
        if any(found.values()):
            self.gone.update({"other_run_episodes": found["discarded"], "other_run_leases": found["void"]})
            self.progress.say(f"another run had this model: {found['discarded']} of its episodes are discarded, and "
                              f"{found['void']} of its leases are void")  # fmt: skip

    def loop(self) -> None:
        """Steps until the planned number is reached or someone asks to stop; then saves what is not saved."""
        if self.evaluation_due and self.learner.version == 0 and not self.progress.has(0):
            self.progress.timing = {}
            if (figures := self.evaluate()).get("eval_episodes"):
                self.note({"step": 0, "policy_version": 0, "config": digest(self.config), **figures}, {})
        while not self.done:
            self.step()
        if self.batches.unsaved and not self.config.candidate:
            self.save()
        self.acknowledge()

    @property
    def done(self) -> bool:
        """Stop asked for, or the planned number of steps made."""
        return self.stopping() or 0 < self.config.total_steps <= self.learner.version

    def attune(self) -> None:
        """Takes up what may change between two steps, if it has changed. A learning rate that the learner cannot take
        up stays, and that is said."""
        config, refused = self.live(self.config), ""
        if config is self.config:
            return
        try:
            self.learner.tune(config)
        except ConfigError as error:
            refused, config = error.message, replace(config, verl=self.config.verl)
            self.learner.tune(config)
            self.progress.say_once(refused)
        self.progress.refused = refused
        before, self.config = self.config, config
        self.direct(shares=before.mix != config.mix, pace=before.pace != config.pace)
        if before.mix and not config.mix:
            self.progress.say("lanes keep their shares, which the daemon holds; `ajet mix --any` drops them")
        self.progress.total_steps, self.progress.config = config.total_steps, digest(config)
        if config != before:
            self.progress.say(f"from step {self.learner.version + 1} on the configuration is {digest(config)}")
        self.progress.phase(WAITING, quiet=True)

    def step(self) -> None:
        """Waits for a batch and trains on it. Returns early when asked to stop, or when there is nothing to train."""
        self.progress.timing = {}
        hand, rule = [(leased, self.admit(leased)) for leased in self.lease()], self.learner.rule
        credit, lanes = rule.by_turn, self.batches.lanes
        if credit is not None and credit.alone is not None:
            groups = (group for _, admission in hand for group in admission.groups)
            credit, lanes = running.of_step(groups, credit, lanes)
        rows = [
            row for leased, admission in hand
            for row in to_rows(leased.batch, admission.groups, rule.temperature, credit)
        ]
        if not rows:
            self.dismiss(hand)
            return

        self.learner.check()
        if self.learner.colocated or (self.config.overlap == 0 and not self.config.candidate):
            self.gate.close()
        try:
            metrics = self.train(hand, rows)
        except NoUpdate as error:
            self.give_back(hand, str(error))
            return
        self.batches.lanes = lanes
        figures = self.figures(hand, rows, metrics, credit) | penalty_figure(hand, rule.shaping)
        if serves := not self.config.candidate or self.promotes(figures):
            self.batches.line = line_of(figures | {"timing": self.progress.times(metrics)})
            every = 1 if self.config.candidate else self.config.save_freq
            if self.done or (every > 0 and self.learner.version % every == 0):
                self.save()
            if self.config.candidate:
                self.candidate.serves(self.learner.version)
            self.gate.close()
            self.gate.push()
        if shares_at(self.config.mix, self.learner.version) != shares_at(self.config.mix, self.learner.version - 1):
            self.direct(pace=False)
        if serves:
            self.gate.open()
        if self.evaluation_due:
            figures |= self.evaluate()
        figures["idle"] = self.idle.shares(self.progress.waited, self.link.busy_s())
        self.note(figures, metrics)
        self.acknowledge()

    def note(self, figures: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Writes the line of a step, and tells the loggers."""
        figures = {**figures, **self.gone}
        self.gone.clear()
        self.progress.record({**figures, "timing": self.progress.times(metrics)})
        self.learner.log(logged(metrics, {**figures, "timing": self.progress.timing}), int(figures["step"]))

    @property
    def evaluation_due(self) -> bool:
        """True if the version that serves now is one of those that are evaluated."""
        return self.config.eval_every > 0 and self.learner.version % self.config.eval_every == 0

    def promotes(self, figures: dict[str, Any]) -> bool:
        """True if the weights may serve, as an evaluation shows, whose `figures` are added. False between two of them,
        and where a stop comes first. Raises `NotPromoted`, once the daemon knows that nothing of this was trained."""
        planned = 0 < self.config.total_steps <= self.learner.version
        if self.stopping() or (self.learner.version % self.config.promote_every and not planned):
            return False
        with self.progress.part("eval", "evaluating the candidate"):
            verdict = self.candidate.verdict(self.gate.served)
        figures |= self.candidate.figures
        if verdict is None:
            return False
        if verdict.promoted:
            self.progress.say(f"promoted: {verdict.why}")
            return True
        self.progress.say(f"not promoted, so the run starts again from its last checkpoint: {verdict.why}")
        for entry in self.batches.unsaved:
            filtered = {**dict.fromkeys(entry.episodes, REFUSED), **entry.filtered}
            with suppress(NotFound, Conflict):  # what comes back of a lost lease was not trained
                self.link.ack(entry.batch, self.gate.served, filtered)
            self.keeper.release(entry.batch)
        raise NotPromoted(verdict.why)

    def meanwhile(self) -> None:
        """Does what is to be done while an evaluation is played, behind the open gate."""
        self.gate.open_if_unknown()
        self.acknowledge()
        self.learner.check()

    def evaluate(self) -> dict[str, Any]:
        """Has the version that serves now evaluated, and returns what came of it. The next step waits for that, unless
        it takes too long or nobody plays. If a stop cuts it short, a part of it says nothing."""
        assert self.config.eval_episodes is not None
        with self.progress.part("eval", "evaluating"):
            evaluation = Evaluation(self.link, self.config.model_name, self.config.eval_episodes, self.clock)
            whole = evaluation.wait(self.meanwhile, self.stopping, self.sleep, self.progress.say_once)
        return {} if self.stopping() and not whole else evaluation.figures()

    def lease(self) -> Sequence[Batch]:
        """The batches of the next step, held from here on. None if the run is done before they are
        together, because it was asked to stop or has no more steps to make.

        What ran out while the daemon was away may be leased again: then the newer lease stands for both.
        """
        hand: list[Batch] = []
        waits, due = WAITING, self.clock() + TOLD_S
        with self.progress.part("wait", waits):
            while True:
                if not hand:
                    self.attune()
                if self.done:
                    return ()
                ask = Lease(
                    group_size=self.config.group_size, max_staleness=self.config.max_staleness,
                    model=self.config.model_name,
                    signal=self.config.no_signal == "drop" and self.learner.rule.shaping is None,
                    min_group_size=self.config.min_group_size or None, group_wait_s=self.config.group_wait_s,
                    wait_s=POLL_S, lease_s=self.keeper.lease_s, max_lead=self.config.max_lead,
                )  # fmt: skip
                leased = self.link.lease(replace(ask, groups=self.config.groups - groups_in(hand)))
                if leased is None:
                    self.gate.open_if_unknown()
                    self.learner.check()
                    waits = self.look_at_team(waits)
                    if self.clock() >= due and waits == WAITING:
                        self.say_what_is_there(hand)
                        due = self.clock() + TOLD_AGAIN_S
                    continue
                for older in [other for other in hand if overlap(other, leased)]:
                    hand.remove(older)
                    self.keeper.release(older.batch)
                self.keeper.hold(leased.batch)
                hand.append(leased)
                if groups_in(hand) >= self.config.groups:
                    return hand

    def look_at_team(self, before: str) -> str:
        """Words for what is waited for now; says so if that is another model, and not as `before`."""
        slower = None if self.config.max_lead is None else self.link.waits_for()
        said = WAITING
        if slower is not None:
            said = f"waiting for model {slower[0]!r}, {counted(range(slower[1]), 'update')} behind"
        if said != before:
            self.progress.phase(said, quiet=slower is None)
        return said

    def say_what_is_there(self, hand: Sequence[Batch]) -> None:
        """Says what a batch needs and what the proxy has of it, if that was not said before."""
        if (played := self.link.played()) is None:
            return
        config, (ready, open_, others) = self.config, played
        said = (
            f"{WAITING}: a batch is {counted(range(config.groups), 'group')} (tasks) of {config.group_size} episodes "
            f"of model {config.model_name!r}. At the proxy {ready} are ready and {open_} open"
        )  # fmt: skip
        if hand:
            said += f", besides {counted(range(groups_in(hand)), 'group')} in hand"
        if others:
            named = ", ".join(lane or "no lane" for lane in others)
            said += f". {sum(others.values())} more are in lanes without a share ({named})"
        elif not ready + open_:
            said += f": nobody plays. Agents ask for this model at {config.proxy_url}/v1"
        self.progress.say_once(said)

    def admit(self, leased: Batch) -> Admission:
        """Decides what of a batch is trained; says what is not, and why."""
        most, rule = self.config.max_staleness, self.learner.rule
        rule = replace(
            rule, sampling=self.config.sampling, overlong=self.config.overlong == "mask",
            no_signal=self.config.no_signal, oldest=None if most is None else self.learner.version - most,
            max_tokens=min(self.config.max_tokens, rule.max_tokens or self.config.max_tokens),
            launched=not self.config.attached,
        )  # fmt: skip
        admission = admit(leased, rule, trained=self.batches.blocked, failed=self.attempts.given_up())
        for rejection in admission.rejected:
            self.progress.say(f"not trained: episode {rejection.episode}: {rejection.reason} ({rejection.detail})")
        if given_up := [rejection.episode for rejection in admission.rejected if rejection.reason == REASON]:
            path = self.attempts.set_aside(leased, given_up)
            self.progress.say(f"set aside after {MAX_ATTEMPTS} failed steps: what batch {leased.batch} held of them is "
                              f"in {path}")  # fmt: skip
        for reason in admission.left_out:
            self.progress.say_once(f"calls are left out ({reason}): {advice(reason, launched=rule.launched)}")
        for reason in admission.unstated:
            what = f"calls are trained without a word on how they were sampled ({reason})"
            self.progress.say_once(f"{what}: {advice(reason, launched=rule.launched)}")
        return admission

    def dismiss(self, hand: Hand) -> None:
        """Acknowledges batches that hold nothing to train, so that they do not come back. While there are weights that
        no checkpoint holds, they wait for the next one: those weights may hold their own episodes."""
        for leased, admission in hand:
            name, version = leased.batch, self.learner.version
            if self.batches.unsaved:
                self.batches.trained(TrainedBatch(name, version, (), admission.filtered))
                continue
            with suppress(NotFound, Conflict):  # what comes back of a lost lease holds nothing to train either
                self.link.ack(name, version, admission.filtered)
            self.keeper.release(name)

    def train(self, hand: Hand, rows: Sequence[Row]) -> dict[str, float]:
        """One step of the learner; its batches are trained from here on. A failure counts against them, unless a
        stop, a dead engine or weights that did not reach one are the reason."""
        self.attempts.begin(episode.episode for _, admission in hand for episode in admission.episodes)
        try:
            with self.progress.part("train", "training"):
                metrics = self.learner.train(rows)
        except NoUpdate as error:
            self.attempts.failed(str(error))
            raise
        except (Exception, KeyboardInterrupt) as error:
            said = traceback.format_exc()
            try:
                if self.stopping() or isinstance(error, (EngineLost, KeyboardInterrupt)):
                    raise
                self.learner.check()
            except (Exception, KeyboardInterrupt) as reason:
                self.attempts.take_back()
                if isinstance(reason, EngineLost) and reason is not error:
                    first = traceback.format_exception_only(error)[0].strip().splitlines()[0]
                    raise EngineLost(f"{reason}; before that the step failed with {first}") from error
                raise
            self.attempts.failed(said)
            raise
        self.attempts.worked()
        for leased, admission in hand:
            episodes = tuple(episode.episode for episode in admission.episodes)
            self.batches.trained(TrainedBatch(leased.batch, self.learner.version, episodes, admission.filtered))
        return metrics

    def give_back(self, hand: Hand, why: str) -> None:
        """Gives the batches of `hand` back, which a step did not train. No version was made. An engine that slept
        meanwhile is sent the weights that it had."""
        self.progress.say(f"step {self.learner.version + 1} made no update, and is tried again: {why}")
        for leased, _ in hand:
            with suppress(NotFound, Conflict):  # whose lease ends by itself
                self.link.nack(leased.batch)
            self.keeper.release(leased.batch)
        if self.gate.closed:
            if self.learner.colocated:
                self.gate.push()
            self.gate.open()

    def save(self) -> None:
        """A checkpoint that names every batch trained so far."""
        with self.progress.part("save", "saving a checkpoint"):
            self.learner.save(self.batches.state())
        self.batches.saved()

    def acknowledge(self) -> None:
        """Tells the proxy of every batch that a checkpoint holds. If a lease is gone, its episodes are blocked
        instead."""
        for entry in self.batches.unacknowledged:
            try:
                self.link.ack(entry.batch, entry.version, entry.filtered)
            except (NotFound, Conflict) as error:
                if error.code == REPLACED:
                    raise
                self.batches.refused(entry)
                self.progress.say(f"the lease of batch {entry.batch} ran out; its episodes will not be trained again")
            else:
                self.batches.acknowledged(entry)
            self.keeper.release(entry.batch)

    def figures(
        self, hand: Hand, rows: Sequence[Row], metrics: Mapping[str, float], credit: ByTurn | None
    ) -> dict[str, Any]:
        """The line of the step in `metrics.jsonl`, except for the times that it took."""
        return {
            "step": self.learner.version,
            "policy_version": self.learner.version,
            "config": digest(self.config),
            "batch": ",".join(leased.batch for leased, _ in hand),
            **batch_figures(hand, rows, credit, compares=self.learner.rule.compares),
            **staleness(hand, self.learner.version - 1),
            **learner_figures(metrics),
        }

    def close(self) -> None:
        """Leaves nothing behind at the proxy: untrained and unsaved batches go back, the gate opens. Each is tried,
        whatever became of the others, and what cannot be done is said."""
        self.link.deadline_s = min(self.link.deadline_s, CLOSE_S)
        for batch in sorted(set(self.keeper.held) - {entry.batch for entry in self.batches.unacknowledged}):
            with self.leaving(f"batch {batch} is not given back, and its lease runs out by itself"):
                self.link.nack(batch)
            self.keeper.release(batch)
        with self.leaving("agents are held for a trainer that has ended: ajet mix --ahead 0"):
            self.link.let_go(self.config.pace)
        with self.leaving("the engines of this run stay announced"):
            if self.learner.upstreams() is not None:
                self.gate.announce(())
        if self.gate.closed:
            with self.leaving("the gate may stay closed, until a trainer of this model starts"):
                self.gate.open_as_it_was()

    @contextmanager
    def leaving(self, otherwise: str) -> Iterator[None]:
        """A part of the end. Its failure must not hide the reason why the run ends, nor keep the next part from being
        tried. But it is said what holds `otherwise`."""
        try:
            yield
        except Exception as error:
            self.progress.say(f"{otherwise} ({str(error) or type(error).__name__})")


def overlap(one: Batch, other: Batch) -> bool:
    """True if two leases have an episode in common: then the older of them has ended."""
    names, others = (
        {episode.episode for group in leased.groups for episode in group.episodes} for leased in (one, other)
    )
    return not names.isdisjoint(others)


def groups_in(hand: Sequence[Batch]) -> int:
    return sum(len(leased.groups) for leased in hand)
