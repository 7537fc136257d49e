"""Clients: who may join, who is gone and why, and what becomes of the episodes of each."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ajet_proxy.core.ledger import client_commands, clients, commands, views
from ajet_proxy.core.ledger.clients import KEPT_REVISIONS, RATE_EPISODES, Client
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_sdk.errors import BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.limits import MAX_TTL_S
from tests.kit.histories import everything, folded
from tests.kit.ledger_rig import LedgerRig, check
from tests.kit.refused import refused


def shown(rig: LedgerRig, client: str) -> dict[str, Any]:
    return next(one for one in rig.commands.clients.shown(None, rig.at) if one["client"] == client)


# ---- joining


def test_of_two_of_a_name_the_older_is_gone(rig: LedgerRig) -> None:
    older, other, foreign = rig.join("one"), rig.join("two"), rig.join("one", tenant="acme")
    mine = rig.open(client=older)
    newer = rig.join("one")
    assert list(rig.state.clients.live) == [other, foreign, newer]
    assert (shown(rig, older)["state"], shown(rig, older)["reason"]) == ("gone", "replaced")
    assert rig.state.episodes.known(mine).reason == "client_gone"


def test_one_that_replaces_nobody_is_refused_the_name(rig: LedgerRig) -> None:
    older = rig.join("one")
    with refused(Conflict, "client_exists"):
        rig.join("one", replaces=False)
    rig.leave(older)
    rig.join("one", replaces=False)


def test_joining_again_under_the_same_id_changes_nothing(rig: LedgerRig) -> None:
    client = rig.join("one", id="client-x")
    seen = len(rig.events)
    assert rig.join("one", id="client-x") == client
    assert len(rig.events) == seen
    for named in ({"name": "two"}, {"name": "one", "tenant": "acme"}):
        with pytest.raises(BadRequest, match="is another one"):
            rig.join(id="client-x", **named)
    rig.leave(client)
    with refused(Conflict, "client_gone"):
        rig.join("one", id="client-x")


def test_a_tenant_has_only_so_many(rig: LedgerRig) -> None:
    with mock.patch.object(client_commands, "MAX_CLIENTS", 2):
        rig.join("one")
        rig.join("two")
        with refused(Conflict, "too_many_clients", match="there are 2 clients, as many as may be"):
            rig.join("three")
        rig.join("two")
        rig.join("three", tenant="acme")


# ---- what an episode has of its client


def test_an_episode_has_its_clients_revision_and_lane_unless_it_names_its_own(rig: LedgerRig) -> None:
    client = rig.join(revision="r1", lane="math")
    first, second = rig.open(client=client, task="code/1"), rig.open(client=client, revision="r2")
    alone, empty = rig.open(revision="r3", task="code/1"), rig.open(client="", revision="")
    opened = map(rig.state.episodes.known, (first, second, alone, empty))
    assert [(one.opening.client, one.opening.revision, one.group_key.lane) for one in opened] == [
        (client, "r1", "math"), (client, "r2", "math"), (None, "r3", "code"), (None, None, "default"),
    ]
    record = views.record(rig.state, second)
    assert (record["client"], record["revision"], record["lane"]) == (client, "r2", "math")
    assert {"client", "revision"}.isdisjoint(views.record(rig.state, empty))
    assert (shown(rig, client)["revision"], shown(rig, client)["revisions"]) == ("r2", {"r1": 1, "r2": 1})


def test_a_call_opens_an_episode_of_its_client(rig: LedgerRig) -> None:
    client = rig.join(revision="r1")
    rig.begin("seen", client=client)
    opening = rig.state.episodes.known("seen").opening
    assert (opening.client, opening.revision) == (client, "r1")
    rig.begin("seen", client="no client at all")
    with pytest.raises(NotFound):
        rig.begin("new", client="no client at all")


def test_an_evaluation_that_asked_nothing_counts_with_its_reward(rig: LedgerRig) -> None:
    client = rig.join()
    rig.reward(asks_nothing := rig.open(client=client, eval=True), 0.5)
    rig.seal(asks_nothing)
    assert rig.state_of(asks_nothing) == "recorded" and shown(rig, client)["mean_reward"] == 0.5
    check(rig.state)


def test_only_the_latest_revisions_are_shown(rig: LedgerRig) -> None:
    client = rig.join(revision="r-1")
    for number in (*range(KEPT_REVISIONS), 0, KEPT_REVISIONS):
        rig.open(client=client, revision=f"r{number}")
    known = shown(rig, client)["revisions"]
    assert list(known) == [*(f"r{number}" for number in range(2, KEPT_REVISIONS)), "r0", f"r{KEPT_REVISIONS}"]
    assert known["r0"] == 2


def test_what_is_unknown_or_anothers_opens_nothing(rig: LedgerRig) -> None:
    client, gone = rig.join(tenant="acme"), rig.join("gone")
    rig.leave(gone)
    for name, kind, code in (
        ("nobody", NotFound, "unknown_client"), (client, Forbidden, "foreign_client"), (gone, Conflict, "client_gone"),
    ):
        with pytest.raises(kind) as caught:
            rig.open(client=name)
        assert caught.value.code == code
    assert rig.state.tallies.opened == 0


# ---- who is gone


def test_one_that_leaves_takes_what_it_has_open_and_nothing_else(rig: LedgerRig) -> None:
    client, other = rig.join("one"), rig.join("two")
    kept = [rig.ready(client=client), rig.open(client=other), rig.open()]
    sealed = rig.open(client=client, task="t")
    rig.begin(sealed)
    rig.seal(sealed)
    mine = [rig.open(client=client), rig.open(client=client)]
    rig.leave(client)
    assert [rig.state_of(one) for one in (*kept, sealed)] == ["ready", "open", "open", "sealed"]
    assert {rig.state.episodes.known(one).reason for one in mine} == {"client_gone"}
    assert rig.leave(client) == ()
    with refused(Conflict, "client_gone"):
        rig.beat(client)
    for unknown in (rig.beat, rig.leave):
        with pytest.raises(NotFound):
            unknown("nobody")


def test_one_that_is_silent_for_its_time_is_gone(rig: LedgerRig) -> None:
    client, other = rig.join("one", ttl_s=10.0), rig.join("two", ttl_s=30.0)
    mine = rig.open(client=client)
    (call,) = rig.begin(mine)
    rig.gate_close()
    rig.at += 6.0
    rig.beat(client)
    beaten = rig.at
    rig.later(9.9)
    assert rig.state_of(mine) == "open"
    rig.later(0.1)
    assert (rig.state_of(mine), rig.state.episodes.known(mine).reason) == ("discarded", "client_gone")
    assert (shown(rig, client)["reason"], shown(rig, client)["heard_at"]) == ("silent", beaten)
    assert list(rig.state.clients.live) == [other]
    rig.lose(mine, call)


def test_a_sign_of_life_is_forgotten_once_any_client_would_be_gone() -> None:
    def client(name: str) -> Client:
        return Client(name, name, "", 30.0, None, None, False, 0.0, 0.0)

    presence = Presence()
    presence.client_beats(client("old"), 10.0)
    presence.client_beats(client("new"), 10.0 + MAX_TTL_S)
    assert presence.client(client("old")) == 10.0
    presence.client_beats(client("new"), 11.0 + MAX_TTL_S)
    assert (presence.client(client("old")), presence.client(client("new"))) == (0.0, 11.0 + MAX_TTL_S)


def test_they_go_some_at_a_time(rig: LedgerRig) -> None:
    with mock.patch.object(client_commands, "AT_ONCE", 2), mock.patch.object(commands, "AT_ONCE", 3):
        client = rig.join(ttl_s=10.0)
        for _ in range(10):
            rig.open(client=client)
        assert len(rig.leave(client)) == 3
        assert [len(rig.expire()) for _ in range(4)] == [3, 3, 2, 0]
        silent = rig.join(ttl_s=10.0)
        for _ in range(4):
            rig.open(client=silent)
        rig.at += 5000.0
        assert [len(rig.expire()) for _ in range(3)] == [4, 1, 0]
    assert set(rig.state.tallies.discarded) == {"client_gone"}


def test_only_the_latest_that_are_gone_are_remembered_and_those_with_something_open(rig: LedgerRig) -> None:
    with mock.patch.object(clients, "KEPT_GONE", 2), mock.patch.object(client_commands, "AT_ONCE", 0):
        first = rig.join()
        mine, done = rig.open(client=first), rig.ready(client=first)
        rig.leave(first)
        others = [rig.join(str(number)) for number in range(4)]
        for other in others:
            rig.leave(other)
        assert list(rig.state.clients.gone) == [first, others[-1]]
        rig.tick()
        rig.leave(rig.join())
        assert first not in rig.state.clients.gone
    assert rig.state.episodes.known(mine).opening.client == first
    rig.nack(rig.batch(group_size=1))
    rig.reward(done, 1.0)
    with pytest.raises(NotFound):
        rig.beat(first)


# ---- what is shown


def test_what_is_shown_of_a_client(rig: LedgerRig) -> None:
    client = rig.join("one", revision="r1", lane="math", ttl_s=60.0, tenant="acme")
    joined = rig.at
    own: dict[str, Any] = {"client": client, "tenant": "acme"}
    rig.at += 60.0
    rig.beat(client)
    done = [rig.ready(reward=0.5, **own) for _ in range(3)]
    rig.reward(done[0], 2.0)
    rig.abort(rig.open(**own), "broken", "infra")
    rig.abort(rig.open(**own), "wrong", "agent")
    rig.abort(rig.open(**own))
    rig.open(**own)
    assert shown(rig, client) == {
        "client": client, "name": "one", "tenant": "acme", "state": "joined", "lane": "math", "revision": "r1",
        "revisions": {"r1": 7}, "ttl_s": 60.0, "joined_at": joined, "heard_at": rig.at,
        "episodes": {
            "opened": 7, "open": 1, "sealed": 0, "ready": 3, "leased": 0, "trained": 0, "recorded": 0, "discarded": 3,
        },
        "discarded": {"aborted": 3}, "failures": {"infra": 1, "agent": 1}, "per_minute": 3.0, "mean_reward": 1.0,
    }  # fmt: skip


def test_nothing_is_known_of_one_that_played_nothing(rig: LedgerRig) -> None:
    client = rig.join()
    assert (shown(rig, client)["per_minute"], shown(rig, client)["mean_reward"]) == (0.0, None)


def test_the_pace_is_that_of_the_last_minutes_or_of_the_last_episodes(rig: LedgerRig) -> None:
    rig = LedgerRig()
    client = rig.join(ttl_s=3600.0)
    for _ in range(5):
        rig.ready(client=client)
    rig.at += 600.0
    assert shown(rig, client)["per_minute"] == 0.0
    for _ in range(RATE_EPISODES + 20):
        rig.at += 0.5
        rig.ready(client=client)
    assert shown(rig, client)["per_minute"] == pytest.approx(120.0, rel=0.02)
    rig.leave(client)
    rig.at += 1e4
    assert shown(rig, client)["per_minute"] == pytest.approx(120.0, rel=0.02)


def test_a_clock_that_went_back_takes_the_pace_with_it(rig: LedgerRig) -> None:
    client = rig.join(ttl_s=3600.0)
    rig.at += 60.0
    rig.ready(client=client)
    before = shown(rig, client)["per_minute"]
    rig.at -= 1000.0
    rig.restart()
    assert shown(rig, client)["per_minute"] == before == 1.0


def test_a_tenant_sees_its_own_and_the_latest_that_is_gone_first(rig: LedgerRig) -> None:
    names = {rig.join(name): name for name in ("a", "b", "c", "d")}
    rig.join("foreign", tenant="acme")
    for client, name in names.items():
        if name in "ac":
            rig.leave(client)
    for tenant, expected in (("", "b d c a"), ("acme", "foreign"), ("none", ""), (None, "b d foreign c a")):
        assert [one["name"] for one in rig.commands.clients.shown(tenant, rig.at)] == expected.split()


# ---- whose failure


def test_an_abort_says_whose_failure_it_was(rig: LedgerRig) -> None:
    episode, plain = rig.open(), rig.open()
    with refused(BadRequest, param="cause", match="cause must be one of agent, infra"):
        rig.abort(episode, None, "weather")
    rig.abort(episode, "no network", "infra")
    rig.abort(plain)
    assert views.record(rig.state, episode)["cause"] == "infra"
    assert "cause" not in views.record(rig.state, plain)
    assert rig.abort(episode, None, "agent") == ()


# ---- what an older revision played


def test_it_needs_a_lane_which_ends_where_a_tasks_name_goes_on(rig: LedgerRig) -> None:
    with refused(BadRequest, param="lane", match="no '/'"):
        rig.join(lane="a/b")
    with refused(BadRequest, param="lane"):
        rig.join(replaces_older=True)


def test_one_that_replaces_older_discards_what_waits_under_another_revision(rig: LedgerRig) -> None:
    first = rig.join("one", lane="math", revision="r1")
    leased = [rig.ready(client=first, task="x") for _ in range(2)]
    assert rig.lease() is not None
    had = [rig.ready(client=first, task="y") for _ in range(2)]
    assert rig.lease(lease_s=1.0) is not None
    rig.later(2.0)
    sealed = rig.open(client=first)
    rig.begin(sealed)
    rig.seal(sealed)
    waits, still_open = rig.ready(client=first), rig.open(client=first)
    unnamed, elsewhere = rig.ready(task="math/1"), rig.ready(task="code/1", revision="r1")
    seen = rig.open(client=first, eval=True)
    rig.begin(seen)
    rig.seal(seen)
    derived, foreign = rig.ready(task="math/1", revision="r1"), rig.open(task="math/1", revision="r1", tenant="acme")
    rig.begin(foreign, tenant="acme")
    rig.seal(foreign)
    second = rig.join("two", lane="math", revision="r2", replaces_older=True)
    assert {rig.state.episodes.known(one).reason for one in (sealed, waits, derived)} == {"older_revision"}
    kept = (*leased, *had, still_open, unnamed, elsewhere, seen, foreign)
    assert {rig.state.episodes.known(one).reason for one in kept} == {None}
    own = rig.ready(client=second)
    assert rig.state_of(own) == "ready"
    third = rig.open(client=second, revision="r3")
    assert rig.state.episodes.known(own).reason == "older_revision"
    own = rig.ready(client=second, revision="r3")
    rig.open(client=second, revision="r3")
    assert (rig.state_of(own), rig.state_of(third)) == ("ready", "open")


def test_without_a_revision_nothing_is_older(rig: LedgerRig) -> None:
    waits = rig.ready(task="math/1", revision="r1")
    client = rig.join(lane="math", replaces_older=True)
    rig.open(client=client)
    assert rig.state_of(waits) == "ready"


# ---- the laws, whatever happens


class Swarm(RuleBasedStateMachine):
    """Clients join, beat, leave and are silent, and the proxy starts again; next to a bookkeeping that is as simple as
    the laws are."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LedgerRig(LedgerSettings(idle_timeout=1e6, wall_timeout=1e6, group_size=2), watch=True)
        self.until: dict[str, float] = {}
        """When each live client is gone."""
        self.names: dict[str, tuple[str, float]] = {}
        self.open: dict[str, str | None] = {}
        self.kept: set[str] = set()

    def gone(self, *clients: str) -> None:
        for client in clients:
            del self.until[client]
        self.open = {episode: owner for episode, owner in self.open.items() if owner is None or owner in self.until}

    @rule(name=st.sampled_from("ab"), ttl_s=st.sampled_from([5.0, 20.0]), replaces=st.booleans())
    def joins(self, name: str, ttl_s: float, replaces: bool) -> None:
        same = [client for client in self.until if self.names[client][0] == name]
        try:
            client = self.rig.join(name, ttl_s=ttl_s, replaces=replaces)
        except Conflict:
            assert same and not replaces
            return
        assert replaces or not same
        self.gone(*same)
        self.names[client], self.until[client] = (name, ttl_s), self.rig.at + ttl_s

    @rule(data=st.data())
    def beats(self, data: st.DataObject) -> None:
        if not self.names:
            return
        client = data.draw(st.sampled_from([*self.until, *self.until, *self.names]))
        try:
            self.rig.beat(client)
        except Conflict:
            assert client not in self.until
            return
        self.until[client] = self.rig.at + self.names[client][1]

    @rule(data=st.data(), seconds=st.sampled_from([4.0, 4.875, 19.0]))
    def beats_in_time(self, data: st.DataObject, seconds: float) -> None:
        for _ in range(2):
            self.time_passes(seconds)
            self.beats(data)
        self.time_passes(seconds)

    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        if self.until:
            client = data.draw(st.sampled_from(sorted(self.until)))
            self.rig.leave(client)
            self.gone(client)

    @rule(data=st.data())
    def opens(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([None, *self.until, *self.until, *self.names]))
        try:
            episode = self.rig.open(client=client, task="t")
        except Conflict:
            assert client not in self.until
            return
        assert client is None or client in self.until
        self.open[episode] = client

    @rule(data=st.data(), rewarded=st.booleans())
    def seals(self, data: st.DataObject, rewarded: bool) -> None:
        if not self.open:
            return
        episode = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[episode]
        if rewarded:
            self.rig.ends(episode)
        else:
            self.rig.begin(episode)
            self.rig.seal(episode)
        self.kept.add(episode)

    @rule(seconds=st.sampled_from([0.5, 4.0, 5.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.at += seconds
        self.rig.tick()
        self.gone(*[client for client, until in self.until.items() if until <= self.rig.at])

    @rule(seconds=st.sampled_from([-50.0, 0.0, 12.0]))
    def starts_again(self, seconds: float) -> None:
        self.rig.at += seconds
        self.rig.presence = Presence()
        self.rig.commands = type(self.rig.commands)(self.rig.state, self.rig.presence)
        self.rig.restart()
        self.until = {client: self.rig.at + self.names[client][1] for client in self.until}

    @invariant()
    def who_lives_and_what_is_open(self) -> None:
        state = self.rig.state
        assert set(state.clients.live) == set(self.until)
        assert {name for name, one in state.episodes.items() if one.state == "open"} == set(self.open)
        assert "client_gone" not in {state.episodes[name].reason for name in self.kept}
        lost = [one for one in state.episodes.values() if one.id not in self.open and one.id not in self.kept]
        assert {one.reason for one in lost} <= {"client_gone"}

    def teardown(self) -> None:
        """A replay knows all of it."""
        assert everything(folded(self.rig.events, self.rig.state.settings)) == everything(self.rig.state)


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(max_examples=150, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
