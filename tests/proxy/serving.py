"""The whole daemon in the test's own event loop, and an HTTP client for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiohttp

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.daemon import App
from ajet_proxy.io.http import keyring
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.storage.store import Store
from ajet_proxy.settings import Config

CHAT = {"model": "stub", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


@dataclass
class Answer:
    """One HTTP answer, whole. `json` is None where the body is no JSON."""

    status: int
    headers: Any
    body: bytes
    json: Any


@dataclass
class Client:
    """Asks one running daemon."""

    app: App
    session: aiohttp.ClientSession

    @property
    def store(self) -> Store:
        """The daemon's own."""
        return self.app._store

    @property
    def gate(self) -> Gatekeeper:
        """The daemon's own."""
        return self.app._gate

    @property
    def now(self) -> float:
        """The time by the daemon's clock."""
        return self.app._clock.now()

    async def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        raw = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.request(method, self.app.url + path, headers=sent, **raw) as answer:
            whole = await answer.read()
            is_json = answer.content_type == "application/json" and whole
            return Answer(answer.status, answer.headers, whole, await answer.json() if is_json else None)

    async def control(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        return await self.ask(method, f"/ajet/v1{path}", body, **more)

    async def chat(self, episode: str, content: str = "Hello", **more: str) -> Answer:
        """One chat completion of `episode`."""
        body = CHAT | {"messages": [{"role": "user", "content": content}]}
        return await self.ask("POST", f"/e/{episode}/v1/chat/completions", body, **more)

    async def open(self, body: Any, **more: Any) -> str:
        """The name of an episode that is opened."""
        answer = await self.control("POST", "/episodes", body, **more)
        assert answer.status == 200, answer.body
        return str(answer.json["episode"])

    async def play(self, episode: str, **more: str) -> None:
        """One call of `episode`, and its reward."""
        assert (await self.chat(episode, **more)).status == 200
        assert (await self.control("POST", f"/episodes/{episode}/rewards", {"value": 1.0})).status == 200

    async def record(self, episode: str, **more: Any) -> Any:
        return (await self.control("GET", f"/episodes/{episode}", **more)).json

    async def status(self, **more: Any) -> Any:
        return (await self.control("GET", "/status", **more)).json

    async def until(self, reached: Callable[[Any], object], **more: Any) -> None:
        """Wait until the status is as it should be."""

        async def looked() -> object:
            return reached(await self.status(**more))

        await eventually(looked)

    def key(self, claims: Claims) -> str:
        """A key that this daemon's secret signed."""
        return keyring.keys(Path(self.app.config.data_dir)).issue(claims)


@contextlib.asynccontextmanager
async def serving(data_dir: Path, **settings: Any) -> AsyncIterator[Client]:
    """``async with serving(tmp_path, upstream=(stub.url,)) as client``; settings are those of `Config`."""
    usual: dict[str, Any] = {"listen": "127.0.0.1:0", "data_dir": str(data_dir), "drain_s": 5.0}
    app = App(Config(**usual | settings))
    await app.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(app, session)
    finally:
        await app.stop()


async def eventually(condition: Callable[[], object], limit_s: float = 300.0) -> None:
    """Return once `condition` holds, which may be awaited; it may take long on a busy machine."""
    deadline = time.monotonic() + limit_s
    while not (await found if isawaitable(found := condition()) else found):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def identity_holds(status: Any) -> bool:
    """``opened = open + sealed + ready + leased + trained + recorded + discarded`` (contract §1.1)."""
    terms = status["episodes"]
    states = ("open", "sealed", "ready", "leased", "trained", "recorded", "discarded")
    return bool(terms["opened"] == sum(terms[state] for state in states))
