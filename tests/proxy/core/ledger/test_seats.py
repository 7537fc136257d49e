"""Several trainers at one ledger, each with its model's shares of the same episodes: the laws that hold for any order
of what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.state import State
from tests.kit.histories import folded
from tests.kit.ledger_rig import SETTINGS, LedgerRig, picture

BOTH = {"plans": "m", "codes": "n"}
Step = tuple[str, str, int]
"""A thing to do, by which model's trainer, and a number that chooses among what there is."""
TRAINERS = ("lease", "ack", "ack", "filter", "nack", "expire")
WHAT = st.sampled_from(("play", "play", *TRAINERS, "abort", "reward"))
STEPS = st.lists(st.tuples(WHAT, st.sampled_from("mn"), st.integers(0, 5)), max_size=40)


def ready(rig: LedgerRig, number: int) -> None:
    """An episode of both models, or of one."""
    members = (BOTH, BOTH, BOTH, {"plans": "m"}, {"codes": "n"})[number % 5]
    rig.ready(f"t{number % 2}", members=members)


def step(rig: LedgerRig, what: str, model: str, number: int) -> None:
    """One step; nothing if there is nothing to do it to."""
    rig.at += 1.0
    held = [batch for batch in rig.state.batches.leased.values() if batch.model == model]
    free = [one.id for one in rig.state.episodes.values() if one.state == "ready" and not one.shares.taken]
    if what == "play":
        ready(rig, number)
    elif what == "lease":
        rig.lease(model=model, group_size=2, lease_s=500.0)
    elif what in ("abort", "reward") and free:
        getattr(rig, what)(free[number % len(free)])
    elif what in TRAINERS and held:
        batch = held[number % len(held)]
        if what == "ack":
            rig.ack(batch.id)
        elif what == "filter":
            rig.ack(batch.id, **{next(batch.episodes()): "too_long: 9 tokens"})
        elif what == "nack":
            rig.nack(batch.id)
        else:
            rig.run([ev.BatchReturned(rig.at, batch.id, "expired")])


def shares(state: State) -> dict[str, dict[str, str | None]]:
    return {name: dict(one.shares.by_model) for name, one in state.episodes.items()}


@given(STEPS)
def test_the_laws_of_shares_hold_after_every_event(steps: Sequence[Step]) -> None:
    rig = LedgerRig()
    for one in steps:
        step(rig, *one)
    state, trained = State(SETTINGS), Counter[tuple[str, str]]()
    for event in rig.events:
        before = shares(state)
        states = {name: one.state for name, one in state.episodes.items()}
        batch = state.batches.get(getattr(event, "batch", ""))
        state.apply(event)
        for name, episode in state.episodes.items():
            was, now = before.get(name, {}), episode.shares.by_model
            if states.get(name) in ("open", "sealed") and episode.state == "ready":
                wanted = set(episode.trains())
                assert now == dict.fromkeys(wanted), "all shares become ready in one event"
            moved = {model for model in was | now if was.get(model, "none") != now.get(model, "none")}
            if batch is not None and was:
                assert moved <= {batch.model}, "what a trainer says of its share leaves the others theirs"
            if episode.state == "trained":
                assert now and set(now.values()) == {""}
            elif now and episode.state != "discarded":
                assert set(now.values()) != {""}
            left = {model for model in "mn" if (model, name) in set(state.seats.queues.ready())}
            if episode.state == "discarded":
                assert not left, "a discard takes all shares"
            else:
                assert left == {model for model, share in now.items() if share is None}
            trained.update((name, model) for model in moved if now.get(model) == "")
    assert set(trained.values()) <= {1}, "nothing is trained twice by any model"
    assert picture(state) == picture(rig.state) == picture(folded(rig.events))


