"""The ledger's commands: what each one makes true, what each one refuses."""

from __future__ import annotations

import pytest

from ajet_proxy.core import events as ev
from ajet_proxy.core.call import prompt_hash
from ajet_proxy.core.ledger import LedgerSettings
from ajet_sdk.errors import AjetError, BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.routes import EPISODE_STATES, Abort, Ack, Extend, GateClose, GateOpen, Lease, Policy, Reward
from tests.kit.ledger_rig import LedgerRig
from tests.kit.strategies import make_call


@pytest.fixture
def rig() -> LedgerRig:
    return LedgerRig(watch=True)


# ---- opening and calling


def test_an_episode_opens_with_the_proxys_timeouts_or_its_own(rig: LedgerRig) -> None:
    assert rig.ledger.episodes[rig.open()].idle_timeout == 100.0
    own = rig.ledger.episodes[rig.open(idle_timeout=5.0, wall_timeout=7.0)]
    assert (own.idle_timeout, own.wall_timeout) == (5.0, 7.0)
    for name in ("idle_timeout", "wall_timeout"):
        with pytest.raises(BadRequest) as caught:
            rig.open(**{name: 0.0})
        assert caught.value.param == name


def test_an_episode_opens_once(rig: LedgerRig) -> None:
    with pytest.raises(Conflict):
        rig.open(rig.open())


def test_a_call_opens_an_unknown_episode(rig: LedgerRig) -> None:
    rig.begin("new", task="t", eval=True, tenant="acme")
    episode = rig.ledger.episodes["new"]
    assert (episode.task, episode.eval, episode.tenant, episode.identified_by) == ("t", True, "acme", "path")
    assert rig.ledger.in_flight() == 1


def test_a_call_of_another_tenant_is_refused(rig: LedgerRig) -> None:
    episode = rig.open(tenant="acme")
    with pytest.raises(Forbidden):
        rig.begin(episode, tenant="other")
    assert rig.begin(episode, tenant="acme")


@pytest.mark.parametrize("state", [state for state in EPISODE_STATES if state != "open"])
def test_a_call_into_an_episode_that_is_not_open_is_refused(rig: LedgerRig, state: str) -> None:
    with pytest.raises(Conflict):
        rig.begin(rig.in_state(state))


