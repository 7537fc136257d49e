from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ajet_sdk.errors import Conflict, NotFound, ProxyUnreachable
from ajet_sdk.routes import SetMix
from ajet_sdk.sample import BatchEpisode, Group
from ajet_trainer.admission import admit
from ajet_trainer.batch import to_rows
from ajet_trainer.config import Config, digest
from ajet_trainer.engines import EngineLost
from ajet_trainer.figures import batch_figures, logged
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.mix import Mixture
from ajet_trainer.overlong import Shaping
from ajet_trainer.progress import Progress
from ajet_trainer.sampling import Rule
from ajet_trainer.step import CLOSE_S, Run
from ajet_trainer.trained_batches import TrainedBatches
from ajet_trainer.turns import ByTurn
from tests.trainer.making import PROCESSED, batch, duel, episode
from tests.trainer.scripted_learner import Disk, Instants, Killed, MemoryProxy, ScriptedLearner


class Unwritten(Progress):
    """Writes no file: runs by the hundred wait for a busy disk at every phase."""

    def phase(self, phase: str, *, quiet: bool = False) -> None:
        pass

    def resume_at(self, step: int, line: str = "") -> None:
        self.step = step

    def record(self, metrics: Mapping[str, Any]) -> None:
        self.step = int(metrics["step"])


class Setting:
    """A run over memory: `start` begins a process, which may be killed and begun again over the same disk and proxy."""

    def __init__(self, folder: Path, batches: int, *, progress: type[Progress] = Progress, **options: Any) -> None:
        usual = {"groups": 2, "total_steps": batches, "save_freq": 1}
        self.progress = progress
        self.config = Config(model="m", run_dir=str(folder), **{**usual, **options})
        self.instants, self.disk, self.said = Instants(), Disk(), list[str]()
        self.proxy = MemoryProxy(batches, self.instants)
        self.learner = ScriptedLearner(self.disk, self.instants)
        self.stop, self.time = False, dict[str, Any]()

    def stopping(self) -> bool:
        return self.stop or not self.proxy.ready

    def start(self, **changes: Any) -> Run:
        self.learner = ScriptedLearner(self.disk, self.instants)
        for name, value in changes.items():
            setattr(self.learner, name, value)
        link = cast(Link, self.proxy)
        self.run = Run(
            self.config,
            link,
            self.learner,
            Keeper(link, 300.0),
            self.progress(self.config.run_dir, self.config.total_steps, self.said.append),
            stopping=self.stopping,
            **self.time,
        )
        return self.run

    def begun(self, **changes: Any) -> Run:
        """A process whose run has told the proxy that it begins."""
        run = self.start(**changes)
        run.start()
        return run

    def whole(self) -> None:
        run = self.start()
        try:
            run.start()
            run.loop()
        finally:
            if self.instants.seen - 1 != self.instants.fatal:
                run.close()

    def lines(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        return [json.loads(line) for line in (Path(self.config.run_dir) / "metrics.jsonl").read_text().splitlines()]

    def told(self, *words: str) -> list[str]:
        """The lines that the proxy was told and that begin with one of these words."""
        return [entry for entry in self.proxy.log if entry.startswith(words)]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "run", 3)


def test_a_step_goes_through_its_stations_in_order(setting: Setting) -> None:
    run = setting.begun()
    setting.instants.names.clear()
    run.step()
    assert setting.instants.names == [
        "before a lease",
        "leased, answer on its way",
        "before the gate closes",
        "before training",
        "after training",
        "before the checkpoint is complete",
        "after the checkpoint is complete",
        "before the gate closes",
        "before the push",
        "after the push",
        "before the gate opens",
        "before an ack",
        "acked, answer on its way",
    ]
    said = ["announce 0", "announce 0", "open 0", "close", "close", "announce 1", "open 1", "ack lease0 1"]
    assert setting.proxy.log == said
    assert setting.proxy.upstreams == ("http://engine",)
    assert (setting.disk.version, setting.learner.served, run.keeper.held) == (1, 1, ())


