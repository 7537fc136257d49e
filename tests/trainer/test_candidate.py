"""Weights reach users only once they were evaluated: promoted, thrown away, waited for, and killed at every instant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import NotFound
from ajet_trainer.candidate import REFUSED, NotPromoted
from ajet_trainer.engines import EngineLost
from ajet_trainer.evaluation import EVAL_QUIET_S, WAITS
from ajet_trainer.step import Run
from tests.trainer.scripted_learner import Killed
from tests.trainer.test_link import Clock
from tests.trainer.test_step import Setting, Unwritten

Good = Callable[[int], bool]
"""Tells for the how many-eth evaluation of a candidate whether it does as well as what serves."""


class Gated(Setting):
    """A run whose weights serve once they were evaluated; each step takes one batch. A candidate that is not `good`
    gets no rewards. `serves` has what users were given, one set of weights after another."""

    def __init__(self, folder: Path, steps: int = 4, *, good: Good = lambda number: True, **options: Any) -> None:
        usual = {"candidate": "next", "promote_every": 2, "eval_episodes": 4, "total_steps": 0}
        super().__init__(folder, steps, **usual | options)
        self.clock, self.good, self.judged = Clock(), good, list[str]()
        self.time = {"clock": self.clock, "sleep": self.clock.sleep}
        self.proxy.plays = self.play
        self.serves: list[tuple[str, ...]] = []

    def stopping(self) -> bool:
        return self.stop

    def start(self, **changes: Any) -> Run:
        return super().start(**{"colocated": False} | changes)

    def play(self, told: dict[str, Any]) -> None:
        """All of it at once."""
        if told["done"]:
            return
        worth = 1.0
        if told["model"] == "next":
            assert self.learner.proposed == self.learner.version
            worth = float(self.good(len(self.judged)))
            self.judged.append("good" if worth else "bad")
        told["rewards"] = [worth] * told["wanted"]
        told["played"] = [{"task": f"t{place}", "reward": worth, "tokens": 9.0} for place in range(told["wanted"])]
        told["opened"] = told["done"] = told["wanted"]

    def go_on(self) -> None:
        """Processes one after another, until a batch is missing or one is killed."""
        while True:
            lease = self.proxy.lease

            def ends(ask: Any, lease: Any = lease) -> Any:
                self.stop = self.stop or not self.proxy.ready
                return lease(ask)

            self.proxy.lease = ends  # type: ignore[method-assign]
            run = self.start()
            push = self.learner.push

            def pushes(push: Any = push) -> None:
                push()
                self.serves.append(tuple(self.learner.weights))

            self.learner.push = pushes  # type: ignore[method-assign]
            try:
                run.start()
                run.loop()
            except NotPromoted:
                run.close()
                continue
            else:
                run.close()
                return
            finally:
                self.proxy.lease = lease  # type: ignore[method-assign]


@pytest.fixture
def gated(tmp_path: Path) -> Gated:
    return Gated(tmp_path)


def test_what_is_promoted_is_saved_then_served_then_acknowledged(gated: Gated) -> None:
    run = gated.begun()
    gated.instants.names.clear()
    gated.proxy.log.clear()
    run.step()
    assert gated.disk.version == 0 and gated.proxy.log == [] and run.keeper.held == ("lease0",)
    run.step()
    assert gated.instants.names[4:] == [
        "before a lease", "leased, answer on its way", "before training", "after training", "before an evaluation",
        "before a candidate", "before an evaluation", "before the checkpoint is complete",
        "after the checkpoint is complete", "before the gate closes", "before the push", "after the push",
        "before the gate opens", *["before an ack", "acked, answer on its way"] * 2,
    ]  # fmt: skip
    assert gated.proxy.log == [
        "candidate next 2 of policy", "evaluate 4 at 0 open", "evaluate 4 at 0 open", "close", "announce 2", "open 2",
        "ack lease0 1", "ack lease1 2",
    ]  # fmt: skip
    assert (gated.disk.version, gated.learner.served, run.keeper.held) == (2, 2, ())


def test_a_daemon_that_has_forgotten_what_serves_hears_it_before_the_candidate(gated: Gated) -> None:
    """Else it would refuse a candidate of what it does not know, and that ends a run."""
    run = gated.begun()
    run.step()
    train = gated.learner.train

    def emptied(rows: Any) -> dict[str, float]:
        gated.proxy.version = -1
        return train(rows)

    gated.learner.train = emptied  # type: ignore[method-assign]
    gated.proxy.log.clear()
    run.step()
    assert gated.proxy.log[:3] == ["announce 0", "open 0", "candidate next 2 of policy"]


def test_what_serves_is_evaluated_once_and_then_by_its_own_gate(gated: Gated) -> None:
    gated.go_on()
    models = [told["model"] for told in gated.proxy.evaluations.values()]
    assert models == ["policy", "next", "next"]
    assert json.loads((Path(gated.config.run_dir) / "incumbent.json").read_text())["version"] == 4
    assert [line.get("promoted") for line in gated.lines()] == [None, 1, None, 1]
    assert gated.lines()[1]["promotion_difference"] == gated.lines()[1]["promotion_lowest"] == 0.0
    assert (gated.lines()[1]["eval_reward_mean"], gated.lines()[1]["promotion_length"]) == (1.0, 1.0)
    assert len([line for line in gated.said if line.startswith("promoted: +0.000 over 4 pairs")]) == 2


def test_what_is_not_promoted_is_thrown_away_and_the_daemon_hears_why(tmp_path: Path) -> None:
    gated = Gated(tmp_path, 6, good=lambda number: number != 1)
    gated.go_on()
    assert gated.judged == ["good", "bad", "good"]
    assert gated.disk.version == 4, "the steps of what was thrown away are made again"
    episodes = {f"{batch}g{group}e{one}" for batch in (2, 3) for group in range(2) for one in range(2)}
    assert gated.proxy.filtered == dict.fromkeys(episodes, REFUSED)
    assert gated.told("ack") == [f"ack lease{lease} {version}" for lease, version in enumerate((1, 2, 2, 2, 3, 4))]
    assert len(gated.disk.weights) == 4 * 4
    assert [line["step"] for line in gated.lines()] == [1, 2, 3, 4]
    models = [told["model"] for told in gated.proxy.evaluations.values()]
    assert models == ["policy", "next", "next", "next"], "a restart knows the evaluation of what serves"


def test_the_end_of_a_run_is_a_gate_too(tmp_path: Path) -> None:
    gated = Gated(tmp_path, 3, total_steps=3)
    gated.go_on()
    assert (gated.disk.version, len(gated.judged)) == (3, 2)


def test_a_stop_between_two_gates_gives_back_what_was_trained(gated: Gated) -> None:
    run = gated.begun()
    run.step()
    gated.stop = True
    run.loop()
    run.close()
    assert (gated.disk.version, gated.told("nack", "ack")) == (0, ["nack lease0"])


def test_nobody_plays_so_the_candidate_waits_and_nothing_is_thrown_away(gated: Gated) -> None:
    whole, looks = gated.proxy.plays, [0]

    def later(told: dict[str, Any]) -> None:
        looks[0] += told["model"] == "next" and not told["done"]
        if told["model"] != "next" or looks[0] > 500:
            whole(told)

    gated.proxy.plays = later
    run = gated.begun()
    run.step()
    before = gated.clock()
    run.step()
    assert gated.clock() - before > 10 * EVAL_QUIET_S
    assert gated.said.count(WAITS) == 1 and "the candidate waits" in WAITS
    assert gated.disk.version == 2 and gated.told("nack") == []


def test_a_stop_ends_the_wait_and_gives_everything_back(gated: Gated) -> None:
    def stops(told: dict[str, Any]) -> None:
        gated.stop = True

    gated.proxy.plays = stops
    run = gated.begun()
    run.loop()
    run.close()
    assert (gated.disk.version, gated.learner.served) == (0, 0)
    assert sorted(gated.told("nack", "ack")) == ["nack lease0", "nack lease1"]


def test_an_engine_that_does_not_take_the_candidate_is_asked_again(gated: Gated) -> None:
    run = gated.begun()
    run.step()
    gated.learner.away = [EngineLost("it is gone")] * 3
    run.step()
    assert gated.said.count("the candidate waits for its engine: it is gone") == 1
    assert gated.disk.version == 2 and gated.learner.away == []


def test_a_daemon_that_forgot_the_evaluation_is_asked_anew(gated: Gated) -> None:
    forgets = [2]

    def play(told: dict[str, Any]) -> None:
        if forgets[0]:
            forgets[0] -= 1
            raise NotFound("it came back empty")
        gated.play(told)

    gated.proxy.plays = play
    run = gated.begun()
    run.step()
    run.step()
    assert gated.disk.version == 2
    assert len(gated.told("candidate next 2 of policy")) == 3 and len(gated.told("evaluate")) == 4


def test_evaluations_of_other_tasks_are_both_played_again(gated: Gated) -> None:
    """The incumbent was played over tasks that are no longer held out."""
    run = gated.begun()
    other = [{"task": "old", "reward": 1.0, "tokens": 9.0}] * 4
    of = {"version": 0, "model": "m", "eval_episodes": 4}
    (Path(gated.config.run_dir) / "incumbent.json").write_text(json.dumps(of | {"played": other}))
    run.step()
    run.step()
    assert gated.disk.version == 2
    assert [told["model"] for told in gated.proxy.evaluations.values()] == ["next", "policy", "next"]
    assert any("too few tasks in common" in line for line in gated.said)


@pytest.mark.parametrize("other", [{"version": 4}, {"model": "another"}, {"eval_episodes": 2}])
def test_the_evaluation_of_something_else_is_not_that_of_what_serves(gated: Gated, other: dict[str, Any]) -> None:
    """As after a rollback, or where nothing was promoted and the next start has another model."""
    run = gated.begun()
    of = {"version": 0, "model": "m", "eval_episodes": 4, "played": []} | other
    (Path(gated.config.run_dir) / "incumbent.json").write_text(json.dumps(of))
    run.step()
    run.step()
    assert [told["model"] for told in gated.proxy.evaluations.values()] == ["policy", "next"]


@pytest.mark.parametrize("expires", [False, True], ids=["lease holds", "lease runs out"])
def test_killed_at_any_instant_around_a_gate(tmp_path: Path, expires: bool) -> None:
    """Each episode is trained once or was thrown away, and users are given nothing but promoted checkpoints. The third
    of the candidates is bad, whenever it comes."""

    def begin(folder: Path) -> Gated:
        return Gated(folder, 8, good=lambda number: number != 2, progress=Unwritten)

    reference = begin(tmp_path / "whole")
    reference.go_on()
    assert reference.judged == ["good", "good", "bad", "good"]
    for fatal in range(reference.instants.seen):
        gated = begin(tmp_path / str(fatal))
        gated.instants.fatal = fatal
        promoted: list[tuple[str, ...]] = [()]

        def noted(gated: Gated = gated, promoted: list[tuple[str, ...]] = promoted) -> None:
            promoted.append(gated.disk.weights)

        gated.instants.happens = dict.fromkeys(range(10_000), noted)
        with pytest.raises(Killed):
            gated.go_on()
        if expires:
            gated.proxy.expire()
        else:
            gated.proxy.take_back(gated.disk)
        gated.go_on()
        name = gated.instants.names[fatal]
        trained = [gated.proxy.given[entry.split("/")[0]] for entry in gated.disk.weights]
        assert len(trained) == 2 * len(set(trained)), f"{name}: twice in the weights"
        refused = {episode.rpartition("e")[0] for episode, why in gated.proxy.filtered.items() if why == REFUSED}
        assert refused.isdisjoint(trained), name
        left = {task for tasks in gated.proxy.ready for task in tasks}
        leased = {task for tasks in gated.proxy.leased.values() for task in tasks}
        assert sorted({*trained, *refused, *left, *leased}) == sorted(f"{n}g{g}" for n in range(8) for g in range(2))
        assert len(gated.proxy.trained) == len(set(gated.proxy.trained)), f"{name}: acknowledged twice"
        assert set(gated.serves) <= set(promoted), f"{name}: users were given what was not promoted"
