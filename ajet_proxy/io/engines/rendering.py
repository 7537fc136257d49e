"""The prompt that an engine renders of a conversation: the questions behind continuity.

Its tokenizer renders a conversation. For a chat that is believed about one kind of request once it has rendered an
earlier turn as the very ids that the chat route reported. If that turn was given its ids, the route is asked about this
turn instead, at the price of one token. A response is rendered from the messages that vLLM makes of its items. That is
believed once it was seen to be the prompt that the route itself tells. If it is not, or the history is only named, the
route is asked each time, at the same price.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.continuity.memory import Outline
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.engine import Engine, Ids

KINDS = 10_000


class NotRendered(Exception):
    """The engine did not answer as it should; the request goes out as it is."""


@dataclass(slots=True)
class Renderings:
    """Facts of how one engine renders for one model and route. `placeholder` has the tokens of the words that
    stand in for an answer, and `length` is the longest context of the model. The tokenizer was seen to render the
    `kinds` of requests as the route reads them, and those in `odd` differently. `takes_ids` is None until it was
    tried."""

    placeholder: Ids = ()
    length: int | None = None
    kinds: set[bytes] = field(default_factory=set)
    odd: set[bytes] = field(default_factory=set)
    takes_ids: bool | None = None
    silent_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Renderer:
    """Asks an `engine` how it reads a request for `model` on `route`, whose `outline` is known, and keeps what is
    `known` of it."""

    engine: Engine
    model: str
    known: Renderings
    route: str
    outline: Outline

    async def whole(self) -> Ids:
        """The ids of the conversation as it is."""
        outline = self.outline
        return await (self._told(outline.question()) if self._by_route else self.render(outline.whole()))

    async def with_answer(self, text: str) -> Ids:
        """The ids of the conversation with `text` in place of the last answer."""
        if self._by_route:
            return await self._told(self.outline.question_with_answer(text))
        return await self.render(self.outline.with_answer(text))

    async def proven(self, before: Packed, history: Ids, rendered: Ids) -> Ids | None:
        """The ids of the conversation as the route reads it: `rendered`, if that can be relied on. None if nobody can
        tell. `history` has the ids of the turn `before`, with its answer."""
        seen, kind = self.known, self.outline.kind
        if self._by_route or kind in seen.kinds:
            return rendered
        if self.outline.route_tells:  # asked once for each kind of request
            told = await self._told(self.outline.question())
            alike = seen.kinds if told == rendered else seen.odd
            if len(alike) < KINDS:
                alike.add(kind)
            return told
        if len(seen.kinds) >= KINDS or not await self._is_proof(before, history, rendered):
            return None
        seen.kinds.add(kind)
        return rendered

    async def takes_ids(self, ids: Ids) -> bool:
        """Tell whether the engine's route reads `ids` when it is given them. It generates one token for this."""
        return await self._prompt_of(self.outline.trial(self.model, ids)) == ids

    async def is_read_alike(self, prompt: Ids) -> bool:
        """Tell whether the engine takes what follows `prompt` for reasoning exactly if it does after its own rendering.
        """
        token, heard = self.known.placeholder[0], []
        for ids in (None, prompt):
            _, stream = await self.engine.generate(self.route, self.outline.first_word(token, ids))
            heard.append(self.outline.heard_as(stream))
        return heard[0] is not None and heard[0] == heard[1]

    async def render(self, body: Mapping[str, Any]) -> Ids:
        """The tokens of `body` as the engine's tokenizer renders it."""
        rendered = await self.engine.tokenize(body)
        if rendered is None:
            raise NotRendered
        self.known.length = rendered.longest
        return rendered.ids

    @property
    def _by_route(self) -> bool:
        """Tell whether the route itself must be asked each time."""
        return self.outline.by_name or self.outline.kind in self.known.odd

    async def _is_proof(self, before: Packed, history: Ids, rendered: Ids) -> bool:
        """Tell whether the chat route reads what the tokenizer renders. If the turn `before` was given its ids, the
        route is asked."""
        if before.turn.continuity != "exact":
            return await self.render(self.outline.asked_before()) == history[: before.turn.start]
        return await self._prompt_of(self.outline.question()) == rendered

    async def _told(self, question: Mapping[str, Any]) -> Ids:
        """The prompt of `question`, as the route itself reports it."""
        prompt = await self._prompt_of(question)
        if prompt is None:
            raise NotRendered
        return prompt

    async def _prompt_of(self, question: Mapping[str, Any]) -> Ids | None:
        """The prompt that the route reports for `question`; None if it refuses the question or reports none."""
        status, raw = await self.engine.generate(self.route, question)
        if status >= 500:
            raise NotRendered
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise NotRendered from error
        return self.outline.prompt_in(answer) if status == 200 and isinstance(answer, dict) else None
