"""The choice of what a lease takes and drops, by the ledger's answers: `test_batches` has what leases are
for."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger import leases, views
from ajet_proxy.core.ledger.leases import most_bytes
from ajet_proxy.core.ledger.parts import AT_ONCE
from ajet_sdk.routes import Lease
from tests.kit.ledger_rig import LedgerRig
from tests.kit.steps import steps

BOTH = {"planner": "m", "critic": "n"}


def large(rig: LedgerRig) -> str:
    episode = rig.open(task="t")
    rig.ends(episode, prompt=range(1000))
    return episode


def test_a_lease_takes_no_more_groups_than_a_frame_does(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c, d, e, f = (rig.ready() for _ in range(6))
    monkeypatch.setattr(leases, "LEASE_BYTES", 4 * most_bytes(rig.state.episodes[a], "m"))
    assert rig.leased(groups=3) == [(a, b), (c, d)]
    assert rig.leased(groups=1) == [(e, f)]


def test_what_is_too_large_for_any_lease_is_discarded(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    small, alone = rig.ready(), large(rig)
    later = rig.ready("u"), rig.ready("u")
    monkeypatch.setattr(leases, "LEASE_BYTES", 2 * most_bytes(rig.state.episodes[small], "m"))
    assert rig.leased() == [later]
    record = views.record(rig.state, alone)
    assert (record["state"], record["reason"]) == ("discarded", "filtered")
    assert record["detail"] == "a group of 2 like it is too large for a lease"
    assert rig.leased() == []
    assert rig.leased(group_size=1) == [(small,)]


def test_of_a_partly_trained_episode_only_the_share_that_is_too_large_goes(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another share of it is leased it stays, out of this one's leases; with all shares ready it goes as one."""
    partly, whole = rig.ready(members={"a": "m", "b": "n"}), rig.ready(members={"b": "n", "c": "o"})
    batch = rig.lease(model="m", group_size=1) or ""
    monkeypatch.setattr(leases, "LEASE_BYTES", 100)
    assert rig.leased(group_size=1) == []
    assert (rig.state_of(partly), rig.state_of(whole)) == ("leased", "discarded")
    rig.ack(batch)
    assert rig.leased(group_size=1) == []
    assert (rig.state_of(partly), rig.state.episodes[partly].shares.by_model) == ("trained", {"m": ""})