def test_groups_that_a_daemon_gives_in_several_leases_make_one_step(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2)
    setting.proxy = MemoryProxy(2, setting.instants, singly=True)
    setting.whole()
    assert setting.told("ack") == ["ack lease0 1", "ack lease1 1", "ack lease2 2", "ack lease3 2"]
    assert setting.proxy.asked == [2, 1, 2, 1]


def test_what_is_leased_goes_back_when_a_stop_comes_before_the_batch_is_together(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2, groups=3, total_steps=0)
    setting.proxy = MemoryProxy(2, setting.instants, singly=True)
    setting.whole()
    assert setting.disk.version == 1
    assert setting.told("nack") == ["nack lease3"]


def test_a_daemon_that_was_emptied_unseen_hears_the_policy_again(tmp_path: Path) -> None:
    """It came back between two questions, with another data directory, and knows nothing."""
    setting = Setting(tmp_path, 1, max_lead=0)
    run = setting.begun()

    def empty() -> None:
        setting.proxy.version, setting.proxy.upstreams = -1, ()

    setting.instants.happens = {setting.instants.seen: empty}
    setting.proxy.slower = [None, None, None]  # no batch at the first questions
    said = len(setting.proxy.log)
    setting.proxy.mixes.clear()
    run.lease()
    assert setting.proxy.log[said:] == ["announce 0", "open 0"], "once, and not each time"
    assert setting.proxy.mixes == [SetMix(None, 2, 8)], "and how far ahead agents may play"
    assert (setting.proxy.version, setting.proxy.upstreams, setting.proxy.gate) == (0, ("http://engine",), "open")


@pytest.mark.parametrize("version", [-1, 1])
def test_a_daemon_that_is_emptied_or_put_back_while_the_gate_opens_hears_the_mix_again(
    tmp_path: Path, version: int
) -> None:
    setting = Setting(tmp_path, 4, mix=(Mixture(0, {"math": 1.0}),))
    run = setting.begun()
    for _ in range(2):
        run.step()
    assert len(setting.proxy.mixes) == 1

    def older() -> None:
        setting.proxy.version = version

    setting.learner.push = older  # type: ignore[method-assign]
    run.step()
    assert setting.proxy.mixes == [SetMix({"math": 1.0}, 2, 8)] * 2
    setting.learner.push = lambda: None  # type: ignore[method-assign]
    run.step()
    assert len(setting.proxy.mixes) == 2


def test_an_engine_that_stays_frozen_is_told_again_to_go_on(tmp_path: Path) -> None:
    """As long as it does, and while no batch is ready: what it generates may be all that a group waits for."""
    setting = Setting(tmp_path, 1, max_lead=0)
    run = setting.start()
    setting.proxy.frozen = ["no answer", "no answer"]
    run.start()
    setting.proxy.slower = [None, None, None]  # no batch at the first questions
    said = len(setting.proxy.log)
    run.lease()
    assert setting.proxy.log[said:] == ["announce 0", "open 0"] * 2


def test_a_daemon_that_stays_away_ends_the_run(setting: Setting) -> None:
    run = setting.begun()
    setting.proxy.down = True
    for ask in (run.step, run.gate.open, run.gate.close):
        with pytest.raises(ProxyUnreachable):
            ask()


def test_the_end_of_a_run_waits_for_no_daemon_for_long(setting: Setting) -> None:
    run = setting.begun()
    setting.proxy.down = True
    run.close()
    assert setting.proxy.deadline_s == CLOSE_S
    assert [line.partition(" (")[2] for line in setting.said] == ["no answer)"] * 2


def test_what_goes_of_another_run_is_said_before_ours_is_announced(setting: Setting) -> None:
    setting.proxy.other_run = {"run": "r", "discarded": 12, "void": 2}
    run = setting.start()
    told: list[list[str]] = []
    run.progress.say = lambda line: told.append(list(setting.proxy.log)) if "another run" in line else None
    run.start()
    assert told == [[]]
    assert run.gone == {"other_run_episodes": 12, "other_run_leases": 2}


