"""Agents of the end-to-end tests: two-turn conversations, rewarded for tokens from the lower half of the vocabulary.

They know the proxy's address and nothing of the trainer. A game that an outage cuts short is aborted, not repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence

import httpx

from ajet_sdk import aio
from ajet_sdk.errors import AjetError

HALF = 275
UNSHAPED = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0
}
"""So that no default of the engine counts."""


class Players:
    """Plays in `parallel` threads while inside; every `group_size` games in a row share a task. Each turn is sampled at
    its own of `temperatures`."""

    def __init__(
        self, url: str, *, model: str, group_size: int, parallel: int, temperatures: Sequence[float] = (1.0, 1.0),
        tokens: int = 8,
    ) -> None:
        self.url, self.model, self.group_size = url, model, group_size
        self.temperatures, self.tokens = temperatures, tokens
        self._games = itertools.count()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._play_on, daemon=True) for _ in range(parallel)]

    def __enter__(self) -> Players:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        give_up = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, give_up - time.monotonic()))

    def _play_on(self) -> None:
        while not self._over.is_set():
            with self._lock:
                game = next(self._games)
            try:
                self.play(f"half-{game // self.group_size}")
            except (httpx.HTTPError, AjetError, KeyError):
                self._over.wait(0.5)

    def play(self, task: str) -> float:
        """One episode; its reward. It runs in the calling thread alone, because that may be on a host of its own."""
        return asyncio.run(self._game(task))

    async def _game(self, task: str) -> float:
        async with (
            aio.episode(task=task, model=self.model, proxy_url=self.url) as episode,
            httpx.AsyncClient(trust_env=False, verify=False) as http,
        ):
            messages = [{"role": "user", "content": "say the number"}]
            tokens: list[int] = []
            for temperature in self.temperatures:
                answer = (await http.post(
                    f"{episode.base_url}/chat/completions",
                    headers={"Authorization": f"Bearer {episode.api_key}"},
                    json={
                        "model": self.model, "messages": messages, "max_tokens": self.tokens,
                        "temperature": temperature, "return_token_ids": True, **UNSHAPED,
                    },
                    timeout=600.0,
                )).raise_for_status().json()  # fmt: skip
                choice = answer["choices"][0]
                tokens += choice["token_ids"]
                messages += [choice["message"], {"role": "user", "content": "again"}]
            reward = sum(token < HALF for token in tokens) / max(1, len(tokens))
            await episode.reward(reward)
        return reward
