"""The ledger's commands on batches: groups, leases, acknowledgements, staleness, episodes over several models."""

from __future__ import annotations

from unittest import mock

import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.events import BatchLeased, EpisodeDiscarded
from ajet_proxy.core.ledger.transcript import Transcript
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import Lease
from tests.kit.ledger_rig import LedgerRig
from tests.kit.refused import refused

# ---- batches


def leased(rig: LedgerRig, batch: str | None) -> list[list[str]]:
    assert batch is not None
    return [[item.episode for item in group.episodes] for group in views.batch(rig.state, batch).groups]


def test_groups_go_in_the_order_of_their_completion(rig: LedgerRig) -> None:
    a1 = rig.ready("a")
    b1 = rig.ready("b")
    b2 = rig.ready("b")
    a2 = rig.ready("a")
    a3 = rig.ready("a")
    assert leased(rig, rig.lease()) == [[b1, b2]]
    assert leased(rig, rig.lease()) == [[a1, a2]]
    assert rig.lease() is None
    assert rig.state_of(a3) == "ready"
    assert views.status(rig.state)["groups"] == {"waiting": 1, "ready": 0, "leased": 2}


def test_a_batch_is_of_one_model(rig: LedgerRig) -> None:
    rig.announce("m", 3)
    rig.announce("n", 5)
    rig.ready("t", model="n")
    mine = rig.ready("t", model="m")
    assert rig.lease() is None
    assert rig.lease(model="other", group_size=1) is None
    batch = rig.batch(model="m", group_size=1)
    assert leased(rig, batch) == [[mine]]
    assert views.batch(rig.state, batch).policy_version == 3


def test_what_is_too_old_is_discarded_and_what_is_not_is_leased(rig: LedgerRig) -> None:
    rig.announce(version=4)
    old, edge, fresh = rig.ready("a", version=1), rig.ready("a", version=2), rig.ready("b", version=4)
    mixed = rig.open(task="b")
    rig.call(mixed, version=4)
    rig.call(mixed, (1, 2, 3, 4), (5,), version=0)
    rig.reward(mixed)
    assert leased(rig, rig.lease(groups=2, max_staleness=2, group_size=1)) == [[fresh], [edge]]
    assert {name: rig.state_of(name) for name in (old, edge, fresh, mixed)} == {
        old: "discarded", edge: "leased", fresh: "leased", mixed: "discarded",
    }
    assert views.status(rig.state)["discarded"] == {"stale": 2}


def test_what_is_half_of_max_staleness_behind_comes_last_and_the_freshest_of_it_first(rig: LedgerRig) -> None:
    """After a replay as before it. Without a max_staleness the order is that of readiness."""
    behind = (4, 3, 2, 1, 3, 0)
    rig.announce(version=4)
    names = [rig.ready(f"t{age}-{at}", version=4 - age) for at, age in enumerate(behind)]
    replayed = LedgerRig()
    replayed.run(rig.events)
    orders = {None: (0, 1, 2, 3, 4, 5), 8: (0, 1, 2, 3, 4, 5), 4: (2, 3, 5, 1, 4, 0), 5: (2, 3, 5, 1, 4, 0)}
    for limit, order in orders.items():
        body = Lease(groups=6, group_size=1, max_staleness=limit)
        for one in (rig, replayed):
            (event,) = one.commands.leases.lease(body, batch="b", at=rig.at)
            assert isinstance(event, BatchLeased)
            assert [name for _, (name,) in event.groups] == [names[at] for at in order], limit


def test_what_is_dropped_makes_no_group_look_old(rig: LedgerRig) -> None:
    """Stale episodes are left out before groups form, so the two that are left of the first task are as fresh as the
    others, and were complete first."""
    rig.ready("a", version=0)
    rig.announce(version=4)
    mine = tuple(rig.ready("a", version=4) for _ in range(2))
    other = tuple(rig.ready("b", version=4) for _ in range(2))
    assert leased(rig, rig.lease(groups=2, max_staleness=2)) == [list(mine), list(other)]


def test_a_look_reads_no_turns_and_finds_the_stale_alone(rig: LedgerRig) -> None:
    """Its cost depends on what it drops, whatever else is ready."""
    stale = [rig.ready("a", version=version) for version in (0, 1)]
    rig.announce(version=4)
    for number in range(20):
        rig.ready(f"b{number}", version=4)
    with mock.patch.object(Transcript, "turns", side_effect=AssertionError), \
            mock.patch.object(rig.state, "episodes", Counted(rig.state.episodes)) as looked_at:
        events = rig.commands.leases.lease(Lease(group_size=2, max_staleness=2), batch="b", at=rig.at)
        assert [event.episode for event in events if isinstance(event, EpisodeDiscarded)] == stale
        assert looked_at.names <= set(stale)
        looked_at.names.clear()
        assert rig.commands.leases.lease(Lease(group_size=2, max_staleness=4), batch="b", at=rig.at) != ()
        assert looked_at.names == set(stale)
        looked_at.names.clear()
        assert rig.commands.leases.lease(Lease(group_size=3, max_staleness=4), batch="b", at=rig.at) == ()
        assert looked_at.names == set()