def test_an_engine_that_stands_alone_serves_while_the_trainer_trains(setting: Setting) -> None:
    run = setting.begun(colocated=False)
    names = setting.instants.names
    assert names == ["before the gate closes", "before the push", "after the push", "before the gate opens"]
    assert setting.proxy.upstreams == ("old",)
    names.clear()
    run.step()
    assert names.index("after training") < names.index("before the gate closes") < names.index("before the push")


@pytest.mark.parametrize("colocated", [True, False])
def test_engines_are_looked_at_before_each_step_though_batches_are_always_ready(
    setting: Setting, colocated: bool
) -> None:
    """One that serves another model by now has sampled some of this batch, which goes back untrained."""
    run = setting.begun(colocated=colocated)
    run.step()
    assert setting.learner.checks == 1

    def check() -> None:
        raise EngineLost("it serves another model")

    setting.learner.check = check  # type: ignore[method-assign]
    with pytest.raises(EngineLost):
        run.step()
    run.close()
    assert setting.learner.version == 1 and setting.proxy.gate == "open"
    assert setting.proxy.log.count("nack lease1") == 1


def test_a_trainer_says_for_whom_it_waits(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 1, max_lead=0)
    setting.proxy.slower = [None, ("coder", 2), ("coder", 2), ("coder", 1), None]
    setting.whole()
    said = [line for line in setting.said if line.startswith("waiting")]
    assert said == ["waiting for model 'coder', 2 updates behind", "waiting for model 'coder', 1 update behind"]
    assert setting.learner.version == 1


def test_acknowledgements_wait_for_the_checkpoint(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 5, save_freq=2)
    setting.whole()
    assert setting.told("open", "ack") == [
        "open 0", "open 1", "open 2", "ack lease0 1", "ack lease1 2", "open 3", "open 4", "ack lease2 3",
        "ack lease3 4", "open 5", "ack lease4 5",
    ]  # fmt: skip
    assert setting.disk.version == 5
    assert setting.run.keeper.held == ()


def test_no_checkpoints_but_the_last(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 3, save_freq=0)
    setting.whole()
    assert setting.instants.names.count("before the checkpoint is complete") == 1
    assert setting.told("ack") == ["ack lease0 1", "ack lease1 2", "ack lease2 3"]


def test_a_stop_between_checkpoints_saves_and_acknowledges_first(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 5, save_freq=10)
    run = setting.begun()
    run.step()
    setting.stop = True
    run.loop()
    run.close()
    assert setting.disk.version == 1
    assert setting.proxy.log[-2:] == ["ack lease0 1", "announce 1"]
    assert setting.proxy.upstreams == ()


def test_metrics_of_a_step(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 1)
    setting.proxy.make = lambda task: (episode(f"{task}a", 1.0, samples=2, turns=2), episode(f"{task}b", 0.0))
    setting.whole()
    (record,) = setting.lines()
    assert record["timing"].keys() == {"wait", "drain", "train", "update_actor", "save", "push"}
    del record["timing"]
    assert record.pop("idle").keys() == {"trainer", "engine"}
    assert record == {
        "step": 1, "policy_version": 1, "config": digest(setting.config), "batch": "lease0",
        "reward_mean": 0.5, "reward_std": 0.5, "groups": 2, "groups_without_signal": 0,
        "episodes": 4, "rejected_episodes": 0, "samples": 6, "sampled_tokens": 2 * (12 + 3),
        "prompt_tokens": 2 * (12 + 4),
        "merged_calls": 4, "merged_tokens": 2 * (2 * 7), "min_policy_version": 0, "max_policy_version": 0,
        "staleness_mean": 0.0, "staleness_max": 0, "uncertain_tokens": 0, "repaired_tokens": 0,
        "corrected_tokens": 0, "unstated_tokens": 0, "left_out_calls": {},
        "pg_loss": 0.5, "learner": {"actor/something": 2.0},
    }  # fmt: skip


