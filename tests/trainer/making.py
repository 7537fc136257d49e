"""Calls, samples, episodes and batches for trainer tests, lawful unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ajet_sdk.sample import Batch, BatchEpisode, Group, Sample

PROCESSED = {"logprobs": "processed"}
"""The facts of a call that nothing shaped, where the engine reports what it sampled from."""


def sample(
    name: str = "s", turns: int = 1, *, sampled: int = 3, between: int = 2, version: int = 0,
    facts: tuple[Mapping[str, Any] | None, ...] = (),
) -> Sample:
    """`turns` calls merged: a prompt of four tokens, `sampled` tokens a call, `between` tokens from the environment.
    `facts` tell for each call how it was sampled."""
    ids, mask, spans = [1, 2, 3, 4], [0, 0, 0, 0], []
    for turn in range(turns):
        if turn:
            ids += range(10, 10 + between)
            mask += [0] * between
        spans.append((f"{name}/c{turn}", len(ids), len(ids) + sampled))
        ids += range(20, 20 + sampled)
        mask += [1] * sampled
    return Sample(
        sample=name,
        episode=name.split("/")[0],
        task="t",
        model="policy",
        agent="",
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(-0.5 * bit for bit in mask),
        policy_versions=((version, sampled * turns),),
        calls=tuple(call for call, _, _ in spans),
        spans=tuple(spans),
        sampling=tuple((fact, sampled) for fact in facts or (PROCESSED,) * turns),
        finish_reasons=("stop",) * turns,
        turns=tuple(range(turns)),
    )


def episode(name: str = "e", reward: float = 1.0, *, samples: int = 1, task: str = "t", **kwargs: Any) -> BatchEpisode:
    """An episode that came apart into `samples` timelines."""
    made = tuple(sample(f"{name}/{index}", **kwargs) for index in range(samples))
    return BatchEpisode(name, task, "policy", reward, (), made)


def duel(name: str, reward: float) -> BatchEpisode:
    """An episode of two agents, of which one gets what the other loses."""
    shares = {"proposer": reward, "critic": -reward}
    samples = tuple(
        replace(sample(f"{name}/{index}"), agent=agent, reward=value)
        for index, (agent, value) in enumerate(shares.items())
    )
    rewards = tuple({"value": value, "agent": agent} for agent, value in shares.items())
    return BatchEpisode(name, "t", "policy", 0.0, rewards, samples)


def batch(name: str = "b", *groups: Group, version: int = 0) -> Batch:
    """A batch of `groups`, or of two groups of two episodes each with rewards 1 and 0."""
    made = groups or tuple(
        Group(f"t{g}", tuple(episode(f"{name}-{g}-{s}", float(s == 0), task=f"t{g}") for s in range(2)))
        for g in range(2)
    )
    return Batch(name, 0.0, version, made)
