"""How large the frame of a lease becomes, told before it is made, and so how many groups one lease takes.

Idea: a bound from what the ledger has at hand (lengths of texts, turns and names) costs nothing beside the frame. A
lease takes the groups that were complete first until the next one would go beyond `LEASE_BYTES`; whoever asked for more
asks again. A group that alone is larger would come back with every lease for ever, so its episodes that take more than
their part are discarded.

Invariant: what `most_bytes` says of a lease's episodes together is not less than the length of its frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.queues import Groups

LEASE_BYTES = 256 << 20
"""Some 30 million tokens, more than one step is made of. Such a frame is made in up to ten seconds, which trainers wait
(`ajet_sdk.frame.MAX_FRAME_BYTES` is what they read), and takes eleven times its size in memory meanwhile."""
_TOKEN = 8
"""Its id and its logprob."""
_EPISODE, _REWARD, _SAMPLE, _TURN, _SPAN = 400, 100, 300, 40, 20
"""The names of the fields, all numbers, and the lengths that stand before texts and lists; the frame's own, and a
group's, are counted with each episode. A turn has two runs of its mask, and each version that sampled it a span."""
_CHARACTER = 4
"""Of UTF-8, at most."""


def most_bytes(episode: Episode, model: str) -> int:
    """What `model` learns from an episode that is merged takes no more of a frame."""
    chains = [chain for chain in episode.chains if chain.turns[0].model == model]
    turns = [turn for chain in chains for turn in chain.turns]
    return (
        _EPISODE + _text(episode.id, episode.named_task, episode.named_task, model)
        + sum(_REWARD + _text(one.id, one.call, one.agent, one.note) for one in episode.rewards.values())
        + sum(_SAMPLE + _TOKEN * chain.turns[-1].end + _text(episode.id, chain.turns[0].agent) for chain in chains)
        + sum(_TURN + _SPAN * len(turn.policy_versions) + _text(turn.call, turn.call) for turn in turns)
    )


def leading(groups: Groups, sizes: Mapping[str, int]) -> Groups:
    """The first of `groups`, as many as one lease takes; none if it does not take even the first."""
    total, taken = 0, 0
    for _, names in groups:
        total += sum(sizes[name] for name in names)
        if total > LEASE_BYTES:
            break
        taken += 1
    return groups[:taken]


def too_large(names: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Those of a group that take more than their part of a lease: whatever group of as many the others come into, a
    lease takes it."""
    return [name for name in names if sizes[name] > LEASE_BYTES // len(names)]


def _text(*texts: str | None) -> int:
    return sum(len(text) * (1 if text.isascii() else _CHARACTER) for text in texts if text is not None)