def delivered(steps: Sequence[Step], of: str, trainers: str) -> list[tuple[object, ...]]:
    """The groups that the trainer of a model leases, if only these `trainers` live."""
    rig, seen = LedgerRig(), list[tuple[object, ...]]()
    names: dict[str, int] = {}
    for what, model, number in steps:
        if what == "play" or model in trainers:
            step(rig, what, model, number)
        names = {name: at for at, name in enumerate(rig.state.episodes)}
        batches = [batch for batch in rig.state.batches.values() if batch.model == of]
        seen.append(tuple(
            (batch.state, tuple((task, tuple(names[one] for one in group)) for task, group in batch.groups))
            for batch in batches
        ))  # fmt: skip
    return seen


@given(st.lists(st.tuples(st.sampled_from(("play", "play", *TRAINERS)), st.sampled_from("mn"), st.integers(0, 5))))
def test_what_a_trainer_is_given_does_not_depend_on_the_others(steps: Sequence[Step]) -> None:
    """A dead one, a slow one and one that refuses what it leases hold up nobody."""
    for model in "mn":
        assert delivered(steps, model, "mn") == delivered(steps, model, model)


# ---- rewards of one model


def played(*rewards: dict[str, object]) -> LedgerRig:
    """An episode in which agent `plans` asks both models and `codes` one, sealed with these rewards."""
    rig = LedgerRig(watch=True)
    episode = rig.open(task="t", members=BOTH)
    for agent, model in (("plans", "m"), ("plans", "n"), ("codes", "n")):
        rig.call(episode, model=model, agent=agent)
    for reward in rewards:
        rig.reward(episode, **{"final": False, **reward})  # type: ignore[arg-type]
    rig.seal(episode)
    return rig


def learned(rig: LedgerRig, model: str) -> tuple[float, list[tuple[str, float | None]], list[object]]:
    """The batch that the trainer of `model` is given: the total, each sample's reward by agent, and the ids of the
    rewards."""
    batch = rig.batch(model=model, group_size=1)
    (group,) = views.batch(rig.state, batch).groups
    (episode,) = group.episodes
    samples = [(sample.agent, sample.reward) for sample in episode.samples]
    return episode.reward, samples, [item["id"] for item in episode.rewards]


def test_a_reward_of_a_model_is_for_what_it_sampled() -> None:
    rig = played(
        {"value": 1.0, "id": "all"}, {"value": 10.0, "model": "m", "id": "m"},
        {"value": 100.0, "model": "n", "id": "n"}, {"value": 1000.0, "model": "n", "agent": "plans", "id": "both"},
    )  # fmt: skip
    assert learned(rig, "m") == (11.0, [("plans", 11.0)], ["all", "m"])
    assert learned(rig, "n") == (1101.0, [("plans", 1101.0), ("codes", 101.0)], ["all", "n", "both"])
    (name,) = rig.state.episodes
    record = views.record(rig.state, name)
    assert record["reward"] == 1111.0
    assert [item.get("model") for item in record["rewards"]] == [None, "m", "n", "n"]


def test_what_only_another_model_was_rewarded_for_teaches_nothing() -> None:
    rig = played({"value": 1.0, "model": "m"})
    assert rig.lease(model="n", group_size=1) is None
    (episode,) = rig.state.episodes.values()
    assert (episode.state, episode.shares.by_model) == ("ready", {"m": None})
    assert learned(rig, "m")[0] == 1.0
    wrong = played({"value": 1.0, "model": "x", "agent": "plans"}, {"value": 1.0, "agent": "y"})
    assert wrong.lease(model="n", group_size=1) is None
    (episode,) = wrong.state.episodes.values()
    assert episode.detail == "no whole call is of what was rewarded: agent 'plans' and model 'x', agent 'y'"


def test_the_signal_of_a_model_is_in_its_own_rewards(rig: LedgerRig) -> None:
    for value in (0.0, 1.0):
        episode = rig.open(task="t", members=BOTH)
        for agent, model in BOTH.items():
            rig.call(episode, model=model, agent=agent)
        rig.reward(episode, 1.0, model="n", final=False)
        rig.reward(episode, value, model="m")
    assert rig.lease(model="n", group_size=2, signal=True) is None
    assert rig.lease(model="m", group_size=2, signal=True) is not None
