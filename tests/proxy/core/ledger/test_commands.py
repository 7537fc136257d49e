"""The ledger's commands on episodes: opening, calling, retrying, rewarding, sealing; and what it is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from ajet_proxy.core.conversation.history import Mark
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.commands import CallAsked
from ajet_proxy.core.ledger.episode import MAX_REWARDS
from ajet_proxy.core.ledger.events import CallLost, CallStarted
from ajet_proxy.core.ledger.views import Wanted, records
from ajet_proxy.core.tokens import unpack_tokens
from ajet_proxy.core.trajectory.call import prompt_hash
from ajet_sdk.errors import AjetError, BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.limits import MAX_REWARD
from ajet_sdk.routes import Lease
from tests.kit.ledger_rig import LedgerRig, picture
from tests.kit.refused import refused
from tests.kit.strategies import packed_call

# ---- opening and calling


def test_a_call_opens_an_unknown_episode(rig: LedgerRig) -> None:
    rig.begin("new", task="t", eval=True, tenant="acme")
    opening = rig.state.episodes["new"].opening
    assert (opening.task, opening.eval, opening.tenant, opening.identified_by) == ("t", True, "acme", "path")
    assert rig.state.tallies.calls["running"] == 1


def test_a_call_of_another_tenant_is_refused(rig: LedgerRig) -> None:
    episode = rig.open(tenant="acme")
    with pytest.raises(Forbidden):
        rig.begin(episode, tenant="other")
    assert rig.begin(episode, tenant="acme")


def test_a_task_that_a_later_call_names_counts(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.begin(episode, prompt="0" * 24)
    assert rig.state.episodes[episode].opening.task == f"prompt-{'0' * 24}"
    rig.begin(episode, task="named")
    assert rig.state.episodes[episode].opening.task == "named"
    rig.begin(episode, task="too late", prompt="1" * 24)
    assert rig.state.episodes[episode].opening.task == "named"


def test_the_task_is_the_first_requests_prompt_whoever_ends_first(rig: LedgerRig) -> None:
    """It is known before anything is answered, so that episodes have their places by opening."""
    for order in ((0, 1), (1, 0)):
        episode = rig.open()
        rig.begin(episode)  # a probe has no prompt
        calls = [rig.begin(episode, prompt=digit * 24)[0] for digit in "56"]
        assert rig.state.episodes[episode].opening.task == f"prompt-{'5' * 24}"
        for index in order:
            rig.finish(episode, calls[index])
        assert rig.state.episodes[episode].opening.task == f"prompt-{'5' * 24}"


@pytest.mark.parametrize("end", ["reward", "seal"])
def test_an_episode_of_probes_alone_is_named_by_the_first_when_it_seals(rig: LedgerRig, end: str) -> None:
    episode = rig.open()
    (late,) = rig.begin(episode)
    rig.at += 1
    rig.call(episode, (6,))
    rig.finish(episode, late, (5,))
    assert rig.state.episodes[episode].opening.task is None
    getattr(rig, end)(episode)
    assert rig.state.episodes[episode].opening.task == prompt_hash([5])


def test_a_call_that_ends_after_the_seal_names_an_episode_too(rig: LedgerRig) -> None:
    episode = rig.open()
    (late,) = rig.begin(episode)
    rig.reward(episode)
    rig.finish(episode, late, (5,))
    assert (rig.state.episodes[episode].opening.task, rig.state_of(episode)) == (prompt_hash([5]), "ready")


def test_a_call_ends_once(rig: LedgerRig) -> None:
    episode = rig.open()
    done = rig.call(episode)
    assert rig.finish(episode, done) == ()
    assert rig.lose(episode, done) == ()
    (lost,) = rig.begin(episode)
    rig.lose(episode, lost)
    assert rig.finish(episode, lost) == ()
    assert rig.lose(episode, lost, "again") == ()


def test_an_unknown_call_is_refused(rig: LedgerRig) -> None:
    episode = rig.open()
    for bad in (episode, "nobody"):
        with pytest.raises(NotFound):
            rig.commands.lose_call(bad, "nothing", "x", at=0.0)
        with pytest.raises(NotFound):
            rig.commands.finish_call(bad, packed_call("nothing", [1], [2]), at=0.0)


def test_a_call_that_ends_after_its_episode_is_lost(rig: LedgerRig) -> None:
    episode = rig.open()
    (one,), (other,) = rig.begin(episode), rig.begin(episode)
    rig.abort(episode)
    _ = rig.finish(episode, one), rig.lose(episode, other, "disconnected")
    assert {entry.reason for entry in rig.state.episodes[episode].transcript.calls.values()} == {"episode_discarded"}
    assert rig.state.tallies.calls["running"] == 0



# ---- retries


def live(rig: LedgerRig, episode: str) -> list[str]:
    """Calls that count or may still count."""
    return [name for name, entry in rig.state.episodes[episode].transcript.calls.items() if entry.state != "lost"]


@pytest.mark.parametrize("first", ["running", "complete", "lost"])
def test_a_retry_takes_the_place_of_the_first_attempt(rig: LedgerRig, first: str) -> None:
    episode = rig.open()
    (old,) = rig.begin(episode, body="same")
    if first == "complete":
        rig.finish(episode, old)
    elif first == "lost":
        rig.lose(episode, old)
    (new,) = rig.begin(episode, body="same", retry=True)
    assert live(rig, episode) == [new]
    assert rig.state.episodes[episode].transcript.calls[old].reason == "retried"
    assert rig.state.tallies.calls["running"] == 1


# ---- rewards and sealing


def test_a_final_reward_seals(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.call(episode)
    rig.reward(episode, 0.5, final=False)
    assert rig.state_of(episode) == "open"
    rig.reward(episode, 1.0)
    assert rig.state_of(episode) == "ready"
    assert views.record(rig.state, episode, tokens="none")["reward"] == 1.5


def test_sealing_waits_for_the_last_call_in_flight(rig: LedgerRig) -> None:
    for ending in (rig.finish, rig.lose):
        episode = rig.open()
        rig.call(episode)
        (slow,) = rig.begin(episode)
        rig.reward(episode)
        assert rig.state_of(episode) == "sealed"
        ending(episode, slow)
        assert rig.state_of(episode) == "ready"


def test_a_reward_before_leasing_corrects(rig: LedgerRig) -> None:
    episode = rig.ready()
    rig.reward(episode, 0.25)
    rig.reward(rig.ready(), 0.5)
    batch = rig.batch()
    (group,) = views.batch(rig.state, batch).groups
    assert [item.reward for item in group.episodes] == [0.25, 0.5]
    assert [item.samples[0].reward for item in group.episodes] == [0.25, 0.5]
    assert [len(item.rewards) for item in group.episodes] == [2, 2]


def test_as_many_rewards_as_there_may_be_add_up_to_a_number(rig: LedgerRig) -> None:
    for sign in (1, -1):
        assert math.isfinite((sign * MAX_REWARD * MAX_REWARDS) ** 2 * 1e6)
        rig.reward(rig.ready(), sign * MAX_REWARD)


def test_a_reward_for_a_call_needs_the_call(rig: LedgerRig) -> None:
    episode = rig.open()
    call = rig.call(episode)
    with pytest.raises(NotFound):
        rig.reward(episode, 1.0, call="nothing")
    rig.reward(episode, 1.0, call=call, agent="", final=False)


@pytest.mark.parametrize("state", ["open", "sealed", "ready"])
def test_aborting_discards(rig: LedgerRig, state: str) -> None:
    episode = rig.in_state(state)
    rig.abort(episode, "tired")
    known = rig.state.episodes[episode]
    assert (known.state, known.reason, known.detail) == ("discarded", "aborted", "tired")
    assert rig.abort(episode) == ()
    assert rig.lease(group_size=1) is None


# ---- queries


def test_what_is_asked_about_unknown_episodes(rig: LedgerRig) -> None:
    assert rig.state.episodes.find("no") is None
    with pytest.raises(NotFound, match="no episode no"):
        rig.state.episodes.known("no")
    with pytest.raises(NotFound, match="no batch no"):
        rig.state.batches.known("no")


def test_what_is_asked_about_known_ones(rig: LedgerRig) -> None:
    episode = rig.open(model="m", agent="a", tenant="acme")
    (call,), known = rig.begin(episode, tenant="acme"), rig.state.episodes.known(episode)
    assert (known.opening.tenant, known.opening.agent) == ("acme", "a")
    assert [known.opening.model_for("b", asked, ("", "x")) for asked in ("y", "m", "", "x")] == ["m", "m", "m", None]
    assert rig.state.episodes.by_call[call] == episode
    assert known.transcript.packed(call) is None
    rig.finish(episode, call, (1, 2), (3,))
    found = known.transcript.packed(call)
    assert found is not None and (found.turn.start, unpack_tokens(found.text)) == (2, (1, 2, 3))
    assert [item["episode"] for item in records(rig.state, Wanted(5, "open"))["episodes"]] == [episode]


def test_every_refusal_leaves_the_ledger_as_it_was(rig: LedgerRig) -> None:
    episode = rig.in_state("trained")
    before = picture(rig.state)
    for command in (lambda: rig.begin(episode), lambda: rig.abort(episode), lambda: rig.lease(groups=0)):
        with pytest.raises(AjetError):
            command()
    assert picture(rig.state) == before
    assert rig.run(rig.commands.leases.lease(Lease(), batch="none", at=rig.at)) == ()


class Said:
    """A history that begins with `marks`."""

    def __init__(self, *marks: Mark) -> None:
        self.marks = marks

    def beginnings(self, lengths: object) -> Iterator[Mark]:
        return iter(self.marks)

    def after(self, given: object, captured: object) -> tuple[Mark, ...]:
        raise NotImplementedError


SENT: dict[str, Any] = {"body_hash": "b", "idempotency_key": None, "retries": 0}
MARK = Mark("what was said")


def test_a_request_continues_what_was_said_or_is_the_same_again(rig: LedgerRig) -> None:
    episode = rig.open()
    (call,) = rig.begin(episode, body="b", key="k")
    whole = packed_call(call, [1], [2])
    rig.run(rig.commands.finish_call(episode, whole, at=rig.at, marks=(MARK,)))
    assert rig.state.episodes.continued(Said(MARK), **SENT) == (episode,)
    assert rig.state.episodes.continued(Said(Mark("other")), **SENT) == rig.state.episodes.continued(None, **SENT) == ()
    rig.state.episodes.lineage.add_request(episode, "b", "k")
    assert rig.state.episodes.continued(None, **{**SENT, "idempotency_key": "k"}) == (episode,)
    rig.seal(episode)
    assert rig.state.episodes.continued(Said(MARK), **{**SENT, "idempotency_key": "k"}) == ()


@pytest.mark.parametrize("end", ["complete", "lost"])
def test_what_a_replaced_attempt_is_told_can_be_gone_on_from(rig: LedgerRig, end: str) -> None:
    episode = rig.open()
    (old,) = rig.begin(episode, body="b")
    rig.begin(episode, body="b", retry=True)
    if end == "complete":
        whole = packed_call(old, [1], [2])
        events = rig.run(rig.commands.finish_call(episode, whole, at=rig.at, marks=(MARK,)))
    else:
        events = rig.run(rig.commands.lose_call(episode, old, "no_logprobs", at=rig.at, marks=(MARK,)))
    assert list(events) == [CallLost(rig.at, episode, old, "retried", (MARK,))]
    assert rig.state.episodes.continued(Said(MARK), **SENT) == (episode,)
    assert rig.state.tallies.calls["running"] == 1


def test_an_episode_opens_with_what_is_to_be_noted(rig: LedgerRig) -> None:
    started = CallStarted(rig.at, "ep", ("c",), "m", "", "lineage", **SENT)
    rig.run(rig.commands.begin_call(CallAsked(started, "", metadata={"may_continue": ["x"]}), None))
    assert views.record(rig.state, "ep", tokens="none")["metadata"] == {"may_continue": ["x"]}


def test_a_state_is_that_of_a_call(rig: LedgerRig) -> None:
    episode = rig.open()
    call = rig.call(episode)
    with refused(BadRequest, param="state", match="name the call too"):
        rig.reward(episode, 0.0, state="kitchen", final=False)
    rig.reward(episode, 0.0, id="r", call=call, state="kitchen", final=False)
    rig.restart()
    assert rig.state.episodes[episode].rewards["r"].state == "kitchen"


# ---- answers by their ids


def test_a_reward_names_a_call_by_the_id_of_its_answer() -> None:
    rig = LedgerRig()
    one, other = rig.open(), rig.open()
    calls = rig.begin(one, choices=2)
    for call in calls:
        rig.finish(one, call, response="shared")
    alone = rig.call(other)
    with refused(Conflict, "several_calls", param="response"):
        rig.reward(one, response="shared", final=False)
    rig.reward(one, response="shared", call=calls[1], final=False)
    for stranger in (f"answer-{alone}", "nobody's"):
        with refused(NotFound, "unknown_response", param="response"):
            rig.reward(one, response=stranger, final=False)
    assert [given.call for given in rig.state.episodes[one].rewards.values()] == [calls[1]]


def test_an_answer_of_several_calls_is_forgotten_with_the_last_of_them() -> None:
    rig = LedgerRig()
    first, second = rig.open(), rig.open()
    for episode in (first, second):
        (call,) = rig.begin(episode)
        rig.finish(episode, call, response="same")
    assert len(rig.state.episodes.by_response["same"]) == 2
    for left, episode in ((1, first), (0, second)):
        rig.abort(episode)
        rig.archive()
        assert len(rig.state.episodes.by_response.get("same", ())) == left


def test_what_is_to_be_graded_is_sealed_by_no_reward() -> None:
    """A grader has the last word, however soon a trainer asks."""
    rig = LedgerRig(watch=True)
    episode = rig.open(task="t", graded=True)
    rig.call(episode)
    rig.reward(episode, 1.0)
    assert rig.state.episodes[episode].state == "open"
    rig.reward(episode, 0.0)
    rig.seal(episode)
    known = rig.state.episodes[episode]
    assert (known.state, known.reward()) == ("ready", 0.0)


@pytest.mark.parametrize("by", ["call", "response"])
def test_a_reward_of_a_call_that_another_agent_made_is_refused(by: str) -> None:
    """It would concern nobody."""
    rig = LedgerRig(watch=True)
    episode = rig.open(task="t")
    call = rig.call(episode, agent="white")
    named = {"call": call} if by == "call" else {"response": f"answer-{call}"}
    with refused(NotFound, "unknown_call", param="agent", match="is of agent 'white', not of 'black'"):
        rig.reward(episode, 1.0, agent="black", **named)
    rig.reward(episode, 1.0, agent="white", **named)
    assert rig.state.episodes[episode].rewarded("m")
