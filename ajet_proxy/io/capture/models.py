"""``GET /v1/models``: the models of all engines as one list, and each by its name.

Each engine lists its own models alone, so all of them are asked, as the client asked. vLLM has no route for one model:
its entry in the list is the answer. A model is listed once, as the first engine lists it that has it. A single engine
answers for itself, unless the model has another name there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from ajet_proxy.core.protocol.reading import UNREADABLE
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream
from ajet_sdk.errors import AjetError

MODELS = "/v1/models"
PATIENCE_S = 5.0
"""An engine that does not list its models by then is left out."""


def model_named(method: str, path: str) -> str | None:
    """The model that a request to the engine's route `path` (as it is written) asks about: "" for all of them, None if
    it asks about none."""
    plain = unquote(path).rstrip("/")
    if method != "GET" or (plain != MODELS and not plain.startswith(MODELS + "/")):
        return None
    return plain.removeprefix(MODELS).removeprefix("/")


async def listed(
    engines: tuple[str, ...], upstream: Upstream, request: EngineRequest, model: str
) -> web.Response | None:
    """The answer to `request`, which asks about `model`, by what the `engines` at these addresses list. None if no
    engine lists the model."""
    headers = request.headers.copy()
    headers["Accept-Encoding"] = "identity"
    question = replace(request, target=MODELS, headers=headers)
    cards: dict[str, Any] = {}
    for found in reversed(await asyncio.gather(*(_cards(upstream, url, question) for url in engines))):
        cards = {**cards, **found}
    shown = cards.get(model) if model else {"object": "list", "data": [*cards.values()]}
    return web.json_response(shown) if cards and shown else None


async def _cards(upstream: Upstream, url: str, request: EngineRequest) -> Mapping[str, Any]:
    """The models that the engine at `url` lists, by name; nothing if it does not say."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            status, body = await upstream.told(request, url)
        return {card["id"]: card for card in json.loads(body)["data"]} if status == 200 else {}
    except (AjetError, aiohttp.ClientError, TimeoutError, *UNREADABLE):
        return {}
