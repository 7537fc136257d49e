"""Responses that the engine keeps, told to the agent as if nothing more had been asked for.

vLLM can store a response and gives it out again under its id (``GET /v1/responses/ID``), with everything that was asked
for: what only the proxy asked for, too. So it is remembered how each of the latest `LIMIT` responses was asked for, and
one that is fetched is read once more in the same way. What is not remembered stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ajet_proxy.core.dialects.reading import Reader
from ajet_proxy.core.dialects.responses import RESPONSES
from ajet_proxy.core.exchange import Exchange

LIMIT = 10_000
_KEPT = re.compile(re.escape(RESPONSES.path) + "/([^/]+)/?").fullmatch


class Retold:
    """How responses were asked for, by their ids."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._readers: dict[str, Callable[[], Reader]] = {}

    def note(self, exchange: Exchange) -> None:
        """Remember the answer of `exchange`, if it is a response that the engine may keep."""
        if exchange.target != RESPONSES.path or exchange.asked.fields.get("store") is False:
            return
        for given in exchange.given:
            if given is not None and isinstance(given["id"], str):
                self._readers[given["id"]] = exchange.reader
        while len(self._readers) > self._limit:
            del self._readers[next(iter(self._readers))]

    def reader(self, method: str, path: str) -> Reader | None:
        """For a request to the engine's route `path`: what reads the answer, if it is a response asked for before."""
        found = _KEPT(path) if method == "GET" else None
        known = self._readers.get(found[1]) if found is not None else None
        return None if known is None else known()


def shown(reader: Reader, body: bytes) -> bytes:
    """What the agent sees of `body`, a response; all of it where it cannot be read."""
    try:
        return reader.document(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return body
