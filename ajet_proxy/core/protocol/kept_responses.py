"""Responses that the engine keeps, told to the agent as if nothing more had been asked for.

vLLM can store a response and gives it out again under its id (``GET /v1/responses/ID``), with everything that was asked
for: what only the proxy asked for, too. So it is remembered how each of the latest `LIMIT` responses was asked for, and
one that is fetched is read once more in the same way. What is not remembered stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.reading import Ask
from ajet_proxy.core.protocol.responses import RESPONSES

LIMIT = 10_000
_KEPT = re.compile(re.escape(RESPONSES.path) + "/([^/]+)/?").fullmatch


class Retold:
    """How responses were asked for, by their ids."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._asks: dict[str, Ask] = {}

    def keep(self, response: str, ask: Ask) -> None:
        """Remember that `response` answered `ask`."""
        self._asks[response] = ask
        if len(self._asks) > self._limit:
            del self._asks[next(iter(self._asks))]

    def kept(self, response: str) -> Ask | None:
        """How `response` was asked for, if that is remembered."""
        return self._asks.get(response)


def answers(exchange: Exchange) -> Iterator[str]:
    """The ids of the responses that `exchange` gave and that the engine may keep."""
    if exchange.target == RESPONSES.path and exchange.asked.fields.get("store") is not False:
        for given in exchange.given:
            if given is not None and isinstance(given["id"], str):
                yield given["id"]


def fetched(method: str, path: str) -> str | None:
    """The id of the response that a request to the engine's route `path`, as it is written, is for."""
    found = _KEPT(unquote(path)) if method == "GET" else None
    return None if found is None else found[1]


def shown(ask: Ask, body: bytes) -> bytes:
    """What the agent sees of `body`, a response to `ask`; all of it where it cannot be read."""
    try:
        return RESPONSES.reader(ask).document(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return body
