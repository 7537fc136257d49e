"""An inference server: what the daemon asks of it, besides what agents ask.

The daemon knows an engine by this protocol, and `ajet_proxy.io.engines.vllm` has the words of the one that there is.
How ids and logprobs are asked for on the routes that agents use, the dialects say (`ajet_proxy.core.protocol`). What
its weights are, a trainer tells an engine itself.

An engine is reached by an `Ask`: over a connection of its own, or as an agent's request went out (`upstream`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import aiohttp

from ajet_proxy.core.trajectory.call import Captured, Lost, Unscored
from ajet_sdk.errors import AjetError

Ask = Callable[[str, str, Mapping[str, Any] | None], Awaitable[tuple[int, bytes]]]
"""Asks a route with a method and a JSON body; the status and the body of the answer. What fails is one of `FAILED`."""
FAILED: Final = (AjetError, aiohttp.ClientError, TimeoutError)
"""Raised where an engine does not answer."""
Ids = tuple[int, ...]


class Rendered(NamedTuple):
    """A prompt as the engine renders it, and the longest context of its model, if it tells that."""

    ids: Ids
    longest: int | None


class EngineState(NamedTuple):
    """An engine's word on itself: its own models, each with its name, its folder and its longest context; the
    version of its weights, if it tells one; and the request that lets it go on, empty unless it is paused."""

    models: list[list[Any]]
    version: Any
    resume: str


class Engine(Protocol):
    """One engine. Each question raises one of `FAILED` if nothing answers it, unless it says otherwise."""

    async def probe(self) -> EngineState:
        """Ask what it says of itself. Nothing is known of one that does not answer; no error is raised."""

    async def pause(self) -> None:
        """Freeze it with the calls in flight. `EngineError` if it does not."""

    async def resume(self) -> None:
        """Let it go on. `EngineError` if it does not say that it does."""

    async def name_version(self, version: int) -> None:
        """Tell it the version of its weights. `EngineError` if it has no place for that."""

    async def generate(self, route: str, question: Mapping[str, Any]) -> tuple[int, bytes]:
        """The status and the body of the answer to a `question` of our own on one of the routes that agents use."""

    async def tokenize(self, body: Mapping[str, Any]) -> Rendered | None:
        """The tokens of a conversation or a text; None if it does not give them."""

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of `ids`; ValueError if it gives none."""

    async def score(self, choice: Unscored, model: str, salt: Any) -> Captured | Lost:
        """`choice` with its logprobs, or as lost if it does not tell them. `salt` keeps the prompt private."""

    async def stops(self, model: str, token: int) -> bool | None:
        """Tell whether `token` stops `model`; None if it does not say."""
