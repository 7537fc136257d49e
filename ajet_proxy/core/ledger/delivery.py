"""What a trainer gets of an episode."""

from __future__ import annotations

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.trajectory.rewards import total
from ajet_proxy.core.trajectory.samples import samples_of
from ajet_sdk.sample import BatchEpisode


def delivered(episode: Episode, model: str, given: int | None) -> BatchEpisode:
    """What `model` learns from an episode that has the first `given` of its rewards."""
    rewards = tuple(episode.rewards.values())[:given]
    samples = samples_of(episode.timelines, episode=episode.id, task=episode.named_task, rewards=rewards)
    return BatchEpisode(
        episode=episode.id,
        task=episode.named_task,
        model=model,
        reward=total(rewards) or 0.0,
        rewards=tuple(reward.to_json() for reward in rewards),
        samples=tuple(sample for sample in samples if sample.model == model),
    )
