"""Results: what counts, and the table."""

from __future__ import annotations

from ajet_sdk.play.results import RunResult, RunResults

REWARDED = RunResult("sum/1", 0, "ep-1", "rewarded", 0.5, None, 1.25)
ZERO = RunResult("sum/1", 1, "ep-2", "rewarded", 0.0, None, 0.5)
ABORTED = RunResult("sum/1", 2, "ep-3", "aborted", None, "ValueError: no\nanswer", 2.0)
FAILED = RunResult("sum/1", 3, None, "failed", None, "x" * 500, 0.0)


def test_a_reward_of_zero_is_a_success_and_counts() -> None:
    results = RunResults((REWARDED, ZERO, ABORTED, FAILED))
    assert results.rewards == [0.5, 0.0]
    assert results.mean_reward == 0.25
    assert results.failures == [ABORTED, FAILED]
    assert (len(results), results[0], list(results)[-1]) == (4, REWARDED, FAILED)


def test_the_table() -> None:
    lines = RunResults((REWARDED, ZERO, ABORTED, FAILED)).table().splitlines()
    assert lines[0].split() == ["task", "#", "episode", "outcome", "reward", "seconds", "reason"]
    assert lines[1].split() == ["sum/1", "0", "ep-1", "rewarded", "0.5", "1.2"]
    assert lines[3].endswith("2.0      ValueError: no answer")
    assert lines[4].split()[2:4] == ["-", "failed"]
    assert max(map(len, lines)) < 200
    assert RunResults().table().endswith("0 episodes: none begun"), "nothing has no mean"
    assert lines[-1] == "4 episodes: 2 rewarded, 1 aborted, 1 failed, mean reward 0.25"


def test_what_an_agent_wrote_cannot_move_the_cursor() -> None:
    moving = RunResult("a\nb\x1b[31mc", 0, "ep-1", "aborted", None, "no\x1b[2J", 0.0)
    assert RunResults((moving,)).table().splitlines()[1].split("  ")[0] == "a b\\x1b[31mc"
    assert "\x1b" not in RunResults((moving,)).table()


def test_what_cannot_be_trained_because_of_its_engine_is_told_apart() -> None:
    blind = RunResult("t", 0, "ep-1", "rewarded", 1.0, "discarded by the proxy: incomplete_call (no_token_ids)", 1.0,
                      "no_token_ids", "incomplete_call")  # fmt: skip
    empty = RunResult("t", 1, "ep-2", "rewarded", 1.0, "no call to a model", 1.0, None, "incomplete_call")
    late = RunResult("t", 2, "ep-3", "rewarded", 1.0, "ValueError: after its reward", 1.0)
    assert late.kept, "a reward that was given stands"
    results = RunResults((REWARDED, blind, empty, ABORTED))
    assert (results.untrainable, results.kept) == ([blind], [REWARDED])
    assert results.table().endswith(
        "3 rewarded (the proxy discarded 1 as incomplete_call), 1 aborted, mean reward 0.8333, 1 cannot be trained"
    )


def test_a_draw_counts_in_the_means_of_those_who_played() -> None:
    won = RunResult("game", 0, "ep-1", "rewarded", 0.0, None, 1.0, agents={"white": 1.0, "black": -1.0})
    drawn = RunResult("game", 1, "ep-2", "rewarded", 0.0, None, 1.0)
    alone = RunResult("game", 2, "ep-3", "rewarded", 1.0, None, 1.0, agents={"white": 0.5})
    assert RunResults((won, drawn, ABORTED)).mean_by_agent == {"white": 0.5, "black": -0.5}
    assert RunResults((won, drawn, alone)).mean_by_agent == {"white": 0.5, "black": -0.5}


def test_nobody_says_that_rewards_are_equal_which_are_compared_apart() -> None:
    equal = RunResult("game", 0, "ep-1", "rewarded", 0.0, None, 1.0)
    scoped = RunResult("game", 1, "ep-2", "rewarded", 0.0, None, 1.0, scoped=True)
    assert RunResults((equal, equal)).without_signal == "has the reward 0 each time"
    assert RunResults((equal, scoped)).without_signal is None
