"""An agent as its author wrote it: the plain ``openai`` package (or ``httpx``), a base URL, and the will to try again.

It notes an answer when it has all of it, and a reward when it is acknowledged; what is noted, the proxy must have.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai

from tests.faults.notes import Notes

PATIENCE_S = 600.0
TIMEOUT_S = 4.0
"""Seconds that it waits for one answer, or a piece of one, before it gives up and asks again."""
BROKEN = (openai.APIError, httpx.TransportError, httpx2.TransportError)  # openai speaks httpx2
LANE, TASKS = "default", 3
MEMBERS = {"plans": "planner", "codes": "coder"}
"""The agents of an episode and their models, which have a trainer each."""
MODELS = tuple(MEMBERS.values())
ABSENT = "judge"
"""A model whose trainer never comes."""
PAUSE_S = 0.6
"""Nobody holds it back, so it rests for up to so long after an episode."""


class Agent:
    """One life of one agent, or of several that take turns: `members` names their models."""

    def __init__(self, url: str, name: str, notes: Path, members: Mapping[str, str]) -> None:
        self.url, self.name, self.notes, self.members = url, name, Notes(notes), members
        self.dice = random.Random(name)
        self.http = httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def episode(self, count: int) -> None:
        """An episode that opens on its first call."""
        episode, task = f"{self.name}-{count}", f"task {self.dice.randrange(TASKS)}"
        self.turns(episode, f"{self.url}/e/{episode}/v1", "none", task)

    def turns(self, episode: str, base: str, key: str, task: str) -> None:
        """A few turns, some streamed, then the reward. The members have their turns one after the other."""
        client = openai.OpenAI(base_url=base, api_key=key, max_retries=3, timeout=TIMEOUT_S)
        self.notes.add("began", episode=episode)
        messages: list[Any] = [{"role": "user", "content": task}]
        for turn in range(self.dice.randint(len(self.members), 4)):
            member = sorted(self.members)[turn % len(self.members)]
            asked = partial(self.asked, member, task, messages)
            ask = partial(self.dice.choice((self.whole, self.stream)), client, asked)
            call, text, ids = self.insist(ask)
            self.notes.add("call", episode=episode, call=call, ids=ids, model=self.members[member])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
        reward = {"value": float(self.dice.randrange(10)), "id": f"of-{episode}"}
        self.notes.add("offer", episode=episode, **reward)
        self.insist(lambda: self.reward(episode, reward))
        self.notes.add("reward", episode=episode, **reward)

    def asked(self, member: str, task: str, messages: list[Any]) -> dict[str, Any]:
        return {
            "model": self.members[member], "messages": messages, "extra_body": {"return_token_ids": True},
            "max_tokens": 24, "seed": self.dice.randrange(1 << 30),
            "extra_headers": {"X-AJet-Task": task, "X-AJet-Agent": member},
        }

    def whole(self, client: openai.OpenAI, asked: Callable[[], dict[str, Any]]) -> tuple[str, str, list[int]]:
        raw = client.chat.completions.with_raw_response.create(**asked())
        choice: Any = raw.parse().choices[0]
        return raw.headers["x-ajet-call"], choice.message.content or "", choice.token_ids

    def stream(self, client: openai.OpenAI, asked: Callable[[], dict[str, Any]]) -> tuple[str, str, list[int]]:
        raw = client.chat.completions.with_raw_response.create(stream=True, **asked())
        text, finished = "", False
        ids: list[int] = []
        for event in raw.parse():
            choice: Any = event.choices[0]
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            finished = finished or choice.finish_reason is not None
        if not finished:
            raise httpx.RemoteProtocolError("the stream ended early")
        return raw.headers["x-ajet-call"], text, ids

    def reward(self, episode: str, reward: dict[str, Any]) -> None:
        answer = self.http.post(f"{self.url}/ajet/v1/episodes/{episode}/rewards", json=reward)
        if answer.status_code >= 500:
            raise httpx.RemoteProtocolError(answer.text)
        answer.raise_for_status()

    def insist(self, ask: Callable[[], Any]) -> Any:
        """Until it is answered. What is refused for good is noted: nothing here deserves that."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ask()
            except (*BROKEN, httpx.HTTPStatusError) as error:
                refused = isinstance(error, (openai.APIStatusError, httpx.HTTPStatusError))
                lasting = refused and error.response.status_code < 500  # type: ignore[union-attr]
                if lasting or time.monotonic() > give_up:
                    self.fail(error)
                    raise
                time.sleep(0.05)

    def fail(self, error: Exception) -> None:
        """Trying again did not help."""
        self.notes.add("failed", why=repr(error)[:500])


def run(url: str, name: str, notes: Path, stop: Path, member: str) -> None:
    """Plays episodes of the model of one `member`, until the file `stop` is there."""
    agent, count = Agent(url, name, notes, {member: MEMBERS[member]}), 0
    while not stop.exists():
        count += 1
        try:
            agent.episode(count)
            time.sleep(agent.dice.uniform(0, PAUSE_S))
        except (*BROKEN, httpx.HTTPStatusError):
            sys.exit(1)
