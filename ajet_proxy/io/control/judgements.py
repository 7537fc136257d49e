"""The route at which a judge waits for what awaits a judgement, with the text of it.

The ledger has token ids. Their text comes from an engine of the model, which is asked while the judge waits. What an
engine gives no text of is not leased now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import aiohttp
from aiohttp import web

from ajet_proxy.core.control.asked import Asked
from ajet_proxy.core.control.judging import check_lane
from ajet_proxy.core.ledger.episode import Episode, to_judge
from ajet_proxy.core.ledger.judging import Answered, answers
from ajet_proxy.core.tokens import unpack_tokens
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.engines.engine import FAILED
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.engines.vllm import over, session

TEXT_S = 5.0
"""For an engine to give a text."""
AT_ONCE = 8
"""Texts that engines are asked for at a time."""
LOOK_S = 2.0
"""So often it is looked whether a lease has run out, or an engine is back. Each look may go through all that awaits."""
RESTS = 20
"""After a look that found nothing nobody looks for so many times as long as it took, but for those who have not for
`LOOK_S`. While it goes through what awaits, no user is answered."""


class Judgements:
    """The handler. `engines` tells who knows the text of a model's tokens."""

    def __init__(self, desk: Desk, engines: Engines) -> None:
        self._desk, self._engines = desk, engines
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._rests_until = 0.0

    async def lease(self, _http: web.Request, asked: Asked) -> web.Response:
        """Answers with what awaits a judgement, or 204 if nothing does in ``wait_s``."""
        if asked.body.lane is not None:
            check_lane(asked, asked.body.lane)
        store, clock, stopping = self._desk.store, self._desk.clock, self._desk.stopping
        lanes = asked.claims.lanes if asked.claims.scope == "judge" else None
        deadline, looked, again = clock.now() + asked.body.wait_s, -1, 0.0
        while True:
            seen, judgeable = store.state.leasable(), store.state.episodes.judgeable
            if clock.now() >= (again if judgeable == looked else min(again, self._rests_until)):
                looked, began = judgeable, clock.now()
                groups = store.commands.judging.waiting(asked.body, lanes, began)
                first = next(groups, None)
                if first is not None and (found := await self._take(asked, chain((first,), groups))):
                    return web.json_response({"judgements": found})
                again, self._rests_until = clock.now() + LOOK_S, clock.now() + RESTS * (clock.now() - began)
            left = deadline - clock.now()
            if left <= 0 or stopping.is_set():
                return web.Response(status=204)
            rest = min(again, self._rests_until) - clock.now()
            waits = store.leasable(seen, min(left, LOOK_S)) if judgeable == looked else asyncio.sleep(min(left, rest))
            await self._desk.until_stop(waits)

    async def _take(self, asked: Asked, groups: Iterable[tuple[Episode, ...]]) -> list[dict[str, Any]]:
        """Lease so much of `groups` as is asked for, as far as there is a text of it."""
        store, body, now = self._desk.store, asked.body, self._desk.clock.now
        out, left = list[dict[str, Any]](), body.n
        silent, taken = set[str](), list[str]()
        awaiting = store.state.episodes.awaiting
        async with session(self._desk.config.upstream_key, TEXT_S) as asking:
            for group in groups:
                if not left:
                    break
                names, until = [one.id for one in group], now() + body.lease_s
                if not all(store.commands.judging.is_free(name, now()) for name in names):
                    continue
                store.presence.judge(names, until, awaiting)
                try:
                    told = [await self._told(asking, one, silent) for one in group]
                except BaseException:  # who asked has left
                    store.presence.give_back((*taken, *names))
                    raise
                if None in told or not all(name in awaiting for name in names):  # one may be withdrawn meanwhile
                    store.presence.give_back(names)
                    continue
                left -= 1
                taken += names
                of = {"group": names[0]} if body.unit == "groups" else {}
                out += [_shown(one, calls or [], until) | of for one, calls in zip(group, told, strict=True)]
        return out

    async def _told(
        self, asking: aiohttp.ClientSession, episode: Episode, silent: set[str]
    ) -> list[dict[str, Any]] | None:
        """The calls of an episode with their texts; None if one is missing. Models of which no text came are `silent`,
        and are not asked again."""
        if not silent.isdisjoint(turn.model for turn in to_judge(episode)):
            return None
        calls = await asyncio.to_thread(answers(episode, self._desk.store.state.weights.merge_policy))
        parts = {(call.model, ids) for call in calls for ids in (call.before, call.answer, call.next) if ids}
        texts = dict(zip(parts, await asyncio.gather(*(self._text(asking, *part) for part in parts)), strict=True))
        if None in texts.values():
            silent |= {model for model, _ in parts} - {model for (model, _), text in texts.items() if text is not None}
            return None
        return [_call(episode, call, texts) for call in calls]

    async def _text(self, asking: aiohttp.ClientSession, model: str, ids: bytes) -> str | None:
        """The text of the tokens `ids`, of the first engine that gives one."""
        async with self._at_once:
            for url in self._engines.candidates(model):
                try:
                    return await over(asking, url).detokenize(model, unpack_tokens(ids))
                except (*FAILED, ValueError):
                    continue
        return None


def _shown(episode: Episode, calls: Sequence[Mapping[str, Any]], until: float) -> dict[str, Any]:
    key, said = episode.group_key, episode.feedback.get("")
    return {
        "episode": episode.id, "task": key.task, "lane": key.lane, "eval": episode.opening.eval, "lease_until": until,
        "calls": calls, **({} if said is None else {"feedback": said.to_json()}),
    }


def _call(episode: Episode, call: Answered, texts: Mapping[tuple[str, bytes], str | None]) -> dict[str, Any]:
    before, answer, came = (texts.get((call.model, ids), "") for ids in (call.before, call.answer, call.next))
    said = episode.feedback.get(call.call)
    return {
        "call": call.call, "agent": call.agent, "model": call.model, "finish_reason": call.finish_reason,
        "before": before, "answer": answer, "next": came, "next_kind": call.kind,
        **({} if said is None else {"feedback": said.to_json()}),
    }