@pytest.mark.parametrize("model", [None, "m"])
def test_what_is_stale_is_dropped_with_what_is_too_large(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    rig.announce(version=4)
    stale, edge, heavy, later = rig.ready(version=1), rig.ready(version=2), large(rig), rig.ready()
    monkeypatch.setattr(leases, "LEASE_BYTES", 2 * most_bytes(rig.state.episodes[edge], "m"))
    assert rig.leased(model=model, max_staleness=2) == [(edge, later)]
    assert views.status(rig.state)["discarded"] == {"stale": 1, "filtered": 1}
    assert [rig.state.episodes[name].reason for name in (stale, heavy)] == ["stale", "filtered"]


def given(rig: LedgerRig, *scopes: dict[str, object], task: str = "t") -> str:
    """An episode of a call of the planner and one that was lost, with these rewards."""
    episode = rig.open(task=task)
    rig.call(episode, agent="planner")
    (lost,) = rig.begin(episode)
    rig.lose(episode, lost)
    for scope in scopes:
        rig.reward(episode, **{"value": 1.0, "final": False} | scope | ({"call": lost} if "call" in scope else {}))
    rig.seal(episode)
    return episode


def test_what_nobody_rewarded_is_dropped_with_the_names(rig: LedgerRig) -> None:
    wrong = given(rig, {"agent": "plannr"}, {"agent": "plannr", "value": 2.0}, {"call": ""})
    some, fine = given(rig, {"agent": "critic"}, {"agent": "planner"}), given(rig, {"agent": None})
    assert rig.state_of(wrong) == "ready"
    assert rig.leased() == [(some, fine)]
    record = views.record(rig.state, wrong)
    lost = record["calls"][1]["call"]
    assert (record["state"], record["reason"]) == ("discarded", "no_reward")
    assert record["detail"] == f"no whole call is of what was rewarded: agent 'plannr', call {lost}"


def test_until_a_lease_a_reward_can_be_corrected(rig: LedgerRig) -> None:
    wrong, many = given(rig, {"agent": "plannr"}), given(rig, *({"agent": f"a{at}"} for at in range(7)))
    rig.reward(wrong, 1.0, agent="planner")
    assert rig.leased(group_size=1) == [(wrong,)]
    assert rig.leased(group_size=1) == []
    assert str(rig.state.episodes[many].detail).endswith("'a4' and 2 more")


@pytest.mark.parametrize("first", ["m", "n"])
def test_a_share_that_nobody_rewarded_goes_alone(rig: LedgerRig, first: str) -> None:
    episode = rig.ready(members=BOTH, scope={"agent": "critic"})
    if first == "m":
        assert rig.leased(model="m", group_size=1) == []
        assert (rig.state_of(episode), rig.state.episodes[episode].shares.by_model) == ("ready", {"n": None})
    batch = rig.lease(model="n", group_size=1) or ""
    assert rig.leased(model="m", group_size=1) == []
    rig.ack(batch)
    assert rig.leased(model="m", group_size=1) == []
    assert (rig.state_of(episode), rig.state.episodes[episode].shares.by_model) == ("trained", {"n": ""})


def test_an_episode_that_nobody_rewarded_ends_whole_whoever_leases_first(rig: LedgerRig) -> None:
    episode = rig.ready(members=BOTH, scope={"agent": "nobody"})
    assert rig.leased(model="m", group_size=1) == []
    assert (rig.state_of(episode), rig.state.episodes[episode].reason) == ("discarded", "no_reward")


def unrewarded(episodes: int, tasks: int) -> LedgerRig:
    """Ready episodes in which only a misspelt agent is rewarded, and behind them two of each task that can be trained.
    """
    rig = LedgerRig()
    for number in range(episodes + 2 * tasks):
        episode = rig.open(task=f"t{number % tasks}")
        rig.call(episode, agent="planner")
        rig.reward(episode, agent="plannr" if number < episodes else "planner")
        rig.seal(episode)
    return rig


def looks(rig: LedgerRig) -> list[int]:
    """The cost of each look, up to the one that leases something."""
    made = []
    while not rig.state.batches:
        events: list[object] = []
        look = Lease(groups=1, group_size=2)
        made.append(steps(lambda: events.extend(rig.commands.leases.lease(look, batch="b", at=rig.at))))  # noqa: B023
        rig.run(events)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("tasks", [1, 100])
def test_many_episodes_that_nobody_rewarded_are_dropped_at_their_number_in_turns(tasks: int) -> None:
    few, many = looks(unrewarded(500, tasks)), looks(unrewarded(2000, tasks))
    assert (len(few), len(many)) == (500 // AT_ONCE + 1, 2000 // AT_ONCE + 1)
    assert sum(many) < 5 * sum(few)
    assert max(many) < 1.5 * max(few)


def away(episodes: int) -> LedgerRig:
    """Ready episodes of two models of which one is not rewarded, and the other one's trainer has them all."""
    rig = LedgerRig()
    for _ in range(episodes):
        rig.ready(members=BOTH, scope={"agent": "critic"})
    assert rig.lease(model="n", groups=episodes // 2, group_size=2)
    return rig


def test_a_look_at_what_cannot_be_dropped_now_costs_what_it_numbers() -> None:
    made = []
    for rig in (away(600), away(2400)):
        made.append(steps(lambda: rig.commands.leases.lease(Lease(group_size=2, model="m"), batch="b", at=rig.at)))  # noqa: B023
        assert rig.lease(group_size=2, model="m") is None
    assert made[1] < 5 * made[0]


def test_thousands_of_stale_episodes_are_dropped_at_their_number() -> None:
    made = []
    for episodes in (1000, 4000):
        rig, total = LedgerRig(), 0
        for number in range(episodes):
            rig.ready(f"t{number}", version=1)
        rig.announce(version=9)
        while (events := rig.commands.leases.lease(look := Lease(max_staleness=2), batch="b", at=rig.at)):
            total += steps(lambda: rig.commands.leases.lease(look, batch="b", at=rig.at))  # noqa: B023
            rig.run(events)
        made.append(total)
    assert made[1] < 5 * made[0]


def test_stale_episodes_are_dropped_in_turns(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.leases.AT_ONCE", 2)
    old, new = [rig.ready(version=1) for _ in range(3)], [rig.ready(version=4) for _ in range(2)]
    rig.announce(version=4)
    assert rig.leased(max_staleness=2) == []
    assert [rig.state_of(name) for name in old] == ["discarded", "discarded", "ready"]
    assert rig.leased(max_staleness=2) == [tuple(new)]
    assert rig.state_of(old[2]) == "discarded"


def earning(rig: LedgerRig, task: str, value: float, **scope: object) -> str:
    episode = rig.open(task=task)
    call = rig.call(episode)
    rig.reward(episode, value, **({"call": call} if scope.pop("call", False) else scope), final=False)
    rig.seal(episode)
    return episode


def test_a_lease_that_wants_a_signal_discards_groups_without_one_and_stays_as_large(rig: LedgerRig) -> None:
    flat = [earning(rig, "t", 1.0) for _ in range(2)]
    steep, later = ([earning(rig, task, value) for value in (0.0, 1.0)] for task in ("u", "v"))
    assert rig.leased(groups=2, signal=True) == [tuple(steep), tuple(later)]
    record = views.record(rig.state, flat[0])
    assert (record["state"], record["reason"], record["detail"]) == ("discarded", "filtered", leases.NO_SIGNAL)
    assert rig.leased(signal=True) == []


@pytest.mark.parametrize("values", [
    ([0.1, 0.1, 0.1], [0.3]), ([0.1, 0.2, -0.3], [0.0]), ([0.001] * 100, [0.1]), ([1000.1, -1000.0], [0.1]),
    ([-12.6] * 7, [-88.2]), ([1000.1] * 3, [3000.3]),
])  # fmt: skip
def test_what_rounding_left_of_a_sum_is_no_signal(rig: LedgerRig, values: tuple[list[float], list[float]]) -> None:
    def play(turns: list[float]) -> str:
        rig.call(episode := rig.open(task="t"))
        for value in turns:
            rig.reward(episode, value, final=False)
        rig.seal(episode)
        return episode

    pair = [play(turns) for turns in values]
    assert rig.leased(signal=True) == []
    assert {rig.state_of(name) for name in pair} == {"discarded"}
    apart = play(values[0]), play([*values[1], 1e-6])
    assert rig.leased(signal=True) == [apart]


def test_one_episode_has_nothing_to_be_compared_with_and_is_leased(rig: LedgerRig) -> None:
    alone = earning(rig, "t", 1.0)
    assert rig.leased(group_size=1, signal=True) == [(alone,)]


def test_rewards_of_calls_are_for_the_trainer_to_compare(rig: LedgerRig) -> None:
    pair = [earning(rig, "t", 1.0, call=True) for _ in range(2)]
    assert rig.leased(signal=True) == [tuple(pair)]


@pytest.mark.parametrize("scope", ["call", "agent"])
def test_the_reward_of_a_call_that_named_no_model_is_that_of_who_answered(scope: str) -> None:
    """No model is announced yet, so only the answer says whose it is."""
    rig = LedgerRig()
    for value in (0.0, 1.0):
        episode = rig.open(task="t")
        given = {"call": rig.call(episode, model="", agent="a"), "agent": "a"}
        rig.reward(episode, value, **{scope: given[scope]})
    (group,) = views.batch(rig.state, rig.batch(model="m")).groups
    assert [one.reward for one in group.episodes] == [0.0, 1.0]


def test_what_teaches_one_model_nothing_stays_for_another(rig: LedgerRig) -> None:
    """Each model's share of an episode is its own, as where a trainer refuses one."""
    names = []
    for value in (0.0, 1.0):
        names.append(episode := rig.open(task="t", members={"a": "m", "b": "n"}))
        for agent, model, reward in (("a", "m", 1.0), ("b", "n", value)):
            rig.call(episode, model=model, agent=agent)
            rig.reward(episode, reward, agent=agent, final=False)
        rig.seal(episode)
    assert rig.leased(model="m", signal=True) == []
    assert {tuple(rig.state.episodes[name].shares.by_model) for name in names} == {("n",)}
    assert rig.leased(model="n", signal=True) == [tuple(names)]


def test_without_a_signal_no_more_is_dropped_in_one_look_than_otherwise(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "AT_ONCE", 3)
    names = [earning(rig, "t", 1.0) for _ in range(8)]
    for left in (4, 0):
        assert rig.leased(groups=2, signal=True) == []
        assert [rig.state_of(name) for name in names].count("ready") == left
