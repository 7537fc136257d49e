"""Engines that are asked on a route that they do not have: they speak the client's protocol, and no other.

The Messages API is carried over the engine's chat route, which reports ids. An engine without a chat route that
answers ``/v1/messages`` itself is no vLLM: there is nothing to capture, and the agent's requests pass as they are. It
is known by its answers to real requests (`relay`). Only a request that cannot be carried asks beforehand, because an
engine that does have the chat route must not see it: ``GET`` is for neither route, and a server says so of those that
it has.

What is known holds as long as the model has the same engines.
"""

from __future__ import annotations

from collections.abc import Callable

from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.io.engines.pool import Engines
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream


class Foreign:
    """Which of `engines` are such."""

    def __init__(self, upstream: Upstream, engines: Engines) -> None:
        self._upstream = upstream
        self._engines = engines
        self._known: set[tuple[str, ...]] = set()

    def knows(self, model: str) -> bool:
        """Whether the engines of `model` are known to be such."""
        return self._engines.candidates(model) in self._known

    def note(self, model: str) -> None:
        """The engines of `model` are such."""
        self._known.add(self._engines.candidates(model))

    async def ask(self, dialect: Dialect, model: str, request: Callable[[str], EngineRequest]) -> bool:
        """Whether the engine has the route of `dialect` but not its target; `request` makes a ``GET`` to a route in
        the name of the client. Raises `AjetError` if no engine can be reached."""
        statuses = []
        for path in (dialect.target, dialect.path):
            answer = await self._upstream.send(request(path))
            answer.close()
            statuses.append(answer.status)
        if statuses == [404, 405]:
            self.note(model)
            return True
        return False
