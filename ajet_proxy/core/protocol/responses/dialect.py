"""``POST /v1/responses`` as vLLM speaks it.

Asked with ``enable_response_messages``, vLLM adds the raw prompt and the raw output, ids included, to the response
object: the document, or the last event of a stream. It reports logprobs in one place only, with the text of a message.
They are for every sampled token of the answer, reasoning and tool calls included. So they are asked for (``include``),
and if an answer has no text its call is `Unscored`. Agents that asked for neither see what they would have seen: null
messages, null logprobs, in a stream empty ones, and a null ``top_logprobs`` in each response object.

Answers that come later than they are asked for (``background``) are lost, and so are prompts that are more than text.

vLLM can keep a response and gives it out again under its id (``GET /v1/responses/ID``), with what only the proxy asked
for. So the proxy remembers how each of the latest responses was asked for (`KeptResponses`), and reads one that is
fetched once more in the same way. What is not remembered stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ajet_proxy.core.conversation.history import History
from ajet_proxy.core.protocol.dialect import Ask, Dialect
from ajet_proxy.core.protocol.reading import UNREADABLE
from ajet_proxy.core.protocol.request import TEXTS, beyond_text
from ajet_proxy.core.protocol.responses.answer import ResponseReading
from ajet_proxy.core.protocol.responses.history import ResponseHistory
from ajet_proxy.core.protocol.responses.outline import Responding, outline

LOGPROBS = "message.output_text.logprobs"
_TEXTS = (*TEXTS, "reasoning_text", "summary_text")


class Responses(Dialect):
    """The `Dialect` of responses."""

    name = "responses"
    path = "/v1/responses"
    target = path
    limits = ("max_output_tokens",)
    words, entries = ("instructions", "input", "previous_response_id"), "input"
    past, takes_ids, gives_again = ResponseHistory, True, True
    ignores = ("min_p", "min_tokens", "thinking_token_budget", "bad_words", "allowed_token_ids")

    def outline(self, request: Mapping[str, Any], history: History, **whose: str) -> Responding | None:
        return outline(request, history, **whose) if isinstance(history, ResponseHistory) else None

    def is_first(self, request: Mapping[str, Any]) -> bool:
        return request.get("previous_response_id") is None and super().is_first(request)

    def is_answer(self, entry: Mapping[str, Any]) -> bool:
        return super().is_answer(entry) or entry.get("type") in ("function_call", "reasoning")

    def sampled_as(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        text, tools = request.get("text"), request.get("tools")
        own = [{"function": tool} for tool in tools] if isinstance(tools, list) else None
        return {**request, "response_format": text.get("format") if isinstance(text, dict) else None, "tools": own}

    def reader(self, ask: Ask) -> ResponseReading:
        return ResponseReading(ask)

    def ask(self, request: Mapping[str, Any]) -> Ask:
        if request.get("background"):
            return Ask(skip="background")
        if beyond_text(request.get("input"), "content", "output", texts=_TEXTS):
            return Ask(skip="multimodal")
        fields = {}
        hide_ids = request.get("enable_response_messages", False) is False
        if hide_ids:
            fields["enable_response_messages"] = "true"
        include, top = request.get("include"), request.get("top_logprobs", 0)
        hide_logprobs = (include is None or (isinstance(include, list) and LOGPROBS not in include)) and (
            top is None or type(top) is int
        )
        if hide_logprobs:
            fields["include"] = json.dumps([*(include or ()), LOGPROBS])
            fields["top_logprobs"] = "0"
        return Ask(fields=fields, hide_ids=hide_ids, hide_logprobs=hide_logprobs)


RESPONSES = Responses()


# --- responses that the engine keeps

LIMIT = 10_000
_KEPT = re.compile(re.escape(RESPONSES.path) + "/([^/]+)/?").fullmatch


class KeptResponses:
    """The ways in which responses were asked for, by their ids."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._asks: dict[str, Ask] = {}

    def keep(self, response: str, ask: Ask) -> None:
        """Remember that `response` answered `ask`."""
        self._asks[response] = ask
        if len(self._asks) > self._limit:
            del self._asks[next(iter(self._asks))]

    def kept(self, response: str) -> Ask | None:
        """The way in which `response` was asked for, if that is remembered."""
        return self._asks.get(response)


def fetched(method: str, path: str) -> str | None:
    """The id of the response that a request to the engine's route `path` (as it is written) fetches, if any."""
    found = _KEPT(unquote(path)) if method == "GET" else None
    return None if found is None else found[1]


def shown(ask: Ask, body: bytes) -> bytes:
    """The agent's form of `body`, a response to `ask`; all of it where it cannot be read."""
    try:
        return RESPONSES.reader(ask).document(body)
    except UNREADABLE:
        return body
