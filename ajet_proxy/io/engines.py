"""Which engine serves a request: what a trainer announced, else what the command line gave.

Calls of one episode go to one engine while the list stays the same, so that its prefix cache serves the whole episode;
episodes spread evenly by hash. A request that names a model nobody knows still reaches an engine, whose own 404 then
says which models there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping


class Engines:
    """`announced` reads the ledger; `fixed` maps a model name (``""``: any) to base URLs."""

    def __init__(
        self,
        fixed: Mapping[str, tuple[str, ...]],
        announced: Callable[[str], tuple[str, ...]],
        models: Callable[[], tuple[str, ...]],
    ) -> None:
        self._fixed = fixed
        self._announced = announced
        self._models = models

    def of(self, model: str) -> tuple[str, ...]:
        """The base URLs that serve `model`, without any for other models."""
        return self._announced(model) or self._fixed.get(model) or self._fixed.get("", ())

    def candidates(self, model: str) -> tuple[str, ...]:
        """Where a request for `model` can go; empty while no engine at all is known."""
        found = self.of(model)
        return found or tuple(url for name in sorted({*self._models(), *self._fixed}) for url in self.of(name))

    def pick(self, model: str, sticky: str) -> str | None:
        """The engine for a request of the episode (or client) `sticky`; None while none is known."""
        urls = self.candidates(model)
        if not urls:
            return None
        digest = hashlib.blake2b(sticky.encode("utf-8", "replace"), digest_size=4).digest()
        return urls[int.from_bytes(digest) % len(urls)]

    def all(self) -> tuple[str, ...]:
        """Every engine once."""
        urls = [url for name in sorted({*self._models(), *self._fixed}) for url in self.of(name)]
        return tuple(dict.fromkeys(urls))
