"""Which episodes belong to an evaluation that a trainer wants, how many are missing, and what came of them."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import Evaluate
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused


@pytest.fixture
def rig(rig: LedgerRig) -> LedgerRig:
    rig.announce("m", 3)
    return rig


PLAYED = [{"task": "t", "reward": reward, "tokens": 1.0} for reward in (1.0, 0.5)]
"""Two episodes as `rig.call` samples them, in the order of their places."""


def told(rig: LedgerRig, name: str) -> dict[str, Any]:
    found = rig.state.plays.evaluation(name)
    assert found is not None
    return found.to_json()


def plays(rig: LedgerRig, reward: float | None = 1.0, **how: Any) -> str:
    """An evaluation episode to its end."""
    episode = rig.open(eval=True, **{"model": "m", "task": "t", **how})
    rig.ends(episode, reward)
    return episode


def test_episodes_belong_to_it_as_they_are_opened_until_it_is_full(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 2)
    assert told(rig, name) == {
        "evaluation": name, "model": "m", "policy_version": 3, "wanted": 2, "opened": 0, "done": 0, "lost": 0,
        "rewards": [], "mean_reward": None, "played": [],
    }  # fmt: skip
    assert rig.state.plays.wanted() == {"m": 2}
    first = rig.open(eval=True, model="m", task="t")
    assert (rig.state.plays.wanted(), told(rig, name)["opened"]) == ({"m": 1}, 1)
    second, third = plays(rig, 0.5), plays(rig, 0.0)
    assert rig.state.plays.wanted() == {}
    assert [rig.state.episodes[one].opening.evaluation for one in (first, second, third)] == [name, name, None]
    assert (told(rig, name)["done"], told(rig, name)["rewards"]) == (1, [0.5])
    rig.ends(first)
    assert told(rig, name) | {"evaluation": ""} == {
        "evaluation": "", "model": "m", "policy_version": 3, "wanted": 2, "opened": 2, "done": 2, "lost": 0,
        "rewards": [0.5, 1.0], "mean_reward": 0.75, "played": PLAYED,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("how", "belongs"),
    [
        ({"eval": True, "model": "m"}, True),
        ({"eval": True}, True),
        ({"eval": True, "model": "n"}, False),
        ({"eval": True, "members": {"a": "m"}}, False),
        ({"eval": True, "members": {"a": "m", "b": "n"}, "model": "m"}, True),
        ({"eval": True, "members": {"a": "m"}, "model": "n"}, False),
        ({"eval": False, "model": "m"}, False),
    ],
)
def test_only_an_evaluation_of_its_one_model_belongs_to_it(rig: LedgerRig, how: Any, belongs: bool) -> None:
    """An episode that names no model asks the only one that there is."""
    name = rig.evaluate("m", 2)
    assert rig.state.episodes[rig.open(**how)].opening.evaluation == (name if belongs else None)


def test_an_episode_that_a_header_makes_an_evaluation_as_it_opens_belongs_to_it(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 2)
    rig.begin("by-header", eval=True)
    rig.begin("by-header", eval=True)
    rig.begin("by-header")
    assert rig.state.episodes["by-header"].opening.evaluation == name
    assert (rig.state.episodes["by-header"].opening.place, told(rig, name)["opened"]) == (0, 1), "it has a place"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_header_that_comes_after_the_opening_is_refused_and_changes_nothing(rig: LedgerRig, wanted: bool) -> None:
    """However it was opened, and whatever has come of it, it would be in no evaluation."""
    if wanted:
        rig.evaluate("m", 2)
    rig.begin("called")
    for episode in ("called", rig.open(task="t"), rig.ready()):
        known = rig.state.episodes[episode]
        with refused(Conflict, "no_evaluation", param="X-AJet-Eval", match=f"{episode} was opened as no evaluation"):
            rig.commands.label(known, task="named", eval=True, at=rig.at)
        assert not known.opening.eval and known.opening.task != "named"
    with refused(Conflict, "no_evaluation"):
        rig.begin("called", eval=True)
    assert rig.state.plays.wanted() == ({"m": 2} if wanted else {})


def test_an_evaluation_that_awaits_judgements_is_not_done(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 1)
    rig.call(episode := rig.open(eval=True, model="m", judged=True))
    rig.seal(episode)
    assert (rig.state_of(episode), told(rig, name)["done"]) == ("sealed", 0)
    rig.judge(episode, 0.5)
    assert (rig.state_of(episode), told(rig, name)["done"], told(rig, name)["rewards"]) == ("recorded", 1, [0.5])


def test_a_discarded_one_is_wanted_again(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 1)
    for end in ("abort", "expire"):
        episode = rig.open(eval=True, model="m")
        assert rig.state.plays.wanted() == {}
        if end == "abort":
            rig.abort(episode)
        else:
            rig.later(101.0)
        assert rig.state.episodes[episode].state == "discarded"
        assert (rig.state.plays.wanted(), told(rig, name)["opened"]) == ({"m": 1}, 0)
    assert told(rig, name)["lost"] == 2
    plays(rig)
    assert told(rig, name)["done"] == 1


def test_what_was_discarded_has_its_place_again_when_all_were_given(rig: LedgerRig) -> None:
    """In the order in which they were given back, so that one that always fails holds up no other."""
    name = rig.evaluate("m", 4)
    evaluation = rig.state.plays.evaluation(name)
    assert evaluation is not None
    opened = [rig.open(eval=True, model="m") for _ in range(3)]
    for place in (2, 0):
        rig.abort(opened[place])
    found = []
    for _ in range(3):
        found.append(evaluation.due)
        rig.open(eval=True, model="m")
        rig.restart()
        evaluation = rig.state.plays.evaluation(name)
        assert evaluation is not None
    assert found == [3, 2, 0]
    assert rig.state.plays.wanted() == {} and not evaluation.given_back


def test_one_without_a_reward_is_done_and_counts_in_no_mean(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 2)
    bare = plays(rig, None)
    plays(rig, 0.25)
    assert (told(rig, name)["done"], told(rig, name)["rewards"]) == (2, [0.25])
    rig.reward(bare, 0.75)
    assert told(rig, name)["rewards"] == [0.75, 0.25], "it may come late, and be corrected"
    rig.reward(bare, 0.5)
    assert told(rig, name)["mean_reward"] == 0.375


def test_a_newer_one_takes_its_place(rig: LedgerRig) -> None:
    old = rig.evaluate("m", 2)
    late = rig.open(eval=True, model="m")
    new = rig.evaluate("m", 3)
    other = rig.evaluate("n", 1)
    assert rig.state.plays.evaluation(old) is None
    assert rig.state.plays.wanted() == {"m": 3, "n": 1}
    rig.ends(late)
    assert (told(rig, new)["opened"], told(rig, other)["opened"]) == (0, 0)
    assert rig.state.episodes[late].state == "recorded"


def test_what_another_version_would_play_is_wanted_no_more(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 2)
    begun = rig.open(eval=True, model="m")
    rig.gate_close()
    assert rig.state.plays.wanted() == {"m": 1}, "calls wait at the gate"
    rig.gate_open(4)
    assert rig.state.plays.wanted() == {}
    assert rig.state.episodes[plays(rig)].opening.evaluation is None
    rig.ends(begun)
    assert (told(rig, name)["opened"], told(rig, name)["done"]) == (1, 1)


def test_it_survives_a_restart_and_what_is_archived_still_counts(rig: LedgerRig) -> None:
    name = rig.evaluate("m", 2)
    plays(rig, 0.5)
    rig.restart()
    rig.archive()
    assert rig.state.plays.wanted() == {"m": 1}
    plays(rig, 1.0)
    assert told(rig, name)["mean_reward"] == 0.75


def test_the_first_call_of_an_episode_says_whose_evaluation_it_plays(rig: LedgerRig) -> None:
    """It opens by a header, and names no model itself."""
    name = rig.evaluate("m", 2)
    rig.announce("judge", 1)
    for episode, model in (("by-judge", "judge"), ("by-m", "m")):
        rig.begin(episode, model=model, eval=True)
    assert rig.state.episodes["by-judge"].opening.evaluation is None
    assert rig.state.episodes["by-m"].opening.evaluation == name
    assert rig.state.episodes["by-m"].opening.model is None


def test_one_name_is_one_evaluation(rig: LedgerRig) -> None:
    rig.run(rig.commands.trainers.evaluate(Evaluate("m", 2), evaluation="e", at=rig.at))
    for other in (Evaluate("n", 2), Evaluate("m", 3)):
        with refused(BadRequest, param="id", match="of another model or number"):
            rig.commands.trainers.evaluate(other, evaluation="e", at=rig.at)
    assert rig.commands.trainers.evaluate(Evaluate("m", 2), evaluation="e", at=rig.at) == ()


def test_a_place_is_taken_in_its_turn_or_not_at_all(rig: LedgerRig) -> None:
    with pytest.raises(Conflict, match="place 0 is not the next one of an evaluation"):
        rig.open(eval=True, model="m", place=0)
    rig.evaluate("m", 2)
    rig.open(eval=True, model="m", place=0)
    with refused(Conflict, "place_taken", param="place"):
        rig.open(eval=True, model="m", place=0)
    rig.open(eval=True, model="m", place=1)


def test_a_name_that_comes_again_is_another_evaluation(rig: LedgerRig) -> None:
    rig.announce("n", 3)
    rig.evaluate("m", 2, "again")
    before = plays(rig, None)
    rig.evaluate("m", 1, "other")
    rig.evaluate("n", 1, "again")
    rig.reward(before, 1.0)
    assert told(rig, "again")["rewards"] == []
