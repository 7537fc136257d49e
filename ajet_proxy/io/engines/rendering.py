"""How an engine renders a conversation, and whether it reads the ids it is given: the questions behind continuity.

``POST /tokenize`` renders a conversation. For a chat it is believed about one kind of request once it has rendered an
earlier turn as the very ids that the chat route reported (or this turn, where that one was given its ids and the route
is asked, at the price of one token). It renders a response as well, from the messages that vLLM makes of its items, if
that was once seen to give what the route itself tells of its prompt. If it does not, or the history is only named, the
route is asked each time, at the same price.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ajet_proxy.core.continuity.memory import Outline, heard_as
from ajet_proxy.core.continuity.responses import Responding
from ajet_proxy.core.tokens import are_tokens
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream

KINDS = 10_000
Ids = tuple[int, ...]


class NotRendered(Exception):
    """The engine did not answer as it should; the request goes out as it is."""


@dataclass(slots=True)
class Engine:
    """What is known of one engine, model and route. `placeholder` are the tokens of the words that stand in for an
    answer, and `length` is the model's. `kinds` are those kinds of requests of which ``/tokenize`` was seen to render
    what the route reads, or (`odd`) to render other ids. `takes_ids` is None until it was tried."""

    placeholder: Ids = ()
    length: int | None = None
    kinds: set[bytes] = field(default_factory=set)
    odd: set[bytes] = field(default_factory=set)
    takes_ids: bool | None = None
    silent_until: float = 0.0


class Renderer:
    """Asks the `engine` that `request` goes to on `route` about that request, whose `outline` is known."""

    def __init__(
        self, upstream: Upstream, request: EngineRequest, engine: Engine, route: str, outline: Outline
    ) -> None:
        self._upstream = upstream
        self._request = request
        self._engine = engine
        self._route = route
        self._outline = outline

    async def whole(self) -> Ids:
        """The conversation as it is."""
        outline = self._outline
        return await (self._told(outline.question()) if self._by_route else self.render(outline.whole()))

    async def with_answer(self, text: str) -> Ids:
        """The conversation with `text` in place of the last answer."""
        outline = self._outline
        if self._by_route and isinstance(outline, Responding):
            return await self._told(outline.question_with_answer(text))
        return await self.render(outline.with_answer(text))

    async def proven(self, before: Packed, history: Ids, rendered: Ids) -> Ids | None:
        """The conversation as the route reads it: `rendered`, if that can be relied on; None if it cannot. `history`
        are the ids of the turn `before`, with its answer."""
        engine, kind = self._engine, self._outline.kind
        if self._by_route or kind in engine.kinds:
            return rendered
        if isinstance(self._outline, Responding):  # asked once for each kind of request
            told = await self._told(self._outline.question())
            known = engine.kinds if told == rendered else engine.odd
            if len(known) < KINDS:
                known.add(kind)
            return told
        if len(engine.kinds) >= KINDS or not await self._is_proof(before, history, rendered):
            return None
        engine.kinds.add(kind)
        return rendered

    async def takes_ids(self, ids: Ids) -> bool:
        """Whether the engine's route reads `ids` when it is given them, by the one token that it generates."""
        return await self._prompt_of(self._outline.trial(self._request.model, ids)) == ids

    async def is_read_alike(self, prompt: Ids) -> bool:
        """Whether the engine takes what follows `prompt` for reasoning if it does so behind its own rendering."""
        token, heard = self._engine.placeholder[0], []
        for ids in (None, prompt):
            _, stream = await self._send(self._route, self._outline.first_word(token, ids))
            heard.append(heard_as(stream))
        return heard[0] is not None and heard[0] == heard[1]

    async def render(self, body: Mapping[str, Any]) -> Ids:
        """The tokens of `body` by ``/tokenize``."""
        status, answer = await self._ask("/tokenize", body)
        tokens, length = answer.get("tokens") or [], answer.get("max_model_len")
        if status != 200 or not are_tokens(tokens):
            raise NotRendered
        self._engine.length = length if isinstance(length, int) else None
        return tuple(tokens)

    @property
    def _by_route(self) -> bool:
        """Whether the route itself has to be asked each time."""
        return self._outline.by_name or self._outline.kind in self._engine.odd

    async def _is_proof(self, before: Packed, history: Ids, rendered: Ids) -> bool:
        """Whether the chat route reads what ``/tokenize`` renders. Where another process gave the turn before its
        ids, the route is asked."""
        if before.turn.continuity != "exact":
            return await self.render(self._outline.asked_before()) == history[: before.turn.start]
        return await self._prompt_of(self._outline.question()) == rendered

    async def _told(self, question: Mapping[str, Any]) -> Ids:
        """The prompt of `question` by the route itself."""
        prompt = await self._prompt_of(question)
        if prompt is None:
            raise NotRendered
        return prompt

    async def _prompt_of(self, question: Mapping[str, Any]) -> Ids | None:
        """The prompt that the route reports of `question`; None if it finds fault with that, or reports none."""
        status, answer = await self._ask(self._route, question)
        if status >= 500:
            raise NotRendered
        return self._outline.prompt_in(answer) if status == 200 else None

    async def _ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The engine's status and JSON object."""
        status, raw = await self._send(path, body)
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise NotRendered from error
        return status, found if isinstance(found, dict) else {}

    async def _send(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        answer = await self._upstream.send(replace(self._request, target=path, body=json.dumps(body).encode()))
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()
