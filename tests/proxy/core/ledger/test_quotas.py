"""Quotas: no tenant gets more than its own, and nobody is slowed by another's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import quotas
from ajet_proxy.core.ledger.quotas import Quota, Quotas, parse
from ajet_sdk.errors import OverQuota
from tests.kit.ledger_rig import LedgerRig


class Rig(LedgerRig):
    """A ledger whose events are checked against quotas first, as the store does."""

    def __init__(self, **given: Quota) -> None:
        super().__init__()
        self.quotas = Quotas({name.replace("others", "*"): quota for name, quota in given.items()}, self.state)

    def run(self, events: Sequence[ev.Event]) -> Sequence[ev.Event]:
        self.quotas.check(events)
        done = super().run(events)
        self.quotas.spend(events)
        return done


def refusal(rig: Rig, tenant: str, *, episode: str | None = None) -> tuple[str | None, float | None] | None:
    """The refusal that a new episode, or a call of `episode`, meets: nothing, or the quota and when to come back."""
    try:
        if episode is None:
            rig.open(tenant=tenant)
        else:
            rig.begin(episode, tenant=tenant)
    except OverQuota as error:
        return error.code, error.retry_after
    return None


def test_open_episodes_are_limited_at_a_time() -> None:
    rig = Rig(a=Quota(episodes=2))
    first = rig.open(tenant="a")
    assert refusal(rig, "a") is None
    assert refusal(rig, "a") == ("episodes_quota", 10.0)
    assert refusal(rig, "b") is None
    assert refusal(rig, "a", episode=first) is None
    assert refusal(rig, "a", episode="new-on-first-sight") == ("episodes_quota", 10.0)
    assert rig.state.episodes.find("new-on-first-sight") is None
    rig.abort(first)
    assert refusal(rig, "a") is None


@given(st.lists(st.floats(min_value=0.0, max_value=40.0), max_size=60), st.integers(min_value=1, max_value=20))
def test_no_window_has_more_requests_than_its_minutes_and_one_burst(gaps: list[float], limit: int) -> None:
    rig = Rig(a=Quota(requests_per_minute=limit))
    episode, other = rig.open(tenant="a"), rig.open(tenant="b")
    passed = []
    for gap in gaps:
        rig.at += gap
        told = refusal(rig, "a", episode=episode)
        if told is None:
            passed.append(rig.at)
        else:
            assert told[0] == "requests_quota"
            assert 0 < (told[1] or 0) <= 60.0 / limit + 1e-6
        assert refusal(rig, "b", episode=other) is None
    for start, began in enumerate(passed):
        for end in range(start, len(passed)):
            assert end - start + 1 <= limit + (passed[end] - began) * limit / 60.0 + 1e-6


def test_an_episode_that_opens_without_a_call_is_a_request() -> None:
    rig = Rig(a=Quota(requests_per_minute=3))
    episode = rig.open(tenant="a")
    assert refusal(rig, "a") is None
    assert refusal(rig, "a", episode="opened by its first call") is None
    assert refusal(rig, "a") == refusal(rig, "a", episode=episode) == ("requests_quota", 20.0)
    assert refusal(rig, "b") is None
    rig.at += 20.0
    assert refusal(rig, "a") is None


def test_tokens_are_paid_after_the_call_and_hold_up_the_next() -> None:
    rig = Rig(a=Quota(tokens_per_minute=60))
    episode = rig.open(tenant="a")
    rig.call(episode, tenant="a", prompt=tuple(range(80)), sampled=tuple(range(10)))
    assert refusal(rig, "a", episode=episode) == ("tokens_quota", 31.0)
    assert refusal(rig, "a") is None, "an episode may open"
    rig.at += 31.0
    assert refusal(rig, "a", episode=episode) is None


def test_bytes_are_those_of_episodes_that_have_not_ended() -> None:
    rig = Rig(a=Quota(bytes=100))
    first, second = rig.open(tenant="a"), rig.open(tenant="a")
    rig.call(first, tenant="a", prompt=tuple(range(20)), sampled=(1, 2, 3))
    assert refusal(rig, "a") is None
    rig.at += 1.0
    assert refusal(rig, "a") == ("bytes_quota", 10.0)
    assert refusal(rig, "b") is None
    assert refusal(rig, "a", episode=second) is None
    rig.reward(first)
    rig.at += 1.0
    assert (rig.state_of(first), refusal(rig, "a")) == ("ready", ("bytes_quota", 10.0))
    rig.abort(first)
    rig.at += 1.0
    assert refusal(rig, "a") is None


def test_how_many_others_have_open_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to count what a tenant has open, nor to add up its bytes again for each tenant."""
    sizes, size = list[str](), quotas.size_of
    monkeypatch.setattr(quotas, "size_of", lambda episode: sizes.append(episode.id) or size(episode))
    rig = Rig(others=Quota(episodes=3, bytes=1000))
    mine = [rig.open(tenant=tenant) for tenant in "abcabc"]
    assert sizes == []
    rig.at += quotas.BYTES_FRESH_S
    for tenant in "abc":
        rig.open(tenant=tenant)
    assert sorted(sizes) == sorted(mine)
    rig.seal(mine[0])
    rig.abort(mine[1])
    known = rig.state.episodes.open_of.copy()
    rig.state.episodes.derive()
    assert known == rig.state.episodes.open_of == {"a": 2, "b": 2, "c": 3}


