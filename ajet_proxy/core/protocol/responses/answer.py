"""Answers on ``/v1/responses``: the document, or the events of a stream.

A stream does not tell which token stood in which event. So a change of weights in mid-stream is placed by counting
events; tokens that showed nothing are counted with those that came later. An answer that the engine made in several
generations, calling tools of its own in between, has several prompts, so it is lost.

vLLM reports an aborted generation on this route as a complete one.

A client that waits is sent the last delta once more, empty, while its part of an item is not done. Otherwise it is sent
``response.in_progress`` with what the response holds by then, since some clients start anew from such an event. Both
have a ``sequence_number``, so those of later events are moved on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.protocol.dialect import DONE, Ask, Reader
from ajet_proxy.core.protocol.json_edits import (
    NUMBER,
    STRING,
    WHOLE,
    Edits,
    Spanned,
    is_utf8,
    scan,
    scan_at,
    scan_list,
    splice,
)
from ajet_proxy.core.protocol.reading import UNREADABLE, hide, is_told, logprobs_of
from ajet_proxy.core.protocol.sse import SseEvent, SseParser
from ajet_proxy.core.tokens import are_tokens
from ajet_proxy.core.trajectory.call import (
    CAPTURE_FAILED,
    ENGINE_ABORTED,
    ENGINE_ERROR,
    NO_LOGPROBS,
    NO_TOKEN_IDS,
    SEVERAL_GENERATIONS,
    TRUNCATED,
    Captured,
    Lost,
    Outcome,
    Unscored,
)

_LAST = ("response.completed", "response.incomplete", "response.failed")
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}
_LOSSES = {"failed": ENGINE_ERROR, "cancelled": ENGINE_ABORTED}
_RUNNING = ("queued", "in_progress")
_DELTAS = tuple(f"response.{of}.delta" for of in ("output_text", "reasoning_text", "function_call_arguments"))
_IN_PROGRESS = "response.in_progress"
_BEGUN = ("response.created", "response.queued", _IN_PROGRESS)
_ADDED, _ITEM = "response.output_item.added", "response.output_item.done"
_PARTS = ("response.content_part.added", "response.reasoning_part.added")
_BEGINS: Mapping[str, Mapping[str, Any]] = {
    "output_text": {"type": _DELTAS[0], "logprobs": []}, "reasoning_text": {"type": _DELTAS[1]}
}  # fmt: skip
"""The beginning of a part's deltas, by its type."""
_DONE = tuple(
    f"response.{of}.done"
    for of in ("output_text", "reasoning_text", "function_call_arguments", "content_part", "reasoning_part")
)
_NUMBER = "sequence_number"
_TELLING = (*_DELTAS, _ITEM, *_LAST)
"""The events that tell what was sampled. None of them may come behind the last."""
_ROW = b'"top_logprobs":['
_PIECE = rb'\{"token":' + STRING + rb',"logprob":' + NUMBER + rb',"top_logprobs":\[\]\}'
_USUAL = re.compile(
    rb'(event: response\.output_text\.delta\ndata: \{"content_index":' + WHOLE + rb',"delta":' + STRING
    + rb',"item_id":' + STRING + rb',"logprobs":\[)((?:' + _PIECE + rb"(?:," + _PIECE + rb")*+)?)"
    + rb'(\],"output_index":' + WHOLE + rb',"sequence_number":' + WHOLE
    + rb',"type":"response\.output_text\.delta"\}\n\n)'
    + rb"|event: response\.(?:reasoning_text|function_call_arguments)\.delta\ndata: [^\r\n]*\n\n"
)
"""The events that make up most of a stream: a piece of text with its logprobs, or another piece without."""