def test_groups_whose_rewards_are_equal_are_counted(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 1)
    three = 0.1 + 0.1 + 0.1
    setting.proxy.make = lambda task: (episode(f"{task}a", three), episode(f"{task}b", 0.9 if task == "0g1" else 0.3))
    setting.whole()
    (record,) = setting.lines()
    assert (record["groups"], record["groups_without_signal"]) == (2, 1)


def test_equal_rewards_are_no_lack_where_nothing_is_compared(tmp_path: Path) -> None:
    """Each group is one episode, and their rewards differ."""
    setting = Setting(tmp_path, 1, group_size=1)
    setting.proxy.make = lambda task: (episode(f"{task}a", float(task == "0g1")),)
    run = setting.begun(rule=Rule(compares=False))
    run.step()
    (record,) = setting.lines()
    assert (record["groups"], record["groups_without_signal"]) == (2, 0)


@pytest.mark.parametrize("by_turn", [None, ByTurn()])
def test_what_agents_were_given_is_shown_as_it_was_given(by_turn: ByTurn | None) -> None:
    """The punishment for length has a figure of its own."""
    rule = Rule(shaping=Shaping(limit=3, buffer=2, factor=5.0), by_turn=by_turn)
    leased = batch("b", Group("t", (duel("a", 1.0), duel("b", 0.0))))
    admission = admit(leased, rule)
    assert all(admission.penalties.values())
    figures = batch_figures([(leased, admission)], to_rows("b", admission.groups, 1.0, by_turn), by_turn)
    assert figures["reward_by_agent"] == {"proposer": 0.5, "critic": -0.5}


MIXED = (PROCESSED | {"top_p": 0.8}, PROCESSED | {"temperature": 0}, None, PROCESSED)


def test_what_is_left_out_or_corrected_is_said_once_and_counted_in_each_step(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2)
    setting.proxy.make = lambda task: tuple(episode(f"{task}e{i}", i, turns=4, facts=MIXED) for i in range(2))
    setting.whole()
    lines = setting.lines()
    counted = [(line["corrected_tokens"], line["unstated_tokens"], line["left_out_calls"]) for line in lines]
    assert counted == [(4 * 3, 4 * 3, {"greedy": 4})] * 2
    said = [line for line in setting.said if line.startswith("calls ")]
    assert [line.partition(":")[0] for line in said] == [
        "calls are left out (greedy)", "calls are trained without a word on how they were sampled (unstated)",
    ]  # fmt: skip


def test_loggers_get_a_steps_figures_once_the_learners_by_its_names_and_ours_apart(tmp_path: Path) -> None:
    """Rewards are means over episodes, however many samples an episode came apart into."""
    setting = Setting(tmp_path, 2)
    setting.proxy.make = lambda task: (episode(f"{task}a", 1.0, samples=3, facts=MIXED[:1]), episode(f"{task}b", 0.0))
    setting.whole()
    assert sorted(setting.learner.logged) == [1, 2]
    logged = setting.learner.logged[2]
    theirs = {name: value for name, value in logged.items() if not name.startswith("ajet/")}
    assert theirs == {"actor/pg_loss": 0.5, "timing_s/update_actor": 1.5, "actor/something": 2.0}
    ours = {name.removeprefix("ajet/"): value for name, value in logged.items() if name.startswith("ajet/")}
    times = {name for name in ours if name.startswith("timing/")}
    assert 0 <= ours.pop("idle/trainer") <= 1
    assert times == {f"timing/{part}" for part in ("wait", "drain", "train", "save", "push")}
    line = setting.lines()[1]
    kept = {name: value for name, value in line.items() if isinstance(value, (int, float)) and name != "pg_loss"}
    assert {name: value for name, value in ours.items() if name not in times} == {
        name: value for name, value in kept.items() if name != "step"
    }
    assert (ours["reward_mean"], ours["reward_std"], ours["episodes"], ours["samples"]) == (0.5, 0.5, 4, 8)


