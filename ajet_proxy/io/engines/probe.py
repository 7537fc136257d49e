"""What each model's engines decide for themselves, such as by a chat template: asked once, when it first matters.

Answers are kept as long as the model has the same engines. An engine that restarted at the same address with another
template is asked again only when the proxy restarts. Nothing is kept of an engine that says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import aiohttp

from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Upstream, told

T = TypeVar("T")
Questions = Callable[[str], list[tuple[str, dict[str, Any]]]]


class EngineProbe(Generic[T]):
    """Asks a model's engines `questions` over `upstream`. What is `read` from the answers is kept for as long as
    `engines` are the same. `otherwise` is assumed of engines that say nothing."""

    def __init__(
        self, upstream: Upstream, engines: Engines, questions: Questions, read: Callable[[Sequence[Any]], T | None],
        *, otherwise: T,
    ) -> None:
        self._upstream = upstream
        self._engines = engines
        self._questions = questions
        self._read = read
        self._otherwise = otherwise
        self._known: dict[str, tuple[tuple[str, ...], T]] = {}

    async def of(self, model: str, request: Callable[[str, bytes], EngineRequest]) -> T:
        """What holds for `model`. `request` makes a request to a route, with a body, in the name of the client.

        Raises `AjetError` if no engine can be reached.
        """
        urls = self._engines.candidates(model)
        known = self._known.get(model)
        if known is not None and known[0] == urls:
            return known[1]
        answers = [await self._ask(request(path, json.dumps(body).encode())) for path, body in self._questions(model)]
        found = self._read(answers)
        if found is None:
            return self._otherwise
        self._known[model] = (urls, found)
        return found

    async def _ask(self, request: EngineRequest) -> Any:
        """The engine's answer, None if it is a refusal or none at all."""
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            status, body = await told(self._upstream, request)
            return json.loads(body) if status == 200 else None
        return None


class ChatRoutes:
    """Which of `engines` have no chat route: nothing of them can be captured.

    The Messages API is carried over the chat route, which reports ids. An engine that answers ``/v1/messages`` itself
    and has no chat route is not vLLM: its clients' requests pass as they are. It is known by its answers to real
    requests. Only for a request that cannot be carried is it asked beforehand, because an engine with the chat route
    must not see that. The question is a ``GET``, which neither route takes, and a server says so of a route that it
    has.
    """

    def __init__(self, upstream: Upstream, engines: Engines) -> None:
        self._upstream = upstream
        self._engines = engines
        self._lacking: set[tuple[str, ...]] = set()

    def lack(self, model: str) -> bool:
        """Whether the engines of `model` are known to have none."""
        return self._engines.candidates(model) in self._lacking

    def note(self, model: str) -> None:
        """The engines of `model` have none."""
        self._lacking.add(self._engines.candidates(model))

    async def look(self, dialect: Dialect, model: str, request: Callable[[str], EngineRequest]) -> bool:
        """Whether the engine has the route of `dialect` but not its target. `request` makes a ``GET`` to a route in the
        name of the client. Raises `AjetError` if no engine can be reached."""
        statuses = []
        for path in (dialect.target, dialect.path):
            answer = await self._upstream.send(request(path))
            answer.close()
            statuses.append(answer.status)
        if statuses == [404, 405]:
            self.note(model)
            return True
        return False
