"""``POST /v1/messages``, Anthropic's API, carried over the engine's chat route.

vLLM has this route itself and answers it by translating to chat and back, but it tells no token ids there. So the proxy
does the translating (`request`, `answer`), asks the chat route as `chat` does, and captures the call from its answer.
The client gets, event for event, what vLLM's own translation would have made of it. vLLM decides two things by the
model's chat template. They are a `Template`, which is found out by asking the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_proxy.core.protocol.anthropic.answer import MessagesReading
from ajet_proxy.core.protocol.anthropic.own import OwnReading
from ajet_proxy.core.protocol.anthropic.request import to_chat
from ajet_proxy.core.protocol.anthropic.template import Template, depends_on_template, questions, template_of
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.dialect import Ask, Dialect, Doubt
from ajet_proxy.core.protocol.request import JsonBody
from ajet_sdk.errors import BadRequest


class Messages(Dialect):
    """The `Dialect` of Anthropic's Messages API, for an engine with a certain `Template`."""

    name = "messages"
    path = "/v1/messages"
    target = CHAT.path
    words, entries = ("system", "messages"), "messages"
    limits, past, takes_ids, outline = CHAT.limits, CHAT.past, CHAT.takes_ids, CHAT.outline

    def __init__(self, template: Template | None = None) -> None:
        self._template = template or Template()

    def translate(self, request: JsonBody) -> JsonBody:
        try:
            return JsonBody(json.dumps(to_chat(request.fields, self._template)).encode())
        except RecursionError:
            raise BadRequest("the body is nested too deeply", code="not_json") from None

    def doubt(self, request: Mapping[str, Any]) -> Doubt | None:
        return _TEMPLATE if depends_on_template(request) else None

    def ask(self, request: Mapping[str, Any]) -> Ask:
        return CHAT.ask(request)

    def reader(self, ask: Ask) -> MessagesReading:
        return MessagesReading(CHAT, ask)

    def own_reader(self, ask: Ask) -> OwnReading:
        return OwnReading()


def _settled(answers: Sequence[Any]) -> Messages | None:
    template = template_of(answers)
    return None if template is None else Messages(template)


_TEMPLATE = Doubt(questions, _settled)
MESSAGES = Messages()