def test_figures_of_a_table_are_logged_one_by_one() -> None:
    figures = {"left_out_calls": {"greedy": 4}, "batch": "b", "reward_mean": 0.5, "eval_reward_mean": None, "lr": 1e-3}
    assert logged({}, figures) == {"ajet/left_out_calls/greedy": 4.0, "ajet/reward_mean": 0.5}


def test_the_learner_says_which_temperatures_it_computes(tmp_path: Path) -> None:
    warm = PROCESSED | {"temperature": 0.7}
    setting = Setting(tmp_path, 1, group_size=2)
    setting.proxy.make = lambda task: tuple(
        episode(f"{task}e{i}", i, turns=3, facts=(PROCESSED, warm, None)) for i in range(2)
    )
    for several, temperatures in ((True, [1.0, 0.7]), (False, [0.7])):
        run = setting.start(rule=Rule(temperature=0.7, several=several))
        leased = run.lease()[0]
        rows = to_rows(leased.batch, run.admit(leased).groups, run.learner.rule.temperature)
        assert [row.temperature for row in rows] == temperatures * 4
        setting.proxy.nack(leased.batch)


def test_strict_trains_exact_calls_alone(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 1, sampling="strict")
    setting.proxy.make = lambda task: tuple(episode(f"{task}e{i}", i, facts=MIXED[i : i + 1]) for i in range(2))
    setting.whole()
    assert setting.learner.version == 0 and len(setting.proxy.filtered) == 4
    assert all(why.startswith("sampling: call 0g") for why in setting.proxy.filtered.values())


def test_length_is_punished_and_overlong_calls_are_masked_as_learner_and_settings_say(tmp_path: Path) -> None:
    """The rewards that agents gave stay as they were in the figures."""
    setting = Setting(tmp_path / "run", 1, overlong="mask")

    def make(task: str) -> tuple[BatchEpisode, ...]:
        one, other = (episode(f"{task}e{i}", float(i), sampled=8, task=task) for i in range(2))
        (part,) = one.samples
        return replace(one, samples=(replace(part, finish_reasons=("length",)),)), other

    setting.proxy.make = make
    run = setting.begun(rule=Rule(shaping=Shaping(limit=10, buffer=4, factor=0.5)))
    run.step()
    (line,) = setting.lines()
    assert (line["reward_mean"], line["overlong_penalty"], line["left_out_calls"]) == (0.5, -0.375, {"overlong": 2})
    assert [(row.reward, row.sampled) for row in setting.learner.rows] == [(-0.5, 0), (0.75, 8)] * 2
    assert [said for said in setting.said if "overlong" in said and "left out" in said]


def test_a_batch_with_nothing_to_train_is_acknowledged_and_makes_no_step(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2, no_signal="drop")
    setting.proxy.make = lambda task: tuple(episode(f"{task}e{i}", 1.0) for i in range(2))
    setting.whole()
    assert setting.learner.version == 0
    assert setting.told("ack") == ["ack lease0 0", "ack lease1 0"]
    assert set(setting.proxy.filtered) == {f"{n}g{g}e{i}" for n in range(2) for g in range(2) for i in range(2)}
    assert any("no_signal" in line for line in setting.said)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("elsewhere")])
def test_a_lease_without_anything_to_train_may_be_gone(tmp_path: Path, error: Exception) -> None:
    setting = Setting(tmp_path, 3, no_signal="drop")
    setting.proxy.make = lambda task: tuple(episode(f"{task}e{i}", 1.0, task=task) for i in range(2))

    def ack(*_: Any, **__: Any) -> None:
        setting.proxy.ready.clear()
        raise error

    setting.proxy.ack = ack  # type: ignore[method-assign]
    run = setting.begun()
    run.step()
    assert setting.learner.version == 0
    assert run.keeper.held == ()