class Counted(dict[str, Episode]):
    """Episodes, and which of them were looked at."""

    def __init__(self, episodes: dict[str, Episode]) -> None:
        super().__init__(episodes)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Episode:
        self.names.add(name)
        return super().__getitem__(name)


def test_what_cannot_change_a_lease_is_told_from_what_can(rig: LedgerRig) -> None:
    """A stale part that waits for another is dropped once that is trained, although no share became ready."""
    rig.announce("n", 9)
    rig.announce("m", 0)
    episode = shared_by(rig, "m", "n", versions={})
    batch = rig.lease(model="m", group_size=1) or ""
    seen = rig.state.leasable()
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    other = rig.open()
    rig.call(other)
    rig.reward(other, final=False)
    assert rig.state.leasable() == seen
    rig.ack(batch)
    assert rig.state.leasable() != seen
    seen = rig.state.leasable()
    rig.announce("n", 10)
    assert rig.state.leasable() != seen
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    assert rig.state.seats.queues.models() == ()
    assert rig.state_of(episode) == "trained"


def test_an_acknowledged_batch_is_trained_once(rig: LedgerRig) -> None:
    episode = rig.ready()
    batch = rig.batch(group_size=1)
    rig.ack(batch, 2)
    assert rig.state_of(episode) == "trained"
    assert rig.ack(batch, 2) == ()
    for command in (rig.nack, rig.extend):
        with pytest.raises(Conflict):
            command(batch)
    with refused(BadRequest, param="filtered"):
        rig.ack(batch, 2, another="why")


def test_a_returned_batch_forms_the_same_groups_again(rig: LedgerRig) -> None:
    names = [rig.ready("a") for _ in range(2)]
    batch = rig.batch()
    later = [rig.ready("a") for _ in range(2)]
    rig.nack(batch)
    assert rig.nack(batch) == ()
    with pytest.raises(Conflict):
        rig.extend(batch)
    assert leased(rig, rig.lease()) == [names]
    assert leased(rig, rig.lease()) == [later]


def test_a_lease_that_runs_out_returns_its_episodes(rig: LedgerRig) -> None:
    episode = rig.ready()
    batch = rig.batch(group_size=1, lease_s=50.0)
    rig.at += 40
    rig.extend(batch, 50.0)
    rig.at += 49
    assert rig.expire() == ()
    rig.later(1)
    assert rig.state_of(episode) == "ready"
    assert rig.state.batches[batch].state == "returned"


@pytest.mark.parametrize(("filtered", "state"), [({}, "trained"), ({"ep": "too_long: 9 tokens"}, "discarded")])
def test_a_late_acknowledgement_counts_while_nobody_else_took_the_episodes(
    rig: LedgerRig, filtered: dict[str, str], state: str
) -> None:
    rig.call(rig.open("ep"))
    rig.reward("ep")
    batch = rig.batch(group_size=1)
    rig.nack(batch)
    rig.ack(batch, 1, **filtered)
    assert (rig.state_of("ep"), rig.state.episodes["ep"].detail) == (state, filtered.get("ep"))
    assert rig.lease(group_size=1) is None


def test_a_late_acknowledgement_is_refused_when_an_episode_went_elsewhere_or_changed(rig: LedgerRig) -> None:
    for spoil in ("lease", "train", "abort", "reward"):
        episode = rig.ready(spoil)
        batch = rig.batch(group_size=1)
        rig.nack(batch)
        if spoil == "abort":
            rig.abort(episode)
        elif spoil == "reward":
            rig.reward(episode, 0.25)
        else:
            other = rig.lease(group_size=1)
            if spoil == "train" and other is not None:
                rig.ack(other)
        with refused(Conflict, "lease_expired"):
            rig.ack(batch)


def test_what_a_trainer_may_yet_acknowledge_is_rewarded_as_it_was_delivered(rig: LedgerRig) -> None:
    episode = rig.ready()
    rig.batch(group_size=1, lease_s=10.0)
    rig.later(10.0)
    assert rig.state_of(episode) == "ready"
    for command in (rig.abort, rig.reward):
        with refused(Conflict, "episode_leased", match="a trainer has had it"):
            command(episode)
    again = rig.batch(group_size=1)
    rig.nack(again)
    rig.reward(episode, -1.0)
    rig.abort(episode)
    assert rig.state_of(episode) == "discarded"


