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

from ajet_proxy.core.protocol.anthropic.answer import PING, MessagesReading
from ajet_proxy.core.protocol.anthropic.request import to_chat
from ajet_proxy.core.protocol.anthropic.template import Template, depends_on_template, questions, template_of
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.dialect import DONE, Ask, Dialect, Doubt, Reader
from ajet_proxy.core.protocol.reading import LOSSES
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.sse import SseEvent
from ajet_proxy.core.trajectory.call import ENGINE_ERROR, NO_CHAT_ROUTE, TRUNCATED, Lost, Outcome
from ajet_sdk.errors import BadRequest


class OwnReading(Reader):
    """The `Reader` of an answer that the engine gives on this route itself. It tells no token ids, so all that is read
    is how it ended: a stop reason and, in a stream, ``message_stop``. It changes nothing."""

    waiting = PING

    def __init__(self) -> None:
        self._stop_reason: Any = None

    @property
    def sampled(self) -> tuple[int, ...]:
        return (0,)

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        return [], 0

    def show(self, event: SseEvent) -> bytes | None:
        if event.data and event.data.strip() != DONE:
            said = json.loads(event.data)
            self._look(said, said.get("delta") or {} if said.get("type") == "message_delta" else {})
            self.ended = self.ended or said.get("type") == "message_stop"
        return event.raw

    def document(self, body: bytes) -> bytes:
        said = json.loads(body)
        self._look(said, said)
        self.ended = True
        return body

    def outcomes(self) -> tuple[Outcome, ...]:
        told = LOSSES.get(self._stop_reason, NO_CHAT_ROUTE) if self.ended and self._stop_reason else TRUNCATED
        return (Lost(0, self.spoilt or told),)

    def answers(self) -> tuple[Mapping[str, Any] | None, ...]:
        return ({"stop_reason": self._stop_reason} if self._stop_reason else None,)

    def _look(self, said: Mapping[str, Any], ending: Mapping[str, Any]) -> None:
        """Note whether what is `said` is an error, and the stop reason that is `ending` it."""
        if said.get("type") == "error" or said.get("error"):
            self.spoil(ENGINE_ERROR)
        reason = ending.get("stop_reason")
        self._stop_reason = reason if isinstance(reason, str) and reason else self._stop_reason


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