class ResponseReading(Reader):
    """The `Reader` of one response."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._events = 0
        self._outcome: Outcome = Lost(0, TRUNCATED)
        self._prompt: Any = None
        self._answer: Mapping[str, Any] | None = None
        self.shown: list[Any] = []
        self._begun = ""
        """The event with which the response began for the client, as JSON text."""
        self._open: list[Any] = []
        """The item that is not done, as it was added, with what of it is done."""
        self._part: Any = None
        """The part that was last added to it."""
        self._is_whole = True
        """True if the items that are done, and the open one, are all that the client has."""
        self._delta: dict[str, Any] | bytes | None = None
        """An event that adds to the open item, or could."""
        self._number: Any = None
        """The ``sequence_number`` of the last event; None if it is that of the `_delta`."""
        self.put_in = 0
        """The number of events of our own the client has."""

    @property
    def sampled(self) -> tuple[int, ...]:
        return (self._events,)

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        seen: list[bytes] = []
        at = 0
        while not self.ended and not self.put_in and (found := _USUAL.match(stream, at)):
            if not is_utf8(found[0]):
                break
            self._delta, self._number = found[0], None
            head, rows, tail = found.groups()
            if rows and self._ask.hide_logprobs:
                seen += (head, tail)
            else:
                seen.append(found[0])
            self._events += max(1, rows.count(_ROW)) if rows else 1
            at = found.end()
        return seen, at

    def show(self, event: SseEvent) -> bytes | None:
        if not event.data or event.data.strip() == DONE:
            return event.raw
        text = event.data.decode()
        found = scan(text)
        kind = found.values.get("type")
        edits: Edits = {}
        if self.ended and kind in _TELLING:
            self.spoil(ENGINE_ERROR if kind == "response.failed" else CAPTURE_FAILED)
        elif kind == _ITEM:
            self.shown.append(found.values.get("item"))
        if kind in _DELTAS:
            rows = found.values.get("logprobs")
            self._events += max(1, len(rows) if isinstance(rows, list) else 0)
            if rows and self._ask.hide_logprobs:
                edits = {found.spans["logprobs"]: "[]"}
        elif kind == "error" or found.values.get("error"):
            self.spoil(ENGINE_ERROR)
        elif "response" in found.spans:
            response = scan_at(text, found.spans["response"][0])
            edits = self._put_back(text, response)
            if kind in _BEGUN:
                self._begun = splice(text, edits)
            self._learn(response.values.get("input_messages"))
            if kind in _LAST and not self.ended:
                self._end(response.values)
            if kind == "response.failed":
                self.spoil(ENGINE_ERROR)
        self._follow(kind, found.values)
        return event.with_data(splice(text, edits).encode()) if edits else event.raw

    def _follow(self, kind: Any, event: Mapping[str, Any]) -> None:
        """Note what an event of this `kind` says of the items that the client has. The last one is held back."""
        if self.ended:
            return
        self._number = event.get(_NUMBER)
        if kind in (_ADDED, _ITEM):
            self._open, self._delta, self._is_whole = [event.get("item")] if kind == _ADDED else [], None, True
        elif kind not in _BEGUN:
            self._is_whole = False
        if kind in _DELTAS:
            self._delta = dict(event)
        elif kind in _DONE:
            self._delta, self._is_whole = None, self._completes(event)
        elif isinstance(part := event.get("part"), dict) and kind in _PARTS and part.get("type") in _BEGINS:
            places = {name: event[name] for name in ("item_id", "output_index", "content_index") if name in event}
            self._delta, self._part = {**places, **_BEGINS[part["type"]]}, part

    def _completes(self, event: Mapping[str, Any]) -> bool:
        """Put what is done by `event` into the open item. False if it does not fit there."""
        try:
            (item,) = self._open
            if "arguments" in event:
                self._open = [{**item, "arguments": event["arguments"]}]
                return True
            before, place = item.get("content") or [], event["content_index"]
            part = event.get("part") or {**self._part, "text": event["text"]}
            self._open = [{**item, "content": [*before[:place], part]}]
            return bool(place <= len(before))
        except UNREADABLE:
            return False

    def leaving(self, event: bytes) -> bytes:
        if not self.put_in:
            return event
        try:
            (one,) = SseParser().feed(event)
            text = (one.data or b"").decode()
            found = scan(text)
            moved = str(found.values[_NUMBER] + self.put_in)
            return one.with_data(splice(text, {found.spans[_NUMBER]: moved}).encode())
        except UNREADABLE:
            return event

    def keep_alive(self, *, held: bool) -> bytes:
        delta = self._delta
        if isinstance(delta, bytes):
            try:
                self._delta = delta = dict(json.loads(delta.partition(b"\ndata: ")[2]))
            except UNREADABLE:
                return super().keep_alive(held=held)
            self._number = delta.get(_NUMBER) if self._number is None else self._number
        if not self._begun or (self.ended and not held) or not (delta or self._is_whole):
            return super().keep_alive(held=held)
        if delta:
            event = {**delta, "delta": ""} | ({"logprobs": []} if "logprobs" in delta else {})
        else:
            event = json.loads(self._begun)
            event["response"]["output"] = [*self.shown, *self._open]
            event["type"] = _IN_PROGRESS
        if type(self._number) is int:
            self.put_in += 1
            event[_NUMBER] = self._number + self.put_in
        text = json.dumps(event, separators=(",", ":"))
        return f"event: {event['type']}\ndata: {text}\n\n".encode()

    def document(self, body: bytes) -> bytes:
        text = body.decode()
        response = scan(text)
        edits = self._put_back(text, response)
        self._end(response.values)
        return splice(text, edits).encode() if edits else body

    def outcomes(self) -> tuple[Outcome, ...]:
        return (self._outcome if self.spoilt is None else Lost(0, self.spoilt),)

    def answers(self) -> tuple[Mapping[str, Any] | None, ...]:
        return (self._answer,)

    def _put_back(self, text: str, response: Spanned) -> Edits:
        """The edits that put back what only the proxy asked for in a response object."""
        edits: Edits = {}
        if self._ask.hide_ids:
            hide(response, ("input_messages", "output_messages"), edits)
        if self._ask.hide_logprobs:
            hide(response, ("top_logprobs",), edits)
            for item in _objects(text, response, "output"):
                for part in _objects(text, item, "content"):
                    hide(part, ("logprobs",), edits)
        return edits

    def _learn(self, prompt: Any) -> None:
        """Notes what an event tells of the prompt. It may be told once, or more often if it is always alike."""
        if not self._prompt:
            self._prompt = prompt
        elif prompt and prompt != self._prompt:
            self.spoil(CAPTURE_FAILED)

    def _end(self, response: dict[str, Any]) -> None:
        try:
            self._outcome = _outcome(response, later=self._ask.skip == "background")
        except UNREADABLE:
            self._outcome = Lost(0, CAPTURE_FAILED)
        self.response_id = name = response.get("id")
        self._answer = {"id": name, "output": response.get("output"), "shown": self.shown or None}
        self.ended = True


def _objects(text: str, found: Spanned, name: str) -> list[Spanned]:
    """The objects in the list `name`; none if it is no list of objects."""
    value = found.values.get(name)
    whole = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return scan_list(text, found.spans[name][0])[0] if whole else []


def _outcome(response: Mapping[str, Any], *, later: bool) -> Outcome:
    """The outcome of the call whose whole answer is `response`. How it ended counts before what it told: a client that
    got no answer must not count as answered. One whose answer comes `later` need not have ended."""
    status = response.get("status")
    if response.get("error") or response.get("object") == "error":
        return Lost(0, ENGINE_ERROR)
    if status in _LOSSES:
        return Lost(0, _LOSSES[status])
    if not _has_ended(response) and not (later and status in _RUNNING):
        return Lost(0, TRUNCATED)
    generations = response.get("output_messages") or []
    prompt, ids = _ids(response.get("input_messages")), _ids(generations[:1])
    if prompt is None or ids is None:
        return Lost(0, NO_TOKEN_IDS)
    if len(generations) > 1:
        return Lost(0, SEVERAL_GENERATIONS)
    model, finish_reason = response.get("model"), _finish_reason(response)
    if finish_reason is None or not is_told(model):
        return Lost(0, CAPTURE_FAILED)
    values = _told_logprobs(response["output"])
    if len(values) != len(ids):
        return Unscored(0, model, prompt, ids, finish_reason)
    logprobs = logprobs_of(values)
    return Lost(0, NO_LOGPROBS) if logprobs is None else Captured(0, model, prompt, ids, logprobs, finish_reason)


def _has_ended(response: Mapping[str, Any]) -> bool:
    """Tell whether `response` says that it has ended, and how. One without a status has ended if it has an output."""
    status, details = response.get("status"), response.get("incomplete_details")
    if status == "incomplete":
        return isinstance(details, dict) and bool(details.get("reason"))
    return status not in _RUNNING if status else bool(response.get("output"))


def _ids(messages: Any) -> tuple[int, ...] | None:
    """The ids of the one raw message in `messages`; None if there is not one, or it has none."""
    if not isinstance(messages, list) or len(messages) != 1:
        return None
    tokens = messages[0].get("tokens")
    return tuple(tokens) if are_tokens(tokens) else None


def _finish_reason(response: Mapping[str, Any]) -> str | None:
    """The finish reason in the words of chat completions; None for a response that has not finished."""
    if response.get("status") == "completed":
        called = any(item.get("type") == "function_call" for item in response["output"])
        return "tool_calls" if called else "stop"
    details: dict[str, Any] = response.get("incomplete_details") or {}
    return _FINISH.get(details.get("reason", ""))


def _told_logprobs(output: list[dict[str, Any]]) -> list[Any]:
    """The logprobs of the first text that has any: those of all sampled tokens. Empty if they are not numbers."""
    parts = [part for item in output for part in item.get("content") or ()]
    rows = next((part["logprobs"] for part in parts if part.get("logprobs")), ())
    values = [row.get("logprob") for row in rows]
    return values if set(map(type, values)) <= {int, float} else []
