"""vLLM as an `Engine`: the routes on which it is asked about itself, about prompts and about answers.

It is paused by ``/pause?mode=keep``: calls in flight stop between two tokens and go on after ``/resume``, and their
clients notice nothing but time. The routes that change it exist when it runs with ``VLLM_SERVER_DEV_MODE=1``. An engine
without them is an error that says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import aiohttp
from msgspec.structs import replace

from ajet_proxy.core.protocol import ending, rescoring
from ajet_proxy.core.tokens import are_tokens
from ajet_proxy.core.trajectory.call import Captured, Lost, Unscored
from ajet_proxy.io.engines.engine import FAILED, Ask, Engine, EngineState, Rendered
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream
from ajet_sdk.errors import EngineError

logger = logging.getLogger(__name__)

PAUSE: Final = "/pause?mode=keep&clear_cache=false"
"""Keeps what is computed for the calls in flight: vLLM would otherwise compute it all again before they go on."""
MODELS: Final = "/v1/models"
_PAUSED: Final = "/is_paused"
NO_VERSION: Final = "default"
"""vLLM's word on its weights until it is told their version."""
AGENT: Final = "ajet-proxy"
UNREACHABLE: Final = "engine_unreachable"


class Refused(EngineError):
    """An error that no other attempt would change: a refusal, or nobody who listens."""


class Vllm(Engine):
    """The vLLM at `url`, which errors name."""

    def __init__(self, ask: Ask, url: str = "") -> None:
        self._ask, self._url = ask, url

    async def probe(self) -> EngineState:
        models, paused, info = await asyncio.gather(*map(self._told, (MODELS, _PAUSED, "/weight_info")))
        resume = f"POST {self._url}/resume" if _field(paused, "is_paused") is True else ""
        return EngineState(own_models(models), _field(info, "weight_version"), resume)

    async def release(self) -> str | None:
        """The release of vLLM that it is; None if it does not say that it is one."""
        found = _field(await self._told("/version"), "version")
        return found if isinstance(found, str) else None

    async def pausable(self) -> bool:
        """Tell whether it has the routes that change it."""
        return (await self._ask("GET", _PAUSED, None))[0] != 404

    async def pause(self) -> None:
        await self._order(PAUSE)

    async def resume(self) -> None:
        """One that does not tell whether it is paused is taken by its word that it goes on."""
        await self._order("/resume")
        try:
            status, raw = await self._ask("GET", _PAUSED, None)
            paused = status == 200 and _field(json.loads(raw), "is_paused") is True
        except (*FAILED, ValueError, RecursionError):
            paused = True
        if paused:
            raise EngineError(f"engine {self._url} stays frozen: start it again", code="engine_cannot_pause")

    async def name_version(self, version: int) -> None:
        await self._order("/update_weight_version", {"new_version": str(version)})

    async def generate(self, route: str, question: Mapping[str, Any]) -> tuple[int, bytes]:
        return await self._ask("POST", route, question)

    async def tokenize(self, body: Mapping[str, Any]) -> Rendered | None:
        status, raw = await self._ask("POST", "/tokenize", body)
        answer = _read(raw)
        ids, longest = _field(answer, "tokens"), _field(answer, "max_model_len")
        if status == 200 and are_tokens(ids):
            return Rendered(tuple(ids), longest if isinstance(longest, int) else None)
        return None

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        status, raw = await self._ask("POST", "/detokenize", {"model": model, "tokens": ids})
        text = _field(_read(raw), "prompt")
        if status != 200 or not isinstance(text, str):
            raise ValueError(f"/detokenize answered {status} without a text")
        return text

    async def score(self, choice: Unscored, model: str, salt: Any) -> Captured | Lost:
        status, answer = await self._ask(
            "POST", rescoring.TARGET, rescoring.question(choice, model=model, salt=salt)
        )
        if status != 200:
            logger.warning("a call of model %s was not scored: status %d, %.300r", model, status, answer)
        return rescoring.answered(choice, answer)

    async def stops(self, model: str, token: int) -> bool | None:
        _, answer = await self._ask("POST", *ending.question(model, token))
        return ending.answered(token, answer)

    async def _told(self, path: str) -> Any:
        with suppress(*FAILED, OSError):
            status, raw = await self._ask("GET", path, None)
            return _read(raw) if status == 200 else None
        return None

    async def _order(self, route: str, body: Mapping[str, str] | None = None) -> None:
        """Have it change something about itself."""
        try:
            status, _ = await self._ask("POST", route, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            said = f"engine {self._url}{route} cannot be reached: {str(error) or 'no answer in time'}"
            if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
                raise Refused(said, code=UNREACHABLE) from error
            raise EngineError(said, code=UNREACHABLE) from error
        if status == 404:
            raise Refused(
                f"engine has no {self._url}{route.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1, "
                "or use gate_mode drain", code="engine_cannot_pause",
            )
        if status >= 300:
            kind = EngineError if status >= 500 else Refused
            raise kind(f"engine answered {status} to {self._url}{route}", code="engine_cannot_pause")


def session(key: str | None, limit_s: float) -> aiohttp.ClientSession:
    """Asks engines that want `key`, for up to `limit_s` seconds each time. Each request has a connection of its own: a
    server may close one after an error without a word, and what is sent over it next is lost."""
    return aiohttp.ClientSession(
        headers={"User-Agent": AGENT} | ({"Authorization": f"Bearer {key}"} if key else {}),
        timeout=aiohttp.ClientTimeout(total=limit_s), connector=aiohttp.TCPConnector(force_close=True),
    )


def over(session: aiohttp.ClientSession, url: str) -> Vllm:
    """The engine at `url`, asked over `session`."""

    async def ask(method: str, route: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        async with session.request(method, url + route, json=body, allow_redirects=False) as answer:
            return answer.status, await answer.read()

    return Vllm(ask, url)


def behind(upstream: Upstream, request: EngineRequest) -> Vllm:
    """The engine that answers `request`, asked as that was: with its headers, over `upstream`."""

    async def ask(method: str, route: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        raw = None if body is None else json.dumps(body).encode()
        return await upstream.told(replace(request, method=method, target=route, body=raw))

    return Vllm(ask)


def own_models(answer: Any) -> list[list[Any]]:
    """The name, the folder and the longest context of each model of an engine's own, by its answer to ``/v1/models``.
    Adapters come and go, and engines that name no folder do not say what they serve."""
    cards = answer.get("data") if isinstance(answer, Mapping) else None
    cards = [card for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
    own = [card for card in cards if card.get("root") and not card.get("parent")]
    found = ([str(card.get("id")), str(card["root"]), card.get("max_model_len")] for card in own)
    return sorted(found, key=lambda one: (*one[:2], str(one[2])))


def _field(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, Mapping) else None


def _read(raw: bytes) -> Any:
    """The JSON in `raw`; None if there is none that can be read."""
    with suppress(ValueError, RecursionError):
        return json.loads(raw)
    return None
