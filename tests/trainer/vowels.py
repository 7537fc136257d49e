"""A task that a randomly initialised model learns in a few dozen steps: the reward is the answer's share of vowels.

Batches come straight from the engine over HTTP, as the proxy would capture them: exact ids, one logprob a token.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from ajet_sdk.sample import Batch, BatchEpisode, Group, Sample
from tests.trainer.scripted_proxy import ScriptedProxy


class Vowels:
    """Makes batches by asking the engines that the trainer announced. `rewards` has one mean reward a batch."""

    def __init__(self, target: set[int], *, turns: int = 1, max_tokens: int = 16, model: str = "policy") -> None:
        self.target, self.turns, self.max_tokens, self.model = target, turns, max_tokens, model
        self.rewards: list[float] = []
        self._count = itertools.count()

    def __call__(self, proxy: ScriptedProxy, ask: dict[str, Any]) -> Batch | None:
        if not proxy.upstreams or proxy.gate != "open":
            return None
        number, groups, size = next(self._count), ask.get("groups", 1), ask.get("group_size", 4)
        jobs = [(group, session) for group in range(groups) for session in range(size)]
        with ThreadPoolExecutor(16) as pool, httpx.Client(base_url=proxy.upstreams[0], timeout=120) as http:
            made = list(pool.map(lambda job: self.episode(http, proxy.version, number, *job), jobs))
        self.rewards.append(sum(episode.reward for episode in made) / len(made))
        split = [tuple(made[g * size : (g + 1) * size]) for g in range(groups)]
        return Batch(
            batch=f"b{number}",
            lease_until=0.0,
            policy_version=proxy.version,
            groups=tuple(Group(task=f"vowels {'ab'[g % 2]}", episodes=episodes) for g, episodes in enumerate(split)),
        )

    def episode(self, http: httpx.Client, version: int, number: int, group: int, session: int) -> BatchEpisode:
        """One conversation of `turns` turns, as one merged sample."""
        name = f"e{number}-{group}-{session}"
        answer = (
            http.post(
                "/v1/chat/completions",
                json={
                    "model": self.model,
                    "messages": [{"role": "user", "content": f"say vowels {'ab'[group % 2]}"}],
                    "max_tokens": self.max_tokens,
                    "temperature": 1.0,
                    "logprobs": True,
                    "return_token_ids": True,
                },
            )
            .raise_for_status()
            .json()
        )
        choice = answer["choices"][0]
        prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
        logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
        reward = sum(token in self.target for token in ids) / len(ids)
        sample = Sample(
            sample=f"{name}/0",
            episode=name,
            task=f"vowels {'ab'[group % 2]}",
            model=self.model,
            agent="",
            token_ids=tuple(prompt + ids),
            loss_mask=(0,) * len(prompt) + (1,) * len(ids),
            logprobs=(0.0,) * len(prompt) + tuple(logprobs),
            policy_versions=((version, len(ids)),),
            calls=(f"{name}/c0",),
            spans=((f"{name}/c0", len(prompt), len(prompt) + len(ids)),),
            reward=reward,
        )
        return BatchEpisode(name, sample.task, self.model, reward, (), (sample,))