# ---- one episode over several models


def test_an_episode_of_several_models_is_trained_when_all_are(rig: LedgerRig) -> None:
    episode = rig.open(task="t", members={"solver": "m", "critic": "n"})
    assert rig.state.episodes.known(episode).opening.model_for("critic", "m", ("m", "n")) == "n"
    rig.call(episode, model="m", agent="solver")
    rig.call(episode, model="n", agent="critic")
    rig.call(episode, model="judge")
    rig.reward(episode, 1.0, agent="solver", final=False)
    rig.reward(episode, 0.5)
    solver = rig.batch(model="m", group_size=1)
    assert rig.state_of(episode) == "leased"
    ((delivered,),) = (group.episodes for group in views.batch(rig.state, solver).groups)
    assert (delivered.model, delivered.reward) == ("m", 1.5)
    assert [(sample.agent, sample.reward) for sample in delivered.samples] == [("solver", 1.5)]
    with pytest.raises(Conflict):
        rig.abort(episode)
    rig.ack(solver)
    assert rig.state_of(episode) == "ready"
    for command in (rig.abort, rig.reward):
        with pytest.raises(Conflict, match="a trainer has had it"):
            command(episode)
    critic = rig.batch(model="n", group_size=1)
    ((delivered,),) = (group.episodes for group in views.batch(rig.state, critic).groups)
    assert [(sample.agent, sample.reward) for sample in delivered.samples] == [("critic", 0.5)]
    rig.ack(critic)
    assert rig.state_of(episode) == "trained"
    assert views.record(rig.state, episode, tokens="none")["shares"] == {"m": "trained", "n": "trained"}


def test_a_stale_part_waits_while_another_is_leased_and_then_ends_the_whole(rig: LedgerRig) -> None:
    rig.announce("n", 9)
    episode = rig.open(task="t", members={"solver": "m", "critic": "n"})
    rig.call(episode, model="m", agent="solver", version=0)
    rig.call(episode, model="n", agent="critic", version=1)
    rig.reward(episode)
    batch = rig.batch(model="m", group_size=1)
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    assert rig.state_of(episode) == "leased"
    rig.nack(batch)
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    assert rig.state.episodes[episode].reason == "stale"
    assert rig.lease(group_size=1) is None


def shared_by(rig: LedgerRig, *models: str, versions: dict[str, int]) -> str:
    """A ready episode that each of `models` is to train, sampled under its version."""
    episode = rig.open(task="t", members={model: model for model in models})
    for model in models:
        rig.call(episode, model=model, agent=model, version=versions.get(model, 0))
    rig.reward(episode)
    return episode


def test_a_lease_for_any_model_takes_no_share_of_what_it_drops_as_stale(rig: LedgerRig) -> None:
    rig.announce("m", 9)
    episode = shared_by(rig, "m", "n", versions={})
    assert rig.lease(group_size=1, max_staleness=1) is None
    assert rig.state_of(episode) == "discarded"


def test_only_the_stale_share_of_a_partly_trained_episode_is_dropped(rig: LedgerRig) -> None:
    rig.announce("m", 9)
    rig.announce("n", 9)
    episode = shared_by(rig, "m", "n", "o", versions={"n": 9})
    rig.ack(rig.lease(model="o", group_size=1) or "")
    batch = rig.batch(group_size=1, max_staleness=1)
    assert rig.state.episodes[episode].shares.by_model == {"n": batch, "o": ""}
    rig.ack(batch)
    assert rig.state_of(episode) == "trained"


def test_whether_a_trainer_has_had_it_is_known_for_each_model(rig: LedgerRig) -> None:
    def corrected(episode: str) -> bool:
        try:
            rig.reward(episode, 0.5)
        except Conflict:
            return False
        return True

    late = shared_by(rig, "m", "n", versions={})
    batch = rig.lease(model="m", group_size=1) or ""
    rig.nack(batch)
    assert corrected(late) is True
    batch = rig.lease(model="m", group_size=1) or ""
    rig.nack(batch)
    rig.ack(batch)
    assert corrected(late) is False
    rig.ack(rig.lease(model="n", group_size=1) or "")

    expired = shared_by(rig, "m", "n", versions={})
    rig.lease(model="m", group_size=1, lease_s=1.0)
    rig.later(1.0)
    rig.nack(rig.lease(model="n", group_size=1) or "")
    assert corrected(expired) is False
    rig.nack(rig.lease(model="m", group_size=1) or "")
    assert corrected(expired) is True
    rig.ack(rig.lease(model="m", group_size=1) or "", 1, **{expired: "too_long"})
    assert corrected(expired) is True