def test_a_tenant_within_its_bytes_may_go_on_for_ever() -> None:
    rig = Rig(a=Quota(bytes=200))
    for _ in range(50):
        for _ in range(2):
            episode = rig.open(tenant="a", task="t")
            rig.call(episode, tenant="a", prompt=tuple(range(20)))
            rig.reward(episode)
        rig.ack(rig.batch())
        rig.at += 1.0
    assert rig.state.tallies.counts["trained"] == 100


def test_a_users_chat_that_is_over_is_no_bytes_of_its_tenant() -> None:
    """However long it waits for a judge or a trainer, the next user is answered."""
    rig = Rig(a=Quota(bytes=50))
    rig.call("chat", tenant="a", prompt=tuple(range(20)), traffic="chat", judged=True)
    rig.at += 1.0
    assert refusal(rig, "a") == ("bytes_quota", 10.0)
    rig.seal("chat")
    rig.at += 1.0
    assert (rig.state_of("chat"), refusal(rig, "a")) == ("sealed", None)


def test_metadata_and_notes_are_bytes_too() -> None:
    rig = Rig(a=Quota(bytes=1000))
    first = rig.open(tenant="a", metadata={"about": "x" * 500})
    rig.at += 1.0
    assert refusal(rig, "a") is None
    rig.reward(first, final=False, note="\u00fc" * 245)
    rig.at += 1.0
    assert refusal(rig, "a") == ("bytes_quota", 10.0)


def test_a_quota_of_nothing_and_a_tenant_without_one_are_free() -> None:
    rig = Rig(a=Quota())
    for tenant in ("a", "b"):
        episode = rig.open(tenant=tenant)
        assert [refusal(rig, tenant, episode=episode) for _ in range(50)] == [None] * 50
    assert rig.quotas.of("b") is None
    rig.quotas.check([ev.CallStarted(1.0, "nobody's", ("c",), "m", "", "path", "")])


def test_an_own_quota_goes_before_that_of_all_others() -> None:
    quotas = Rig(a=Quota(episodes=1), others=Quota(episodes=2)).quotas
    assert (quotas.of("a"), quotas.of("b")) == (Quota(episodes=1), Quota(episodes=2))


def test_tables_are_read() -> None:
    assert parse({"a": {"episodes": 3, "bytes": 0}, "*": {}}) == {"a": Quota(episodes=3), "*": Quota()}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("x", "must be tables"), ({"a": 1}, "must be tables"), ({"a": {"episode": 1}}, "did you mean 'episodes'"),
        ({"a": {"bytes": -1}}, "at least 0"), ({"a": {"bytes": True}}, "integer"), ({"a": {"bytes": 1.5}}, "integer"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(table: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(table)


def test_what_passes_through_takes_from_the_same_minute() -> None:
    rig = Rig(a=Quota(requests_per_minute=2, tokens_per_minute=10))
    rig.quotas.pass_one("a", rig.at)
    assert refusal(rig, "a", episode="opened by its first call") is None
    with pytest.raises(OverQuota) as caught:
        rig.quotas.pass_one("a", rig.at)
    assert (caught.value.code, caught.value.retry_after) == ("requests_quota", 30.0)
    rig.quotas.pass_one("b", rig.at)
    rig.quotas.use("b", 10**9, rig.at)
    rig.quotas.use("a", 40, rig.at + 60.0)
    with pytest.raises(OverQuota) as caught:
        rig.quotas.pass_one("a", rig.at + 60.0)
    assert caught.value.code == "tokens_quota"
    assert caught.value.retry_after == pytest.approx(31 * 6.0)
