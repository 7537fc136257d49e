"""The doctor's checks of one engine: that it serves, tells what it samples, and can be paused and continued."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from ajet_proxy.core.continuity.memory import Outline
from ajet_proxy.core.protocol import sampling
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.responses.dialect import RESPONSES
from ajet_proxy.core.protocol.responses.outline import Responding
from ajet_proxy.io.capture.pipeline import REFUSED
from ajet_proxy.io.engines.vllm import MODELS, over
from ajet_proxy.io.engines.watch import changed
from ajet_proxy.io.engines.watch import read as noted_engines
from ajet_proxy.settings import Config
from ajet_sdk.findings import Finding, fault, ok, warning
from ajet_sdk.untrainable import GIVES_LOGPROBS, GIVES_TOKEN_IDS

CLOCK_SKEW_S = 30.0
TESTED_VLLM = ((0, 31), (0, 33))
"""The vLLM releases, first and last, whose dialect was read or recorded for this proxy."""
_SAID = [{"role": "user", "content": "Hi"}]
_LESS: tuple[tuple[dict[str, bool], str, str], ...] = (
    ({"return_token_ids": True, "logprobs": False}, "logprobs", GIVES_LOGPROBS),
    ({"return_token_ids": False}, "return_token_ids", GIVES_TOKEN_IDS),
    ({"logprobs": False}, "return_token_ids and logprobs", GIVES_TOKEN_IDS),
)
"""A request without what an engine may refuse, what that is called, and what to do then."""


class EngineChecks:
    """The checks of one engine at `url`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, config: Config) -> None:
        self._session, self._url, self._config, self._model = session, url, config, ""
        self._engine = over(session, url)
        check = f"upstream {url}"
        self._ok, self._warning, self._fault = (partial(made, check) for made in (ok, warning, fault))

    async def examine(self) -> list[Finding]:
        try:
            return await self._examine()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return [self._fault(f"cannot be reached: {error or 'no answer in time'}",
                                "start the engine, or correct --upstream")]

    async def _examine(self) -> list[Finding]:
        if await self._is_proxy():
            return [self._fault("is an ajet-proxy and no engine", "give --upstream the engine's own address")]
        status, models, date = await self._ask(MODELS)
        if status == 401:
            return [self._fault("wants an API key", "set AJET_UPSTREAM_KEY to the engine's key")]
        names = [str(item.get("id")) for item in _list(models, "data")]
        if status != 200 or not names:
            return [self._fault(f"GET {MODELS} answered {status} without a model",
                                "is this an OpenAI-compatible server? --upstream is its base URL")]
        self._model = names[0]
        found = [self._ok(f"serves {', '.join(names)}"), *await self._same()]
        found += [*self._clock(date), await self._version()]
        found += await self._generation()
        if self._config.continuity == "auto":
            found.append(await self._continuity())
        return [*found, await self._pause()]

    async def _same(self) -> list[Finding]:
        """An engine that serves something else than when it was last given weights, or is frozen; if a proxy has noted
        that."""
        now = await self._engine.probe()
        before = noted_engines(Path(self._config.data_dir)).get(self._url)
        said = None if before is None else changed(before, {"models": now.models, "version": now.version})
        found = [] if said is None else [self._fault(
            said, "start it with the right model, and then the trainer; until then nothing of it is the trained model's"
        )]
        if now.resume:
            found.append(self._warning("is frozen, as while weights change",
                                       f"if no trainer is at work, {now.resume}, or start it again"))
        return found

    async def _is_proxy(self) -> bool:
        """True if a proxy answers: with or without a key, it takes all below ``/ajet`` for control routes."""
        _, body = await self._told("/ajet/v1")
        error = body.get("error")
        return isinstance(error, dict) and error.get("code") == "unknown_route"

    def _clock(self, date: str | None) -> list[Finding]:
        try:
            skew = abs(parsedate_to_datetime(date or "").timestamp() - time.time())
        except ValueError:
            return []
        if skew > CLOCK_SKEW_S:
            return [self._warning(f"its clock is {skew:.0f} s from ours", "run NTP on both machines")]
        return [self._ok("its clock agrees with ours")]

    async def _version(self) -> Finding:
        version = await self._engine.release()
        if version is None:
            return self._warning("does not say it is vLLM (no /version)",
                                 "calls can be recorded only from an engine that gives token ids, such as vLLM")
        first, last = TESTED_VLLM
        try:
            major_minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        except ValueError:
            major_minor = last
        if not first <= major_minor <= last:
            return self._warning(f"vLLM {version} is outside the tested releases",
                                 f"tested are {first[0]}.{first[1]} to {last[0]}.{last[1]}")
        return self._ok(f"vLLM {version}")

    async def _generation(self) -> list[Finding]:
        status, reply = await self._chat(max_tokens=2, return_token_ids=True)
        if status != 200:
            return [await self._refusal(status, reply)]
        choice = next(iter(_list(reply, "choices")), {})
        if not choice.get("token_ids") or not reply.get("prompt_token_ids"):
            return [self._fault("gives no token ids: every episode would be discarded as incomplete_call",
                                GIVES_TOKEN_IDS)]
        logprobs, ids = _list(choice.get("logprobs") or {}, "content"), choice["token_ids"]
        if len(logprobs) != len(ids):
            return [self._fault(f"gives {len(logprobs)} logprobs for {len(ids)} tokens", GIVES_LOGPROBS)]
        return [self._ok("gives exact token ids and a logprob for each"), *await self._sampling()]

    async def _sampling(self) -> list[Finding]:
        """Agents that name no parameter should sample at temperature 1 over the whole vocabulary; and what logprobs
        are."""
        answers = [await self._answer(path, body) for path, body in sampling.questions(self._model)]
        known = sampling.known(answers)
        more = sampling.more_questions(self._model, known, answers)
        draws = [await self._answer(path, body) for path, body in more]
        known = sampling.with_draws(known, draws)
        told = dict(known.defaults)
        unstated = [name for name in sampling.OFF if name not in told]
        hidden = [f"{name} {value:g}" for name, value in told.items() if value not in sampling.OFF[name]]
        hidden += [f"{name} (perhaps)" for name in unstated if any(draws)]
        if hidden:
            defaults = self._fault(f"samples by hidden defaults where agents name no parameter: {', '.join(hidden)}",
                                   "start vLLM with --generation-config vllm, or let agents name these parameters")
        elif unstated:
            unknown = ", ".join(unstated)
            defaults = self._warning(f"does not tell its defaults, so these are recorded as unknown: {unknown}",
                                     "start vLLM with --enable-scale-out: its render routes tell them")
        else:
            defaults = self._ok("samples at temperature 1 over the whole vocabulary where agents name no parameter")
        return [defaults, self._logprobs(known.logprobs)]

    def _logprobs(self, are: sampling.Logprobs) -> Finding:
        start = "start vLLM with --logprobs-mode processed_logprobs"
        if are == "raw":
            return self._warning("its logprobs are raw: they ignore temperature, top_p and penalties, with "
                                 "which tokens are drawn", f"{start}, or sample at temperature 1 and with nothing else")
        if are == "unknown":
            return self._warning("does not show whether its logprobs are those that tokens are drawn with", start)
        return self._ok("its logprobs are processed: those that tokens are drawn with")

    async def _refusal(self, status: int, reply: dict[str, Any]) -> Finding:
        """Why a chat completion that asks for ids and logprobs was answered with an error. If one that asks for less is
        answered well, the engine refuses what that leaves out."""
        answered = f"a chat completion answered {status}: {json.dumps(reply)[:200]}"
        for asked, what, advice in _LESS if status in REFUSED else ():
            if (await self._chat(max_tokens=2, **asked))[0] == 200:
                lost = "so every episode would be discarded as incomplete_call"
                return self._fault(f"refuses {what}, {lost}: {answered}", advice)
        return self._fault(answered, "look into the engine's log")

    async def _continuity(self) -> Finding:
        """History should go to the engine as exact ids (see `ajet_proxy.core.continuity.memory`). An engine that
        has no ``/v1/responses``, or answers it with no ids, has no history there to ask about."""
        off = "--continuity off to have this no longer looked for"
        rendered = await self._engine.tokenize({"model": self._model, "messages": _SAID})
        if rendered is None or not rendered.ids:
            return self._warning("its /tokenize renders no conversations: history goes as text, and may drift",
                                 f"use vLLM, or {off}")
        ids = rendered.ids[:1] * 3
        status, answer = await self._told(CHAT.path, Outline.trial(self._model, ids))
        if status != 200 or Outline.prompt_in(answer) != ids:
            return self._warning("its chat route takes no prompt ids: history goes as text, and may drift",
                                 f"use a tested vLLM, or {off}")
        status, answer = await self._told(RESPONSES.path, Responding.trial(self._model, ids))
        told = Responding.prompt_in(answer)
        if status in (400, 422) or told not in (None, ids):
            return self._warning("its /v1/responses takes no prompt ids: history goes as text there",
                                 f"use a tested vLLM, or chat completions, or {off}")
        return self._ok("takes history as exact ids")

    async def _pause(self) -> Finding:
        how = "start vLLM with VLLM_SERVER_DEV_MODE=1"
        if await self._engine.pausable():
            return self._ok("can be paused while weights change")
        if self._config.gate_mode == "pause":
            return self._fault("gate_mode is pause, but it has no /pause", f"{how}, or use --gate-mode drain")
        return self._warning("takes no weights of a trainer", f"{how}; for episodes alone it is well as it is")

    async def _chat(self, **more: Any) -> tuple[int, dict[str, Any]]:
        return await self._told(CHAT.path, {"model": self._model, "messages": _SAID, "logprobs": True, **more})

    async def _told(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """The status, and the JSON object; empty for anything else."""
        status, told, _ = await self._ask(path, body)
        return status, told if isinstance(told, dict) else {}

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that the engine answers; None if it refuses."""
        status, told, _ = await self._ask(path, body)
        return told if status == 200 else None

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, str | None]:
        """The status, the JSON and the date of what a ``GET`` is answered, or a ``POST`` of `body`."""
        method, told = "GET" if body is None else "POST", None
        async with self._session.request(method, self._url + path, json=body, allow_redirects=False) as answer:
            with suppress(ValueError, RecursionError):
                told = json.loads(await answer.read())
            return answer.status, told, answer.headers.get("Date")


def _list(body: Any, name: str) -> list[dict[str, Any]]:
    value = body.get(name) if isinstance(body, dict) else None
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
