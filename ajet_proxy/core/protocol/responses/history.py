"""The history of a response: that of the response that it names, else its items, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ajet_proxy.core.conversation.history import ChatHistory, Mark, keyed, utf8
from ajet_proxy.core.protocol.responses.items import merged, messages_of
from ajet_proxy.core.trajectory.call import Captured


class ResponseHistory(ChatHistory):
    """The history of a response: that of the `previous` one, if the request names one, else its `items`. `spoken` are
    these as messages, if the engine is known to read them so."""

    def __init__(self, request: Mapping[str, Any], scope: bytes, *, exact: bool) -> None:
        said, instructions = request["input"], request.get("instructions")
        self.items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not isinstance(self.items, list):
            raise TypeError("no list of items")
        self.previous = request.get("previous_response_id")
        both = [messages_of(item) for item in self.items]
        found = merged(text for _, text in both) if exact else None
        self.spoken = found or []
        system = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*system, *(one.message for one in self.spoken)]
        self._begin(request, messages, scope, exact=found is not None)
        for words in (*system, *(words for words, _ in both if words is not None)):
            self._add_words(words)
        for place, message in enumerate(messages):
            self._add_text(place, message)

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        return super().beginnings(lengths) if self.previous is None else iter((self._named(self.previous),))

    def after(self, answer: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        named = (self._named(answer["id"]),)
        said = [words for words, _ in map(messages_of, answer["output"]) if words is not None]
        return named if self.previous is not None else named + self._marks_behind(said)

    @property
    def kind(self) -> str:
        return "messages" if self.previous is None else f"messages behind {self._named(self.previous).key}"

    def _named(self, response: Any) -> Mark:
        return Mark(f"response:{keyed(utf8(str(response)), self._scope)}")
