"""Which engines serve a model: those a trainer announced, else those the command line gave.

A request that names a model nobody knows still reaches an engine, whose own 404 then says what is wrong.
"""

from __future__ import annotations

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
        urls = self._announced(model) or self._fixed.get(model) or self._fixed.get("", ())
        return tuple(map(base_url, urls))

    def candidates(self, model: str) -> tuple[str, ...]:
        """Where a request for `model` can go; empty while no engine at all is known."""
        return self.of(model) or self.all()

    def all(self) -> tuple[str, ...]:
        """Every engine once."""
        urls = [url for name in self.names() for url in self.of(name)]
        return tuple(dict.fromkeys(urls))

    def names(self) -> tuple[str, ...]:
        """The models that have engines of their own; ``""`` among them stands for any model."""
        return tuple(sorted({*self._models(), *self._fixed}))


def base_url(url: str) -> str:
    """`url` without a trailing ``/`` or ``/v1``, so that an engine may be named as clients name it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
