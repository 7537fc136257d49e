"""Which engines have no chat route: they answer ``/v1/messages`` themselves, and nothing of them can be captured.

The Messages API is carried over the engine's chat route, which reports ids. An engine that answers ``/v1/messages`` and
has no chat route is no vLLM: its clients' requests pass as they are. It is known by its answers to real requests. Only
a request that cannot be carried asks beforehand, because an engine that does have the chat route must not see it:
``GET`` is for neither route, and a server says so of those that it has.

What is known holds as long as the model has the same engines.
"""

from __future__ import annotations

from collections.abc import Callable

from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.io.engines.pool import Engines
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream


class ChatRoutes:
    """What is known of the chat routes of `engines`."""

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