def test_labels_on_a_later_call_count(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.call(episode)
    assert rig.ledger.episodes[episode].task == prompt_hash([1, 2])
    rig.begin(episode, task="named", eval=True)
    assert (rig.ledger.episodes[episode].task, rig.ledger.episodes[episode].eval) == ("named", True)
    rig.begin(episode, task="too late", eval=True)
    assert rig.ledger.episodes[episode].task == "named"


def test_the_task_is_the_first_calls_prompt_whoever_ends_first(rig: LedgerRig) -> None:
    for order in ((0, 1), (1, 0)):
        episode = rig.open()
        (first,) = rig.begin(episode)
        rig.at += 1
        (second,) = rig.begin(episode)
        for index in order:
            rig.finish(episode, (first, second)[index], [(5,), (6,)][index])
        assert rig.ledger.episodes[episode].task == prompt_hash([5])


def test_several_choices_are_several_calls(rig: LedgerRig) -> None:
    episode = rig.open()
    first, second = rig.begin(episode, choices=2)
    rig.finish(episode, first)
    rig.lose(episode, second, "truncated")
    record = rig.ledger.record(episode, tokens=False)
    assert [(call["call"], call["complete"], call.get("reason")) for call in record["calls"]] == [
        (first, True, None), (second, False, "truncated"),
    ]


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
            rig.ledger.lose_call(bad, "nothing", "x", at=0.0)
        with pytest.raises(NotFound):
            rig.ledger.finish_call(make_call("nothing", [1], [2], episode=bad), at=0.0, task_hash="t")


def test_a_call_that_ends_after_its_episode_is_lost(rig: LedgerRig) -> None:
    episode = rig.open()
    (call,) = rig.begin(episode)
    rig.abort(episode)
    rig.finish(episode, call)
    assert rig.ledger.episodes[episode].calls[call].reason == "episode_discarded"
    assert rig.ledger.in_flight() == 0


# ---- retries


def live(rig: LedgerRig, episode: str) -> list[str]:
    """Calls that count or may still count."""
    return [name for name, entry in rig.ledger.episodes[episode].calls.items() if entry.state != "lost"]


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
    assert rig.ledger.episodes[episode].calls[old].reason == "retried"
    assert rig.ledger.in_flight() == 1


def test_the_same_body_without_the_word_retry_is_another_call(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.begin(episode, body="same")
    rig.begin(episode, body="same")
    assert len(live(rig, episode)) == 2


def test_a_retry_without_a_first_attempt_is_a_call(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.begin(episode, body="one", retry=True)
    rig.begin(episode, body="two", retry=True)
    assert len(live(rig, episode)) == 2


def test_an_equal_idempotency_key_is_enough(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.begin(episode, body="one", key="k")
    (other,) = rig.begin(episode, body="two", key="another")
    (new,) = rig.begin(episode, body="three", key="k")
    assert live(rig, episode) == [other, new]


def test_a_retry_replaces_the_attempt_that_failed_and_not_its_twin(rig: LedgerRig) -> None:
    episode = rig.open()
    (failed,) = rig.begin(episode, body="same")
    rig.at += 1
    (twin,) = rig.begin(episode, body="same")
    rig.lose(episode, failed)
    rig.finish(episode, twin)
    (again,) = rig.begin(episode, body="same", retry=True)
    rig.lose(episode, again)
    (third,) = rig.begin(episode, body="same", retry=True)
    assert live(rig, episode) == [twin, third]


def test_all_choices_of_the_first_attempt_are_replaced(rig: LedgerRig) -> None:
    episode = rig.open()
    first, _second = rig.begin(episode, choices=2, body="same")
    rig.finish(episode, first)
    new = rig.begin(episode, choices=2, body="same", retry=True)
    assert live(rig, episode) == list(new)


def test_a_repeated_call_is_trained_once(rig: LedgerRig) -> None:
    episode = rig.open(task="t")
    rig.call(episode, body="same")
    rig.call(episode, body="same", retry=True)
    rig.reward(episode)
    (delivered,) = rig.ledger.ready_episodes()
    assert len(delivered.samples) == 1
    assert sum(delivered.samples[0].loss_mask) == 1


# ---- rewards and sealing


def test_a_final_reward_seals(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.call(episode)
    rig.reward(episode, 0.5, final=False)
    assert rig.state(episode) == "open"
    rig.reward(episode, 1.0)
    assert rig.state(episode) == "ready"
    assert rig.ledger.record(episode, tokens=False)["reward"] == 1.5


def test_sealing_waits_for_the_last_call_in_flight(rig: LedgerRig) -> None:
    for ending in (rig.finish, rig.lose):
        episode = rig.open()
        rig.call(episode)
        (slow,) = rig.begin(episode)
        rig.reward(episode)
        assert rig.state(episode) == "sealed"
        ending(episode, slow)
        assert rig.state(episode) == "ready"


def test_sealing_without_reward_or_call_discards(rig: LedgerRig) -> None:
    poor, empty = rig.open(), rig.open()
    rig.call(poor)
    rig.seal(poor)
    rig.reward(empty)
    assert [rig.ledger.episodes[name].reason for name in (poor, empty)] == ["no_reward", "incomplete_call"]


def test_a_reward_that_is_repeated_counts_once(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.call(episode)
    rig.reward(episode, 1.0, id="r")
    assert rig.reward(episode, 1.0, id="r") == ()
    with pytest.raises(Conflict) as caught:
        rig.reward(episode, 2.0, id="r")
    assert caught.value.code == "reward_exists"


@pytest.mark.parametrize("state", ["leased", "trained"])
def test_a_reward_after_leasing_is_refused_but_its_repetition_is_not(rig: LedgerRig, state: str) -> None:
    episode = rig.in_state(state)
    assert rig.reward(episode, 1.0, id="given") == ()
    with pytest.raises(Conflict):
        rig.reward(episode, 1.0, id="new")


def test_a_reward_before_leasing_corrects(rig: LedgerRig) -> None:
    episode = rig.ready()
    rig.reward(episode, 0.25)
    rig.reward(rig.ready(), 0.5)
    batch = rig.lease()
    assert batch is not None
    (group,) = rig.ledger.batch(batch).groups
    assert [item.reward for item in group.episodes] == [0.25, 0.5]
    assert [item.samples[0].reward for item in group.episodes] == [0.25, 0.5]
    assert [len(item.rewards) for item in group.episodes] == [2, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_must_be_finite(rig: LedgerRig, value: float) -> None:
    with pytest.raises(BadRequest):
        rig.reward(rig.open(), value)


def test_a_reward_for_a_call_needs_the_call(rig: LedgerRig) -> None:
    episode = rig.open()
    call = rig.call(episode)
    with pytest.raises(NotFound):
        rig.reward(episode, 1.0, call="nothing")
    rig.reward(episode, 1.0, call=call, agent="", final=False)


def test_sealing_aborting_and_touching_an_unknown_episode(rig: LedgerRig) -> None:
    ledger = rig.ledger
    for command in (
        lambda: ledger.seal("no", at=0.0), lambda: ledger.abort("no", Abort(), at=0.0),
        lambda: ledger.heartbeat("no", at=0.0), lambda: ledger.record("no", tokens=False),
        lambda: ledger.reward("no", Reward(1.0), reward_id="r", at=0.0),
    ):
        with pytest.raises(NotFound):
            command()


@pytest.mark.parametrize("state", ["open", "sealed", "ready"])
def test_aborting_discards(rig: LedgerRig, state: str) -> None:
    episode = rig.in_state(state)
    rig.abort(episode, "tired")
    known = rig.ledger.episodes[episode]
    assert (known.state, known.reason, known.detail) == ("discarded", "aborted", "tired")
    assert rig.abort(episode) == ()
    assert rig.lease(group_size=1) is None


def test_sealing_and_touching_what_is_sealed_changes_nothing(rig: LedgerRig) -> None:
    episode = rig.ready()
    assert rig.seal(episode) == ()
    assert rig.run(rig.ledger.heartbeat(episode, at=rig.at)) == ()


# ---- batches


def leased(rig: LedgerRig, batch: str | None) -> list[list[str]]:
    assert batch is not None
    return [[item.episode for item in group.episodes] for group in rig.ledger.batch(batch).groups]


def test_groups_go_in_the_order_of_their_completion(rig: LedgerRig) -> None:
    a1 = rig.ready("a")
    b1 = rig.ready("b")
    b2 = rig.ready("b")
    a2 = rig.ready("a")
    a3 = rig.ready("a")
    assert leased(rig, rig.lease()) == [[b1, b2]]
    assert leased(rig, rig.lease()) == [[a1, a2]]
    assert rig.lease() is None
    assert rig.state(a3) == "ready"
    assert rig.ledger.status()["groups"] == {"waiting": 1, "ready": 0, "leased": 2}


def test_a_lease_is_whole_or_not_at_all(rig: LedgerRig) -> None:
    for _ in range(3):
        rig.ready("a")
    assert rig.lease(groups=2) is None
    rig.ready("a")
    assert len(leased(rig, rig.lease(groups=2))) == 2


def test_a_batch_is_of_one_model(rig: LedgerRig) -> None:
    rig.announce("m", 3)
    rig.announce("n", 5)
    rig.ready("t", model="n")
    mine = rig.ready("t", model="m")
    assert rig.lease() is None
    assert rig.lease(model="other", group_size=1) is None
    batch = rig.lease(model="m", group_size=1)
    assert leased(rig, batch) == [[mine]]
    assert batch is not None
    assert rig.ledger.batch(batch).policy_version == 3


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"groups": 0}, "groups"), ({"group_size": 0}, "group_size"), ({"max_staleness": -1}, "max_staleness"),
     ({"lease_s": 0.0}, "lease_s")],
)
def test_a_lease_of_nonsense_is_refused(rig: LedgerRig, fields: dict[str, int], name: str) -> None:
    rig.ready()
    with pytest.raises(BadRequest) as caught:
        rig.lease(**fields)
    assert caught.value.param == name


def test_what_is_too_old_is_discarded_and_what_is_not_is_leased(rig: LedgerRig) -> None:
    rig.announce(version=4)
    old, edge, fresh = rig.ready("a", version=1), rig.ready("a", version=2), rig.ready("b", version=4)
    mixed = rig.open(task="b")
    rig.call(mixed, version=4)
    rig.call(mixed, (1, 2, 3, 4), (5,), version=0)
    rig.reward(mixed)
    assert leased(rig, rig.lease(max_staleness=2, group_size=1)) == [[edge]]
    assert {name: rig.state(name) for name in (old, edge, fresh, mixed)} == {
        old: "discarded", edge: "leased", fresh: "ready", mixed: "discarded",
    }
    assert rig.ledger.status()["discarded"] == {"stale": 2}


def test_staleness_discards_even_where_nothing_is_left_to_lease(rig: LedgerRig) -> None:
    rig.announce(version=4)
    rig.ready(version=1)
    assert rig.lease(max_staleness=0) is None
    assert rig.ledger.status()["discarded"] == {"stale": 1}


def test_an_acknowledged_batch_is_trained_once(rig: LedgerRig) -> None:
    episode = rig.ready()
    batch = rig.lease(group_size=1)
    assert batch is not None
    rig.ack(batch, 2)
    assert rig.state(episode) == "trained"
    assert rig.ack(batch, 2) == ()
    for command in (rig.nack, rig.extend):
        with pytest.raises(Conflict):
            command(batch)
    with pytest.raises(BadRequest):
        rig.ack(batch, -1)


def test_a_returned_batch_forms_the_same_groups_again(rig: LedgerRig) -> None:
    names = [rig.ready("a") for _ in range(2)]
    batch = rig.lease()
    later = [rig.ready("a") for _ in range(2)]
    assert batch is not None
    rig.nack(batch)
    assert rig.nack(batch) == ()
    with pytest.raises(Conflict):
        rig.extend(batch)
    assert leased(rig, rig.lease()) == [names]
    assert leased(rig, rig.lease()) == [later]


def test_a_lease_that_runs_out_returns_its_episodes(rig: LedgerRig) -> None:
    episode = rig.ready()
    batch = rig.lease(group_size=1, lease_s=50.0)
    assert batch is not None
    rig.at += 40
    rig.extend(batch, 50.0)
    rig.at += 49
    assert rig.expire() == ()
    rig.at += 1
    rig.expire()
    assert rig.state(episode) == "ready"
    assert rig.ledger.batches[batch].state == "returned"


def test_a_late_acknowledgement_counts_while_nobody_else_took_the_episodes(rig: LedgerRig) -> None:
    episode = rig.ready()
    batch = rig.lease(group_size=1)
    assert batch is not None
    rig.nack(batch)
    rig.ack(batch)
    assert rig.state(episode) == "trained"
    assert rig.lease(group_size=1) is None


def test_a_late_acknowledgement_is_refused_when_an_episode_went_elsewhere(rig: LedgerRig) -> None:
    for spoil in ("lease", "train", "abort"):
        episode = rig.ready(spoil)
        batch = rig.lease(group_size=1)
        assert batch is not None
        rig.nack(batch)
        if spoil == "abort":
            rig.abort(episode)
        else:
            other = rig.lease(group_size=1)
            if spoil == "train" and other is not None:
                rig.ack(other)
        with pytest.raises(Conflict) as caught:
            rig.ack(batch)
        assert caught.value.code == "lease_expired"


def test_an_unknown_batch(rig: LedgerRig) -> None:
    ledger = rig.ledger
    for command in (
        lambda: ledger.ack("no", Ack(1), at=0.0), lambda: ledger.nack("no", at=0.0), lambda: ledger.batch("no"),
        lambda: ledger.extend("no", Extend(), at=0.0),
    ):
        with pytest.raises(NotFound):
            command()


def test_an_evaluation_never_enters_a_batch(rig: LedgerRig) -> None:
    rig.in_state("recorded")
    assert rig.lease(group_size=1) is None


# ---- one episode over several models


def test_an_episode_of_several_models_is_trained_when_all_are(rig: LedgerRig) -> None:
    episode = rig.open(task="t", members={"solver": "m", "critic": "n"})
    assert rig.ledger.model_of(episode, "critic") == "n"
    rig.call(episode, model="m", agent="solver")
    rig.call(episode, model="n", agent="critic")
    rig.call(episode, model="judge")
    rig.reward(episode, 1.0, agent="solver", final=False)
    rig.reward(episode, 0.5)
    solver = rig.lease(model="m", group_size=1)
    assert solver is not None
    assert rig.state(episode) == "leased"
    ((delivered,),) = (group.episodes for group in rig.ledger.batch(solver).groups)
    assert (delivered.model, delivered.reward) == ("m", 1.5)
    assert [(sample.agent, sample.reward) for sample in delivered.samples] == [("solver", 1.5)]
    with pytest.raises(Conflict):
        rig.abort(episode)
    rig.ack(solver)
    assert rig.state(episode) == "ready"
    critic = rig.lease(model="n", group_size=1)
    assert critic is not None
    ((delivered,),) = (group.episodes for group in rig.ledger.batch(critic).groups)
    assert [(sample.agent, sample.reward) for sample in delivered.samples] == [("critic", 0.5)]
    rig.ack(critic)
    assert rig.state(episode) == "trained"
    assert rig.ledger.record(episode, tokens=False)["shares"] == {"m": "trained", "n": "trained"}


def test_a_stale_part_waits_while_another_is_leased_and_then_ends_the_whole(rig: LedgerRig) -> None:
    rig.announce("n", 9)
    episode = rig.open(task="t", members={"solver": "m", "critic": "n"})
    rig.call(episode, model="m", agent="solver", version=0)
    rig.call(episode, model="n", agent="critic", version=1)
    rig.reward(episode)
    batch = rig.lease(model="m", group_size=1)
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    assert rig.state(episode) == "leased"
    assert batch is not None
    rig.nack(batch)
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    assert rig.ledger.episodes[episode].reason == "stale"
    assert rig.lease(group_size=1) is None


# ---- weights


def test_announcing_a_policy(rig: LedgerRig) -> None:
    assert rig.ledger.policy_version("m") == 0
    rig.announce("m", 3, ("http://a", "http://b"))
    assert rig.announce("m", 3) == ()
    assert rig.announce("m", 3, ("http://a", "http://b")) == ()
    rig.announce("m", 4)
    assert (rig.ledger.policy_version("m"), rig.ledger.upstreams("m")) == (4, ("http://a", "http://b"))
    rig.announce("m", 2, ())
    assert (rig.ledger.policy_version("m"), rig.ledger.upstreams("m")) == (2, ())
    assert rig.ledger.upstreams("other") == ()
    assert rig.ledger.models() == ("m",)


@pytest.mark.parametrize(
    "body", [Policy("m", -1), Policy("", 1), Policy("m", 1, ("ftp://x",)), Policy("m", 1, ("localhost:8000",))]
)
def test_announcing_nonsense(rig: LedgerRig, body: Policy) -> None:
    with pytest.raises(BadRequest):
        rig.ledger.announce(body, at=0.0)


def close(rig: LedgerRig) -> None:
    rig.run(rig.ledger.gate_close(GateClose("weights"), at=rig.at))


def unlock(rig: LedgerRig, version: int) -> object:
    return rig.run(rig.ledger.gate_open(GateOpen(version), at=rig.at))


def test_the_gate_closes_when_nothing_is_in_flight(rig: LedgerRig) -> None:
    episode = rig.open()
    (call,) = rig.begin(episode)
    assert rig.ledger.gate == "open"
    close(rig)
    assert rig.ledger.gate == "closing"
    rig.finish(episode, call)
    assert rig.ledger.gate == "closed"
    close(rig)
    unlock(rig, 1)
    assert rig.ledger.gate == "open"
    assert unlock(rig, 1) == ()
    with pytest.raises(BadRequest):
        unlock(rig, -1)


def test_the_version_at_the_gate_is_that_of_the_one_model(rig: LedgerRig) -> None:
    unlock(rig, 2)
    assert rig.ledger.policy_version("anything") == 2
    rig.announce("m", 3)
    close(rig)
    unlock(rig, 4)
    assert rig.ledger.policy_version("m") == 4
    rig.announce("n", 1)
    unlock(rig, 5)
    assert [rig.ledger.policy_version(model) for model in ("m", "n")] == [4, 1]


# ---- time


def test_silence_discards_an_open_episode(rig: LedgerRig) -> None:
    silent, busy, alive = rig.open(), rig.open(), rig.open()
    (call,) = rig.begin(busy)
    rig.at += 60
    rig.run(rig.ledger.heartbeat(alive, at=rig.at))
    rig.at += 40
    rig.expire()
    assert [rig.state(name) for name in (silent, busy, alive)] == ["discarded", "open", "open"]
    assert rig.ledger.episodes[silent].reason == "idle_timeout"
    rig.finish(busy, call)
    rig.at += 99
    rig.expire()
    assert [rig.state(name) for name in (busy, alive)] == ["open", "discarded"]


def test_nobody_is_silent_while_the_gate_is_closed(rig: LedgerRig) -> None:
    episode = rig.open()
    close(rig)
    rig.at += 500
    assert rig.expire() == ()
    unlock(rig, 1)
    rig.at += 99
    assert rig.expire() == ()
    rig.at += 1
    rig.expire()
    assert rig.state(episode) == "discarded"


def test_an_episode_that_is_too_old_is_discarded_whatever_it_does(rig: LedgerRig) -> None:
    episode, ended = rig.open(), rig.open()
    rig.begin(episode)
    rig.call(ended)
    rig.begin(ended)
    rig.reward(ended)
    rig.at += 1000
    rig.expire()
    assert [rig.ledger.episodes[name].reason for name in (episode, ended)] == ["wall_timeout"] * 2


def test_time_does_not_run_backwards(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.at -= 500
    (call,) = rig.begin(episode)
    assert rig.ledger.episodes[episode].calls[call].started_at == 1000.0
    rig.finish(episode, call)
    rig.reward(episode)
    batch = rig.lease(group_size=1, lease_s=10.0)
    assert batch is not None
    assert rig.ledger.batches[batch].lease_until == 1010.0
    assert [event.at for event in rig.events] == [1000.0] * len(rig.events)


def test_a_restart_ends_calls_in_flight_and_nothing_else(rig: LedgerRig) -> None:
    open_one, sealed = rig.open(), rig.open()
    rig.call(sealed)
    rig.begin(sealed)
    rig.reward(sealed)
    rig.begin(open_one)
    rig.at += 700
    rig.restart()
    assert rig.ledger.in_flight() == 0
    assert [rig.state(name) for name in (open_one, sealed)] == ["open", "ready"]
    assert rig.expire() == ()
    rig.at += 100
    rig.expire()
    assert rig.ledger.episodes[open_one].reason == "idle_timeout"


def test_a_clock_that_was_set_back_over_a_restart(rig: LedgerRig) -> None:
    rig.ready()
    batch = rig.lease(group_size=1, lease_s=60.0)
    episode = rig.open()
    rig.at -= 900
    rig.restart()
    assert batch is not None
    assert rig.ledger.batches[batch].lease_until == rig.at + 60.0
    rig.at += 59
    assert rig.expire() == ()
    rig.at += 41
    rig.expire()
    assert rig.ledger.batches[batch].state == "returned"
    assert rig.ledger.episodes[episode].reason == "idle_timeout"


def test_the_merge_policy_is_part_of_the_journal() -> None:
    rig = LedgerRig(LedgerSettings(merge_policy="off"))
    assert rig.restart() == (ev.ProxyStarted(1000.0, "off"),)
    episode = rig.open(task="t")
    rig.call(episode)
    rig.call(episode, (1, 2, 3, 4), (5,))
    rig.reward(episode)
    (delivered,) = rig.ledger.ready_episodes()
    assert len(delivered.samples) == 2


# ---- queries


def test_what_is_asked_about_unknown_episodes(rig: LedgerRig) -> None:
    ledger = rig.ledger
    assert ledger.tenant_of("no") is ledger.agent_of("no") is ledger.model_of("no", "a") is None
    assert ledger.episode_of_call("no") is None


def test_what_is_asked_about_known_ones(rig: LedgerRig) -> None:
    episode = rig.open(model="m", agent="a", tenant="acme")
    (call,) = rig.begin(episode, tenant="acme")
    ledger = rig.ledger
    assert (ledger.tenant_of(episode), ledger.agent_of(episode), ledger.model_of(episode, "b")) == ("acme", "a", "m")
    assert ledger.episode_of_call(call) == episode
    assert [item["episode"] for item in ledger.records("open", 5)] == [episode]


def test_every_refusal_leaves_the_ledger_as_it_was(rig: LedgerRig) -> None:
    episode = rig.in_state("trained")
    before = rig.pictures[-1]
    for command in (lambda: rig.begin(episode), lambda: rig.abort(episode), lambda: rig.lease(groups=0)):
        with pytest.raises(AjetError):
            command()
    assert rig.pictures[-1] == before
    assert rig.run(rig.ledger.lease(Lease(), batch="none", at=rig.at)) == ()