def doubled(one: BatchEpisode) -> BatchEpisode:
    """The episode with a token that two of its calls have sampled."""
    (sample,) = one.samples
    (first, start, end), second = sample.spans
    return replace(one, samples=(replace(sample, spans=((first, start, end + 3), second)),))


@pytest.mark.parametrize("save_freq", [1, 2])
@pytest.mark.parametrize(("broken", "why"), [
    (lambda one: replace(one, samples=()), "no_samples: an episode without a complete call"),
    (lambda one: replace(one, samples=(), fault="no tree"), "unlawful_sample: no tree"),
    (doubled, "unlawful_sample: {0}/0: span of call {0}/0/c1 is outside the sample or overlaps another"),
], ids=["no call", "cannot be read", "a token of two calls"])  # fmt: skip
def test_the_proxy_hears_which_episodes_were_not_trained_and_why(
    tmp_path: Path, save_freq: int, broken: Callable[[BatchEpisode], BatchEpisode], why: str
) -> None:
    setting = Setting(tmp_path, 2, save_freq=save_freq)
    setting.proxy.make = lambda task: (
        episode(f"{task}a", 1.0), episode(f"{task}b", 0.0), broken(episode(f"{task}c", turns=2))
    )  # fmt: skip
    setting.whole()
    assert setting.learner.version == 2
    assert setting.told("ack") == ["ack lease0 1", "ack lease1 2"]
    names = [f"{n}g{g}c" for n in range(2) for g in range(2)]
    assert setting.proxy.filtered == {name: why.format(name) for name in names}


def test_a_push_that_fails_opens_the_gate_at_the_old_version_and_returns_the_batch(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2, save_freq=10)
    run = setting.begun(fail_push=RuntimeError("the weight push did not finish within 1 s"))
    with pytest.raises(RuntimeError, match="did not finish"):
        run.step()
    assert setting.proxy.gate == "closed"
    run.close()
    assert setting.proxy.gate == "open"
    assert setting.proxy.log[-3:] == ["nack lease0", "announce 0", "open 0"]
    assert setting.proxy.upstreams == ()


def test_each_part_of_the_end_is_tried_whatever_became_of_the_others(tmp_path: Path) -> None:
    """And what could not be done is said, under the reason why the run ends."""
    setting = Setting(tmp_path, 2, save_freq=10)
    run = setting.begun(fail_push=RuntimeError("the weight push failed"))
    with pytest.raises(RuntimeError, match="the weight push failed"):
        run.step()

    def lost(*_: Any) -> None:
        raise RuntimeError("Ray is gone")

    setting.learner.upstreams = setting.proxy.nack = setting.proxy.direct = lost  # type: ignore[assignment]
    run.close()
    assert setting.proxy.gate == "open"
    assert setting.said[-3:] == [
        "batch lease0 is not given back, and its lease runs out by itself (Ray is gone)",
        "agents are held for a trainer that has ended: ajet mix --ahead 0 (Ray is gone)",
        "the engines of this run stay announced (Ray is gone)",
    ]
    setting.proxy.gate, setting.proxy.open_gate, run.gate.closed = "closed", lost, True  # type: ignore[assignment]
    run.close()
    assert "the gate may stay closed, until a trainer of this model starts" in setting.said[-1]


