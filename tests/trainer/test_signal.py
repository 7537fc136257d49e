"""Groups that the daemon discards for having no signal have none for the trainer either, which compares the rewards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import views
from ajet_sdk.sample import Group
from ajet_trainer.admission import has_signal
from tests.kit.ledger_rig import LedgerRig

AGENTS = st.sampled_from(["", "critic"])
SAMPLED = st.sampled_from([1, 1, 0])
"""Tokens of a call: one that sampled none is whole, and is trained nowhere."""
VALUES = st.sampled_from([0.0, 1.0]) | st.sampled_from([0.1, 0.1, 0.2, 0.3, -0.1, 1000.1, -1000.0])
"""Some of which have sums that are off in their last digits."""
REWARDS = st.lists(st.tuples(VALUES, st.sampled_from([None, "", "critic"]), st.booleans()), min_size=1, max_size=3)


@given(
    st.lists(st.tuples(st.lists(st.tuples(AGENTS, SAMPLED), min_size=1, max_size=3), REWARDS), min_size=2, max_size=8),
    st.integers(min_value=2, max_value=4),
)
def test_what_is_discarded_had_no_signal_and_what_is_leased_had_one(
    played: list[tuple[list[tuple[str, int]], list[tuple[float, str | None, bool]]]], size: int
) -> None:
    rig = LedgerRig()
    for agents, rewards in played:
        episode = rig.open(task="t")
        for number, (agent, sampled) in enumerate(agents):
            rig.call(episode, (number, 1), range(sampled), agent=agent)
        for value, agent, final in rewards:
            if rig.state_of(episode) != "discarded":
                rig.reward(episode, value, agent=agent, final=final and agent is not None)
        if rig.state_of(episode) == "open":
            rig.seal(episode)
    ready = [name for name in rig.state.episodes if rig.state_of(name) == "ready"]
    before = {name: views.delivered(rig.state.episodes[name], "m", None) for name in ready}
    batch = rig.lease(groups=1, group_size=size, signal=True)
    taken = rig.state.batches[batch].groups[0][1] if batch else ()
    if taken:
        assert has_signal(Group("t", tuple(before[name] for name in taken)))
    gone = [name for name in ready if rig.state.episodes[name].reason == "filtered"]
    assert len(gone) % size == 0
    for at in range(0, len(gone), size):
        assert not has_signal(Group("t", tuple(before[name] for name in gone[at : at + size])))
