"""Questions on what each model's engines decide for themselves, asked once, when it first matters.

Answers are kept as long as the model has the same engines, and none of them is found gone. An engine that restarts at
the same address while no request is on its way to it is not asked again until the proxy restarts. Nothing is kept of an
engine that says nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final

import aiohttp
from aiohttp import web

from ajet_proxy.core.protocol import sampling
from ajet_proxy.core.protocol.dialect import Dialect, Doubt, Questions
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Standing, Upstream
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

Asking = Callable[[str, bytes], EngineRequest]
"""Makes a request to a route, with a body, in the name of a client."""
Entering = Callable[[], AbstractAsyncContextManager[None]]
"""Waits at the gate, and holds it open."""
PATIENCE_S = 2.0
"""The end of the first answer of a model waits for it so long where the gate is closed."""
LIMIT_S = 20.0
"""For all questions about how a model is sampled."""
RETRY_S = 60.0
"""An engine that kept silent about how it samples is asked again after this long."""
SILENT: Final = object()
"""No answer, where another time may bring one."""
_BUSY: Final = (429, 500, 502, 503, 504)


class DialectProbe:
    """Settles what a dialect's `Doubt` leaves to a model's engines. What they say is kept as long as they are the
    same; a dialect stays as it is for engines that say nothing."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[tuple[Doubt, str], tuple[Standing, Dialect]] = {}

    async def settled(self, dialect: Dialect, doubt: Doubt, model: str, request: Asking) -> Dialect:
        """`dialect` as it holds for `model`. Raises `AjetError` if no engine can be reached."""
        standing = self._upstream.standing(model)
        known = self._known.get((doubt, model))
        if known is not None and known[0] == standing:
            return known[1]
        found = doubt.settled([
            await self._ask(request(path, json.dumps(body).encode())) for path, body in doubt.questions(model)
        ])
        if found is None:
            return dialect
        self._known[doubt, model] = (standing, found)
        return found

    async def _ask(self, request: EngineRequest) -> Any:
        """The engine's answer, None if it is a refusal or none at all."""
        with suppress(aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            status, body = await self._upstream.told(request)
            return json.loads(body) if status == 200 else None
        return None


class SamplingProbe:
    """Finds out how each model's engines sample where requests do not say (`core.protocol.sampling`). They are asked
    when a call of the model was captured, and before it is recorded: an engine that reports no ids is never asked.
    Requests that want to know at the same time ask together, and wait for the answers. At a gate the questions wait as
    requests do. That takes `PATIENCE_S` at most of those who wait, and the questions go on without them. What a silent
    or busy engine did not tell is asked again after `RETRY_S`, then after twice that, and so on. Nobody waits for that:
    until then it is unknown.

    `kept` has what is known by now, for a request that need not wait."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.kept: dict[tuple[str, Standing], sampling.Known] = {}
        self._due: dict[tuple[str, Standing], sampling.Known] = {}
        """Knowledge of models that it is time to ask about again."""
        self._pause: dict[str, float] = {}
        self._asking: dict[str, tuple[asyncio.Task[sampling.Known], float]] = {}
        self._asked = set[str]()
        """The models of which engines are being asked, past the gate."""

    async def of(self, model: str, request: Asking, enter: Entering) -> sampling.Known:
        """All that is known of `model`. `enter` lets the questions through the gate."""
        now = asyncio.get_running_loop().time()
        if model not in self._asking:
            asking = asyncio.create_task(self._find(model, request, enter))
            asking.add_done_callback(lambda _: self._asking.pop(model))
            self._asking[model] = asking, now
        if (known := self._due.get((model, self._upstream.standing(model)))) is not None:
            return known
        task, began = self._asking[model]
        await asyncio.wait([task], timeout=max(0.0, began + PATIENCE_S - now))
        if model in self._asked:
            await asyncio.wait([task])
        return task.result() if task.done() and not task.cancelled() else sampling.Known()

    async def close(self, _app: web.Application | None = None) -> None:
        tasks = [task for task, _ in self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self, model: str, request: Asking, enter: Entering) -> sampling.Known:
        found, whole = sampling.Known(), False
        try:
            async with enter(), asyncio.timeout(LIMIT_S):
                self._asked.add(model)
                answers = await self._answers(request, sampling.questions(model))
                found = sampling.known([None if answer is SILENT else answer for answer in answers])
                more = await self._answers(request, sampling.more_questions(model, found, answers))
                found = sampling.with_draws(found, more)
                whole = SILENT not in answers + more
        except (AjetError, TimeoutError):
            pass
        except Exception:  # no call is lost because its engine says odd things of itself
            logger.exception("what an engine of model %r says of how it samples cannot be read", model)
        finally:
            self._asked.discard(model)
        key, pause = (model, self._upstream.standing(model)), self._pause.pop(model, RETRY_S)
        found = sampling.merged(self._due.get(key, sampling.Known()), found)
        for some in (self.kept, self._due):
            for other in [other for other in some if other[0] == model]:
                del some[other]
        self.kept[key] = found
        if not whole:
            logger.warning("an engine of model %r did not say in time how it samples; until it does, some of that is "
                           "unknown", model)
            self._pause[model] = 2 * pause
            asyncio.get_running_loop().call_later(pause, self._ask_again, key)
        return found

    def _ask_again(self, key: tuple[str, Standing]) -> None:
        if (known := self.kept.pop(key, None)) is not None:
            self._due[key] = known

    async def _answers(self, request: Asking, questions: Questions) -> list[Any]:
        asked = (request(path, json.dumps(body).encode()) for path, body in questions)
        return await asyncio.gather(*map(self._ask, asked))

    async def _ask(self, request: EngineRequest) -> Any:
        """The engine's answer; None if it refuses, which it will again."""
        try:
            status, body = await self._upstream.told(request)
            return json.loads(body) if status == 200 else SILENT if status in _BUSY else None
        except (AjetError, aiohttp.ClientError, TimeoutError):
            return SILENT
        except (ValueError, RecursionError):
            return None


class ChatRoutes:
    """Which of `engines` have no chat route: nothing of them can be captured.

    The Messages API is carried over the chat route, which reports ids. An engine that answers ``/v1/messages`` itself
    and has no chat route is not vLLM: its clients' requests pass as they are. It is known by its answers to real
    requests. Only for a request that cannot be carried is it asked beforehand, because an engine with the chat route
    must not see that. The question is a ``GET``, which neither route takes, and a server says so of a route that it
    has.
    """

    def __init__(self, upstream: Upstream, engines: Engines) -> None:
        self._upstream = upstream
        self._engines = engines
        self._lacking: set[tuple[str, ...]] = set()

    def lack(self, model: str) -> bool:
        """Tell whether the engines of `model` are known to have none."""
        return self._engines.candidates(model) in self._lacking

    def note(self, model: str) -> None:
        """The engines of `model` have none."""
        self._lacking.add(self._engines.candidates(model))

    async def look(self, dialect: Dialect, model: str, request: Callable[[str], EngineRequest]) -> bool:
        """Tell whether the engine has the route of `dialect` but not its target. `request` makes a ``GET`` to a route
        in the name of the client. Raises `AjetError` if no engine can be reached."""
        statuses = []
        for path in (dialect.target, dialect.path):
            answer = await self._upstream.send(request(path))
            answer.close()
            statuses.append(answer.status)
        if statuses == [404, 405]:
            self.note(model)
            return True
        return False