def test_a_batch_in_the_checkpoint_is_not_returned_when_the_push_after_it_fails(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2)
    run = setting.begun(fail_push=RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        run.step()
    run.close()
    assert "nack lease0" not in setting.proxy.log
    setting.whole()
    assert "ack lease0 1" in setting.proxy.log
    assert sorted(setting.disk.weights) == sorted(set(setting.disk.weights))
    assert [(line["step"], line["batch"]) for line in setting.lines()] == [(1, "lease0"), (2, "lease1")]


@pytest.mark.parametrize("save_freq", [1, 2, 3])
@pytest.mark.parametrize("expires", [False, True], ids=["lease holds", "lease runs out"])
def test_killed_at_any_instant_everything_is_trained_once(tmp_path: Path, save_freq: int, expires: bool) -> None:
    """Whatever instant the process dies at, after a restart the checkpointed weights hold each episode exactly once."""
    reference = Setting(tmp_path / "whole", 4, save_freq=save_freq, progress=Unwritten)
    reference.whole()
    assert reference.instants.seen > 30
    for fatal in range(reference.instants.seen):
        setting = Setting(tmp_path / str(fatal), 4, save_freq=save_freq, total_steps=0, progress=Unwritten)
        setting.instants.fatal = fatal
        try:
            setting.start().start()
            setting.run.loop()
        except Killed:
            pass
        if expires:
            setting.proxy.expire()
        else:
            setting.proxy.take_back(setting.disk)
        setting.whole()
        tasks = sorted(f"{n}g{g}" for n in range(4) for g in range(2))
        assert sorted(setting.proxy.trained) == tasks, setting.instants.names[fatal]
        assert len(setting.disk.weights) == len(tasks) * 2, setting.instants.names[fatal]
        assert setting.disk.version == 4, setting.instants.names[fatal]


@pytest.mark.parametrize("save_freq", [1, 3])
def test_leases_that_run_out_at_any_instant_train_everything_once(tmp_path: Path, save_freq: int) -> None:
    """As while the daemon is away: what it gave comes again under another lease, whether or not it is trained."""

    def begin(folder: Path) -> Setting:
        setting = Setting(folder, 4, save_freq=save_freq, total_steps=0, progress=Unwritten)
        setting.proxy = MemoryProxy(4, setting.instants, singly=True)
        return setting

    reference = begin(tmp_path / "whole")
    reference.whole()
    for instant in range(reference.instants.seen):
        setting = begin(tmp_path / str(instant))
        setting.instants.happens = {instant: setting.proxy.expire}
        setting.whole()
        setting.proxy.expire()
        learned = {setting.proxy.given[entry.split("/")[0]] for entry in setting.disk.weights}
        assert len(setting.disk.weights) == 2 * len(learned), "nothing is in the weights twice"
        left = {task for tasks in setting.proxy.ready for task in tasks}
        assert len(setting.proxy.trained) == len(set(setting.proxy.trained))
        assert set(setting.proxy.trained) <= learned and left.isdisjoint(setting.proxy.trained)
        assert sorted(left | set(setting.proxy.trained)) == sorted(f"{n}g{g}" for n in range(4) for g in range(2))
        blocked = TrainedBatches.from_state(setting.disk.batches).blocked
        assert {f"{task}e0" for task in left & learned} <= blocked
        assert len(left) < setting.config.groups


def test_a_trainer_that_waits_says_what_a_batch_needs_and_what_is_there(tmp_path: Path) -> None:
    """After ten seconds, and again a minute later if something else is there then."""
    setting, now = Setting(tmp_path, 1, group_size=8, max_lead=0), [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    setting.time, setting.proxy.there = {"clock": clock}, (0, 0, {})
    setting.proxy.slower = [None] * 150
    later = 0, 2, {"code": 7, "": 1}
    setting.instants.happens = {setting.instants.seen + 120: lambda: setattr(setting.proxy, "there", later)}
    setting.whole()
    needs = "waiting for episodes: a batch is 2 groups (tasks) of 8 episodes of model 'policy'. At the proxy "
    assert [line for line in setting.said if line.startswith("waiting")] == [
        f"{needs}0 are ready and 0 open: nobody plays. Agents ask for this model at http://127.0.0.1:8484/v1",
        f"{needs}0 are ready and 2 open. 8 more are in lanes without a share (code, no lane)",
    ]


def test_a_proxy_that_does_not_tell_what_is_there_is_waited_for_in_silence(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 1, max_lead=0)
    setting.time = {"clock": iter(range(0, 10_000, 5)).__next__}
    setting.proxy.slower = [None] * 9
    setting.whole()
    assert not [line for line in setting.said if line.startswith("waiting")]
