"""How an engine renders a conversation, and whether it reads the ids it is given: the questions behind continuity.

One class for each route that takes prompt ids. A chat is rendered by ``POST /tokenize``, which is believed about one
kind of request once it has rendered an earlier turn as the very ids that the chat route reported (or this turn, where
that one was given its ids and the route is asked, at the price of one token). ``/tokenize`` renders a response as well,
from the messages that vLLM makes of its items, if that was once seen to give what the route itself tells of its prompt;
if it does not, or the history is only named, the route is asked each time, at the same price.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ajet_proxy.core.continuity import memory as continuity
from ajet_proxy.core.continuity import responses as responding
from ajet_proxy.core.continuity.memory import EXACT, Outline
from ajet_proxy.core.continuity.responses import Responding
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream

CHAT = "/v1/chat/completions"
KINDS = 10_000
Ids = tuple[int, ...]


class NotRendered(Exception):
    """The engine did not answer as it should; the request goes out as it is."""


@dataclass(slots=True)
class Engine:
    """What is known of one engine, model and route. `mark` are the mark's tokens and `length` is the model's; `kinds`
    those kinds of requests of which ``/tokenize`` was seen to render what the route reads, or (`odd`) to render other
    ids; `takes_ids` is None until it was tried."""

    mark: Ids = ()
    length: int | None = None
    kinds: set[bytes] = field(default_factory=set)
    odd: set[bytes] = field(default_factory=set)
    takes_ids: bool | None = None
    silent_until: float = 0.0


class OnChat:
    """Asks the engine that `request`, a chat, goes to."""

    def __init__(self, upstream: Upstream, request: EngineRequest, engine: Engine) -> None:
        self._upstream = upstream
        self._request = request
        self.engine = engine

    async def whole(self, asked: Outline) -> Ids:
        """The conversation as it is."""
        return await self.render(asked.whole())

    async def with_answer(self, asked: Outline, text: str) -> Ids:
        """The conversation with `text` in place of the last answer."""
        return await self.render(asked.with_answer(text))

    async def proven(self, asked: Outline, before: Packed, history: Ids, rendered: Ids) -> Ids | None:
        """`rendered`, the conversation, if it can be relied on; None if the engine renders otherwise for a chat.
        `history` are the ids of the turn `before`, with its answer."""
        kinds = self.engine.kinds
        if asked.kind not in kinds and len(kinds) < KINDS and await self._is_proof(asked, before, history, rendered):
            kinds.add(asked.kind)
        return rendered if asked.kind in kinds else None

    async def _is_proof(self, asked: Outline, before: Packed, history: Ids, rendered: Ids) -> bool:
        """Whether the chat route reads what ``/tokenize`` renders. Where another process gave the turn before its
        ids, the route is asked."""
        if before.turn.continuity != EXACT:
            return await self.render(asked.asked_before()) == history[: before.turn.start]
        answer = await self._tried(CHAT, asked.question())
        return answer.get("prompt_token_ids") == list(rendered)

    async def takes_ids(self, ids: Ids) -> bool:
        """Whether the engine's route reads `ids` when it is given them, by the one token that it generates."""
        answer = await self._tried(CHAT, continuity.trial(self._request.model, ids))
        return answer.get("prompt_token_ids") == list(ids)

    async def is_read_alike(self, asked: Outline, prompt: Ids) -> bool:
        """Whether the engine takes what follows `prompt` for reasoning if it does so behind its own rendering."""
        heard = [await self._heard(asked.first_word(self.engine.mark[0], ids)) for ids in (None, prompt)]
        return heard[0] is not None and heard[0] == heard[1]

    async def render(self, body: Mapping[str, Any]) -> Ids:
        """The tokens of `body` by ``/tokenize``."""
        status, answer = await self._ask("/tokenize", body)
        tokens, length = answer.get("tokens"), answer.get("max_model_len")
        if status != 200 or not isinstance(tokens, list) or not _all_ids(tokens):
            raise NotRendered
        self.engine.length = length if isinstance(length, int) else None
        return tuple(tokens)

    async def _tried(self, path: str, trial: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's answer to `trial`; an empty one where it finds fault with it."""
        status, answer = await self._ask(path, trial)
        if status >= 500:
            raise NotRendered
        return answer if status == 200 else {}

    async def _heard(self, body: Mapping[str, Any]) -> str | None:
        """As what the engine's first word in answer to `body` came."""
        return continuity.heard_as(await self._stream(CHAT, body))

    async def _stream(self, path: str, body: Mapping[str, Any]) -> bytes:
        answer = await self._upstream.send(replace(self._request, target=path, body=json.dumps(body).encode()))
        try:
            return await answer.read()
        finally:
            answer.close()

    async def _ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The engine's status and JSON object."""
        asking = replace(self._request, target=path, body=json.dumps(body).encode())
        answer = await self._upstream.send(asking)
        try:
            found = json.loads(await answer.read())
        except (ValueError, RecursionError) as error:
            raise NotRendered from error
        finally:
            answer.close()
        return answer.status, found if isinstance(found, dict) else {}


class OnResponses(OnChat):
    """Asks the engine that `request`, a response's, goes to."""

    async def whole(self, asked: Outline) -> Ids:
        assert isinstance(asked, Responding)
        return await self._told(asked.question()) if self._is_told(asked) else await super().whole(asked)

    async def with_answer(self, asked: Outline, text: str) -> Ids:
        assert isinstance(asked, Responding)
        if self._is_told(asked):
            return await self._told(asked.question_with_answer(text))
        return await super().with_answer(asked, text)

    async def proven(self, asked: Outline, before: Packed, history: Ids, rendered: Ids) -> Ids | None:
        """What the route itself makes of the conversation; it is asked once for each kind of request."""
        assert isinstance(asked, Responding)
        if self._is_told(asked) or asked.kind in self.engine.kinds:
            return rendered
        told = await self._told(asked.question())
        known = self.engine.kinds if told == rendered else self.engine.odd
        if len(known) < KINDS:
            known.add(asked.kind)
        return told

    async def takes_ids(self, ids: Ids) -> bool:
        answer = await self._tried(responding.ROUTE, responding.trial(self._request.model, ids))
        return responding.prompt_told(answer) == ids

    async def _heard(self, body: Mapping[str, Any]) -> str | None:
        return responding.heard_as(await self._stream(responding.ROUTE, body))

    def _is_told(self, asked: Responding) -> bool:
        """Whether the route itself has to be asked."""
        return asked.named or asked.kind in self.engine.odd

    async def _told(self, question: Mapping[str, Any]) -> Ids:
        """The prompt of `question` by the route itself."""
        status, answer = await self._ask(responding.ROUTE, question)
        prompt = responding.prompt_told(answer) if status == 200 else None
        if prompt is None:
            raise NotRendered
        return prompt


ROUTES = {CHAT: OnChat, responding.ROUTE: OnResponses}


def _all_ids(tokens: Sequence[Any]) -> bool:
    return set(map(type, tokens)) <= {int} and all(0 <= token < 2**31 for token in tokens)
