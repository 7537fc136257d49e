"""Evaluations while training: when they are wanted, what is waited for, and where their figures go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import NotFound
from ajet_trainer.config import Config
from ajet_trainer.evaluation import EVAL_QUIET_S, EVAL_WAIT_S, NOBODY
from tests.trainer.scripted_learner import Killed
from tests.trainer.test_link import Clock
from tests.trainer.test_step import Setting


class Evaluating(Setting):
    """A run of some steps. What the proxy `plays` of an evaluation, it does whenever the trainer looks."""

    def __init__(self, folder: Path, *, steps: int = 4, **options: Any) -> None:
        super().__init__(folder, steps, **{"eval_every": 2, "eval_episodes": 4} | options)
        self.clock = Clock()
        self.time = {"clock": self.clock, "sleep": self.clock.sleep}
        self.ends: Callable[[], bool] = lambda: False

    def stopping(self) -> bool:
        return self.ends()

    def evaluated(self) -> list[tuple[int, float | None, int | None]]:
        """``(step, mean, episodes)`` of each line."""
        return [(line["step"], line.get("eval_reward_mean"), line.get("eval_episodes")) for line in self.lines()]


def plays(*rewards: float) -> Callable[[dict[str, Any]], None]:
    """One more of these at each look, until the evaluation is full."""

    def play(evaluation: dict[str, Any]) -> None:
        if evaluation["done"] < evaluation["wanted"]:
            evaluation["rewards"].append(rewards[evaluation["done"] % len(rewards)])
            evaluation["opened"] = evaluation["done"] = evaluation["done"] + 1

    return play


@pytest.fixture
def run(tmp_path: Path) -> Evaluating:
    made = Evaluating(tmp_path)
    made.proxy.plays = plays(0.0, 1.0)
    return made


def test_the_model_is_evaluated_before_the_first_step_and_after_every_second(run: Evaluating) -> None:
    run.whole()
    assert run.evaluated() == [(0, 0.5, 4), (1, None, None), (2, 0.5, 4), (3, None, None), (4, 0.5, 4)]
    assert all(line["eval_reward_std"] == 0.5 for line in run.lines() if "eval_episodes" in line)
    assert "eval" in run.lines()[0]["timing"] and "eval" not in run.lines()[1]["timing"]


def test_every_evaluation_is_of_one_version_with_the_gate_open(run: Evaluating) -> None:
    run.whole()
    log = run.proxy.log
    wanted = [line for line in log if line.startswith("evaluate")]
    assert wanted == [f"evaluate 4 at {version} open" for version in (0, 2, 4)]
    for version in (0, 2):
        after = log[log.index(f"evaluate 4 at {version} open") + 1 :]
        assert after.index("close") < after.index(f"open {version + 1}"), "the next step comes later"


def test_loggers_and_the_terminal_get_its_figures(run: Evaluating) -> None:
    run.whole()
    assert run.learner.logged[0]["ajet/eval_reward_mean"] == 0.5 and "ajet/reward_mean" not in run.learner.logged[0]
    assert (run.learner.logged[2]["ajet/eval_episodes"], run.learner.logged[2]["ajet/reward_mean"]) == (4.0, 0.5)
    assert "ajet/timing/eval" in run.learner.logged[2] and "ajet/eval_episodes" not in run.learner.logged[1]
    shown = [line for line in run.said if line.startswith("step ")]
    assert [("eval 0.50 (4)" in line) for line in shown] == [True, False, True, False, True]
    assert shown[0].startswith("step 0/4 · eval 0.50 (4)")


def test_off_is_the_default(tmp_path: Path) -> None:
    run = Evaluating(tmp_path, eval_every=Config().eval_every)
    run.whole()
    assert not run.proxy.evaluations
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4]


def test_where_nobody_plays_training_continues_and_says_so_once(run: Evaluating) -> None:
    run.proxy.plays = lambda evaluation: None
    before = run.clock()
    run.whole()
    assert run.said.count(NOBODY) == 1
    assert 3 * EVAL_QUIET_S <= run.clock() - before < 3 * EVAL_QUIET_S + 30
    assert run.evaluated() == [(1, None, None), (2, None, 0), (3, None, None), (4, None, 0)]


def test_one_that_does_not_end_is_left_with_what_it_has(run: Evaluating) -> None:
    def stuck(evaluation: dict[str, Any]) -> None:
        evaluation |= {"opened": 3, "done": 1, "rewards": [0.25]}

    run.proxy.plays = stuck
    run.whole()
    assert run.clock() >= 3 * EVAL_WAIT_S
    assert run.evaluated()[0] == (0, 0.25, 1)
    done = f"1 of 4 evaluation episodes are done after {EVAL_WAIT_S:.0f} s, and 0 were discarded"
    assert f"{done}; training continues" in run.said


@pytest.mark.parametrize("looks", [1, 2])
def test_a_stop_waits_for_no_evaluation(run: Evaluating, looks: int) -> None:
    """The part that was played by then says nothing of the whole, and the run saves, acknowledges and ends as
    always."""
    seen: list[int] = []

    def slow(evaluation: dict[str, Any]) -> None:
        if run.proxy.version == 2:
            seen.append(1)
            if len(seen) == looks:
                run.ends = lambda: True
        plays(0.25)(evaluation)

    run.proxy.plays = slow
    run.whole()
    assert run.evaluated()[-1] == (2, None, None)
    assert run.disk.version == 2 and "ack lease1 2" in run.proxy.log


def test_a_resumed_run_repeats_no_evaluation_that_it_has(run: Evaluating) -> None:
    run.ends = lambda: "ack lease2 3" in run.proxy.log
    run.whole()
    run.ends = lambda: False
    run.whole()
    assert run.evaluated() == [(0, 0.5, 4), (1, None, None), (2, 0.5, 4), (3, None, None), (4, 0.5, 4)]
    assert len(run.proxy.evaluations) == 3


def test_a_run_that_begins_again_keeps_the_evaluation_of_its_start(tmp_path: Path) -> None:
    run = Evaluating(tmp_path, save_freq=10)
    run.proxy.plays = plays(1.0)
    for fatal in (14, 20):
        run.instants.seen, run.instants.fatal = 0, fatal
        with pytest.raises(Killed):
            run.whole()
        run.proxy.expire()
    run.instants.fatal = None
    run.whole()
    assert [line["step"] for line in run.lines()] == [0, 1, 2, 3, 4]
    assert len([line for line in run.proxy.log if line == "evaluate 4 at 0 open"]) == 1


def test_an_evaluation_that_a_crash_cut_short_is_repeated_at_the_start_alone(run: Evaluating) -> None:
    whole = run.proxy.plays

    def crash(evaluation: dict[str, Any]) -> None:
        raise Killed("while an evaluation is played")

    run.proxy.plays = crash
    with pytest.raises(Killed):
        run.whole()
    run.proxy.plays = whole
    run.whole()
    assert run.evaluated()[0] == (0, 0.5, 4)
    assert [line for line in run.proxy.log if "at 0" in line] == ["evaluate 4 at 0 open"] * 2


def test_episodes_that_are_all_discarded_are_not_nobodys(run: Evaluating) -> None:
    def lose(evaluation: dict[str, Any]) -> None:
        evaluation["lost"] = 3

    run.proxy.plays = lose
    run.ends = lambda: run.clock() > EVAL_WAIT_S
    run.whole()
    assert not any("nobody plays" in line for line in run.said)
    assert any("and 3 were discarded; training continues" in line for line in run.said)


def test_a_daemon_that_knows_nothing_of_it_any_more_is_not_waited_for(run: Evaluating) -> None:
    def forgotten(evaluation: Mapping[str, Any]) -> None:
        raise NotFound("there is a later one of its model")

    run.proxy.plays = forgotten
    before = run.clock()
    run.whole()
    assert run.clock() == before
    assert run.evaluated() == [(1, None, None), (2, None, 0), (3, None, None), (4, None, 0)]
