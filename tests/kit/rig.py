"""A test's hands on a running proxy: open, ask, reward, look, over plain HTTP and with nothing of ours in between."""

from __future__ import annotations

from typing import Any

import httpx

STATES = ("open", "sealed", "ready", "leased", "trained", "recorded", "discarded")


class Rig:
    """`key` is sent with every request unless a call names another."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=300.0, trust_env=False)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """A control route, given without ``/ajet/v1``."""
        return self.http.post(f"/ajet/v1{path}", json={} if body is None else body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(f"/ajet/v1{path}", **options)

    def open(self, **body: Any) -> str:
        """The id of a new episode."""
        answer = self.post("/episodes", body)
        assert answer.is_success, answer.text
        return str(answer.json()["episode"])

    def chat(
        self, episode: str | None, content: Any = "hello", *, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """A chat call of `episode` (by its path); `content` is the user's text, or the whole list of messages."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        path = f"/e/{episode}/v1/chat/completions" if episode else "/v1/chat/completions"
        return self.http.post(path, json={"model": "stub", "messages": messages} | body, headers=headers)

    def reward(self, episode: str, value: Any = 1.0, **body: Any) -> httpx.Response:
        return self.post(f"/episodes/{episode}/rewards", {"value": value} | body)

    def record(self, episode: str) -> dict[str, Any]:
        answer = self.get(f"/episodes/{episode}", params={"tokens": "1"})
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def status(self) -> dict[str, Any]:
        """The proxy's status, after a check that every episode is in exactly one state."""
        found: dict[str, Any] = self.get("/status").raise_for_status().json()
        episodes = found["episodes"]
        assert episodes["opened"] == sum(episodes[state] for state in STATES), episodes
        return found
