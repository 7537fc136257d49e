"""What each model's engines decide by its chat template: asked once, when the first request depends on it.

Answers are kept as long as the model has the same engines; an engine that was restarted with another template under the
same address is asked again when the proxy is. Nothing is kept of an engine that says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from ajet_proxy.core.dialects.messages_template import Template, questions, template_of
from ajet_proxy.io.engines import Engines
from ajet_proxy.io.upstream import EngineRequest, Upstream


class Templates:
    """Asks over `upstream`, and remembers for as long as `engines` are the same."""

    def __init__(self, upstream: Upstream, engines: Engines) -> None:
        self._upstream = upstream
        self._engines = engines
        self._known: dict[str, tuple[tuple[str, ...], Template]] = {}

    async def of(self, model: str, request: Callable[[str, bytes], EngineRequest]) -> Template:
        """The template of `model`; `request` makes a request to a route, with a body, in the name of the client.

        Raises `AjetError` if no engine can be reached.
        """
        urls = self._engines.candidates(model)
        known = self._known.get(model)
        if known is not None and known[0] == urls:
            return known[1]
        answers = [await self._ask(request(path, json.dumps(body).encode())) for path, body in questions(model)]
        found = template_of(answers)
        if found is None:
            return Template()
        self._known[model] = (urls, found)
        return found

    async def _ask(self, request: EngineRequest) -> Any:
        """The engine's answer, None if it is a refusal or none at all."""
        answer = await self._upstream.send(request)
        try:
            return json.loads(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        finally:
            answer.close()
