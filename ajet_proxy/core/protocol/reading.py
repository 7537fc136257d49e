"""The bookkeeping of one answer: what was sampled, choice by choice, and what the client sees of it.

vLLM reports each choice's token ids and logprobs where it reports the text. `Reading` adds them up, choice by choice.
It puts back to null what only the proxy asked for: it exchanges those values in the text and touches nothing else. The
two do not depend on one another. An answer that cannot be added up, because it is of no dialect or comes twice, is
still put back to its end.

Invariant: a choice is `Captured` only if every part of it came with ids. Its prompt's ids, one logprob for each sampled
token and the word of a good end must be there, too. Nothing may be told twice: no choice twice in one event, nothing of
a choice after its finish, no second prompt in place of the first. A contradiction may come after the end of all
choices. So what comes there is watched as well, and nothing of it is kept. A prompt may be told once for all of its
choices. An empty finish reason is none, and an empty prompt contradicts no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from typing import Any, TypeGuard

from msgspec import convert

from ajet_proxy.core.identity.headers import is_text
from ajet_proxy.core.protocol.dialect import DONE, Ask, OpenAIDialect, Reader
from ajet_proxy.core.protocol.json_edits import Edits, Spanned, is_utf8, scan, splice
from ajet_proxy.core.protocol.long_documents import read
from ajet_proxy.core.protocol.sse import SseEvent
from ajet_proxy.core.tokens import NOT_SO, are_tokens
from ajet_proxy.core.trajectory.call import (
    CAPTURE_FAILED,
    ENGINE_ABORTED,
    ENGINE_ERROR,
    NO_LOGPROBS,
    NO_TOKEN_IDS,
    TRUNCATED,
    Captured,
    Lost,
    Outcome,
)
from ajet_sdk.sample import are_logprobs

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""Errors of reading an answer that is not of the dialect."""
LOSSES = {"abort": ENGINE_ABORTED, "error": ENGINE_ERROR}
"""The finish reasons of a generation that did not come to its end."""
_OF_STREAM = ("id", "object", "created", "model")
Piece = bytes | Mapping[str, Any]
"""Words of a choice: the object that held them (``delta`` or ``message`` of a chat, ``{"text": …}`` of a completion).
The fast way through a stream keeps the raw bytes of its one member."""


@dataclass(slots=True)
class PartialChoice:
    """One choice as far as it has come."""

    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    said: list[Piece] = field(default_factory=list, compare=False)
    versions: Any = None
    finish_reason: Any = None
    stop_reason: Any = None
    told: bool = False
    silent: bool = False

    def outcome(self, index: int, model: Any, prompt: Any) -> Captured | Lost:
        """The outcome of choice number `index`, sampled by `model`, as the engine says. `prompt` is a tuple of ids if
        the engine told it well, and None if it did not tell it."""
        if not is_told(self.finish_reason):
            return Lost(index, CAPTURE_FAILED)
        if (loss := LOSSES.get(self.finish_reason)) is not None:
            return Lost(index, loss)
        if self.silent or not self.told or prompt is None:
            return Lost(index, NO_TOKEN_IDS)
        if not isinstance(prompt, tuple) or not are_tokens(self.ids) or not is_told(model):
            return Lost(index, CAPTURE_FAILED)
        logprobs = logprobs_of(self.logprobs)
        if logprobs is None or len(logprobs) != len(self.ids):
            return Lost(index, NO_LOGPROBS)
        return Captured(
            index=index, model=model,
            prompt_token_ids=prompt,
            token_ids=tuple(self.ids),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_string=self.stop_reason if isinstance(self.stop_reason, str) else None,
            labels=_labels(self.versions, len(self.ids)),
        )


def is_told(value: Any) -> TypeGuard[str]:
    """Tell whether a record can hold what an engine told. Some repeat whatever the request asks for."""
    return isinstance(value, str) and is_text(value)


def _labels(spans: Any, sampled: int) -> tuple[tuple[str, int], ...]:
    """vLLM's ``weight_versions`` as runs that cover `sampled` tokens; empty if they do not."""
    out, at = [], 0
    try:
        for span in spans or ():
            label, start, end = span["version"], span["start"], span["end"]
            if not (is_told(label) and type(end) is int and start == at < end):
                return ()
            out.append((label, end - start))
            at = end
    except UNREADABLE:
        return ()
    return tuple(out) if at == sampled else ()


def logprobs_of(values: Any) -> tuple[float, ...] | None:
    """The list `values` as floats; None if it is none, or holds anything that is no logprob."""
    try:
        numbers = convert(values, list[float])
    except NOT_SO:
        return None
    return tuple(numbers) if are_logprobs(numbers) else None


class Reading(Reader):
    """One answer, read event by event or as a whole document."""

    _puts_back = False
    """True if `_put_back` does anything, for which it needs to know where values stand."""

    def __init__(self, dialect: OpenAIDialect, ask: Ask) -> None:
        self._dialect = dialect
        self._ask = ask
        self._hides_all = ask.hide_ids and ask.hide_logprobs
        self._hides_prompt = ask.hide_ids and not ask.show_prompt
        self._fast = self._hides_all and not self._puts_back
        hides = {"prompt_token_ids": self._hides_prompt, "token_ids": ask.hide_ids, "logprobs": ask.hide_logprobs,
                 "weight_versions": ask.hide_versions}  # fmt: skip
        self._hidden = [name for name, hidden in hides.items() if hidden]
        self._choices = [PartialChoice() for _ in range(ask.choices)]
        self._prompts: list[Any] = [None] * ask.prompts
        self._each = ask.choices // ask.prompts
        self._unfinished = ask.choices
        self._last = 0
        """The choice that finished last."""
        self._stream: Mapping[str, Any] = {}
        """The fields that every event of this stream says of it."""
        self._model: Any = ""
        self.ended = False

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        """Read the events at the start of `stream` that have the most frequent form, at a tenth of the cost of `event`.
        Returns what the agent sees in their place, and how many bytes they are."""
        seen: list[bytes] = []
        at, end = 0, len(stream)
        if self.ended or not self._fast or not is_utf8(stream):
            return seen, at
        match = self._dialect.usual.match
        while at < end and (found := match(stream, at)):
            place, said = int(found[2]), found[3]
            if place >= len(self._choices) or (partial := self._choices[place]).finish_reason is not None:
                break
            shown = self._usually(found) if said else ()
            if shown is None:
                break
            partial.ids.append(int(found[6]))
            partial.logprobs.append(float(found[4]))
            partial.told = True
            if said:
                partial.said.append(said)
            seen += shown
            at = found.end()
        return seen, at

    def _usually(self, found: re.Match[bytes]) -> Sequence[bytes] | None:
        """The bytes that the agent sees of an event of the most frequent form; None if `event` has to tell."""
        return found[1], b"null", found[5], b"null", found[7]

    def show(self, event: SseEvent) -> bytes | None:
        """The client's form of `event`: its own bytes, except for what only the proxy asked for."""
        if not event.data:
            return event.raw
        usual, end = self.usual(event.raw)
        if end:
            return b"".join(usual)
        shown = self.event(event.data)
        if shown is event.data:
            return event.raw
        return None if shown is None else event.with_data(shown)

    def event(self, data: bytes) -> bytes | None:
        """The agent's form of `data`, the payload of one event; None: nothing at all.

        Raises ValueError or RecursionError for what is no JSON object.
        """
        if data.strip() == DONE:
            self.ended = True
            return data
        text = data.decode()
        answer = scan(text, deep="choices")
        choices = answer.values.get("choices")
        edits = self._read(answer, choices, text)
        if choices and isinstance(choices, list):
            if self._is_filler(choices):
                return None
            if not self._stream:
                self._stream = {name: answer.values[name] for name in _OF_STREAM if name in answer.values}
        return splice(text, edits).encode() if edits else data

    def keep_alive(self, *, held: bool) -> bytes:
        if not self._stream or (self.ended and not held):
            return super().keep_alive(held=held)
        waiting = [index for index, partial in enumerate(self._choices) if partial.finish_reason is None]
        begun = [index for index in waiting if self._choices[index].said]
        index = (begun or waiting or [self._last])[0]
        choice = f'{{"index":{index},{self._dialect.silence},"logprobs":null,"finish_reason":null}}'
        head = json.dumps(self._stream, separators=(",", ":"))[:-1]
        return f'data: {head},"choices":[{choice}]}}\n\n'.encode()

    def document(self, body: bytes) -> bytes:
        """The agent's form of `body`; raises like `event`."""
        text, edits = self._document(body)[1:]
        self.ended = True
        return splice(text, edits).encode()

    @property
    def sampled(self) -> tuple[int, ...]:
        return tuple(len(partial.ids) for partial in self._choices)

    def outcomes(self) -> tuple[Outcome, ...]:
        if self.spoilt is not None or self._unfinished:
            return tuple(Lost(index, self.spoilt or TRUNCATED) for index in range(len(self._choices)))
        prompts = [tuple(prompt) if are_tokens(prompt) else prompt for prompt in self._prompts]  # a tuple was checked
        return tuple(
            partial.outcome(index, self._model, prompts[index // self._each])
            for index, partial in enumerate(self._choices)
        )

    def answers(self) -> tuple[Mapping[str, Any] | None, ...]:
        return tuple(None if partial.finish_reason is None else joined(partial.said) for partial in self._choices)

    def _document(self, body: bytes) -> tuple[Spanned, str, Edits]:
        """Read `body`; returns what is in it, its text, and the edits that put the text back."""
        long = self._hides_prompt and self._ask.hide_logprobs and len(self._choices) == 1
        text, answer, logprobs = read(body, long=long, spans=self._ask.hide_versions or self._puts_back)
        edits = self._read(answer, answer.values.get("choices"), text)
        self._choices[0].logprobs += logprobs
        return answer, text, edits

    def _read(self, answer: Spanned, choices: Any, text: str = "") -> Edits:
        """Add `choices` to their tallies; returns the edits that put back `text`, which `answer` was read from."""
        values = answer.values
        if values.get("error") and not choices:
            self.spoil(ENGINE_ERROR)
        self._model = values.get("model") or self._model
        self.response_id = self.response_id or values.get("id")
        edits: Edits = {}
        if choices and not isinstance(choices, list):
            self.spoil(CAPTURE_FAILED)
            choices = None
        if self._hides_prompt:
            hide(answer, ("prompt_token_ids",), edits)
        if len(self._prompts) == 1:  # of several, the answer as a whole cannot say which it tells
            self._learn(0, values)
        named: set[int] = set()
        for choice in choices or ():
            hide(choice, self._hidden, edits)
            try:
                self._put_back(text, choice, edits)
                self._add(choice, named)
            except UNREADABLE:
                self.spoil(CAPTURE_FAILED)
        return edits

    def _put_back(self, text: str, choice: Spanned, edits: Edits) -> None:
        """Adds what else in `choice` would have been different if the agent had been answered directly."""

    def _learn(self, place: int, told: Mapping[str, Any]) -> None:
        """Notes what is `told` of prompt number `place`. It may be told once, or more often if it is always alike."""
        prompt, known = told.get("prompt_token_ids"), self._prompts[place]
        if not known:
            self._prompts[place] = known if prompt is None else prompt
        elif prompt and prompt is not known and (not are_tokens(prompt) or prompt != known):
            self.spoil(CAPTURE_FAILED)

    def _add(self, choice: Spanned, named: set[int]) -> None:
        """Add `choice` to what came of it before, and to those that its event has `named`. It must not be among them
        yet."""
        values = choice.values
        index = values["index"]
        if type(index) is not int or not 0 <= index < len(self._choices) or index in named:
            raise ValueError(f"choice {index!r}, of {len(self._choices)}, is not the next one of this event")
        named.add(index)
        partial = self._choices[index]
        self._learn(index // self._each, values)
        if self.ended or partial.finish_reason is not None:
            self._behind(partial, choice)
            return
        partial.said.append(self._dialect.said(choice))
        if (ids := values.get("token_ids")) is not None:
            partial.ids += ids
            partial.told = True
        elif self._ask.echo is not None and "token_ids" not in values:
            pass  # it repeats the agent's own words, for which the engine has no place for ids
        elif not self._dialect.wordless(choice):
            partial.silent = True
        rows = [] if (logprobs := values.get("logprobs")) is None else self._dialect.logprobs(logprobs)
        partial.logprobs += rows[len(rows) - len(ids or ()) :] if self._ask.echo else rows
        if "weight_versions" in values:
            self.tells_versions = True
            partial.versions = values["weight_versions"] or partial.versions
        if finish_reason := values.get("finish_reason"):
            partial.finish_reason, partial.stop_reason = finish_reason, values.get("stop_reason")
            self._last = index
            self._unfinished -= 1
            self.ended = self._unfinished == 0

    def _behind(self, partial: PartialChoice, choice: Spanned) -> None:
        """Judge what `choice` says after its finish, or after the end of all. A word, a token or another finish than
        that of `partial` contradicts what was told. Nothing of it is kept."""
        values = choice.values
        finish_reason = values.get("finish_reason") or partial.finish_reason
        words = [word for name, word in self._dialect.said(choice).items() if name != "role"]
        rows = self._dialect.logprobs(values.get("logprobs") or {})
        if finish_reason != partial.finish_reason:
            self.spoil(LOSSES.get(finish_reason, CAPTURE_FAILED))
        elif values.get("token_ids") or rows or any(words):
            self.spoil(CAPTURE_FAILED)

    def _is_filler(self, choices: list[Spanned]) -> bool:
        """Tell whether an agent that asked for neither ids nor logprobs would not have been sent this event."""
        return self._hides_all and all(map(self._dialect.is_filler, choices))


def hide(owner: Spanned, names: Iterable[str], edits: Edits) -> None:
    """Add to `edits` a null for each of `names` that `owner` has."""
    for name in names:
        if name in owner.spans and owner.values[name] is not None:
            edits[owner.spans[name]] = "null"


def joined(pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """The words of one choice, as a client that keeps history sends it back: the assistant's message, or the text.
    Texts of one name are joined, and so are the arguments of one tool call, as clients of such a stream do it. None if
    clients could not put `pieces` together."""
    whole: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    if len(pieces) == 1 and isinstance(one := pieces[0], dict) and not one.get("tool_calls"):
        return {name: value for name, value in one.items() if value is not None and name != "tool_calls"}
    try:
        for piece in _decoded(pieces):
            for name, value in piece.items():
                if name == "tool_calls":
                    _call(calls, value or ())
                elif isinstance(value, str) and name != "role":
                    whole.setdefault(name, StringIO()).write(value)
                elif value is not None:
                    whole[name] = value
        for call in calls.values():
            if "function" in call:
                call["function"] = _told(call["function"])
        return _told(whole) | ({"tool_calls": [calls[place] for place in sorted(calls)]} if calls else {})
    except (ValueError, TypeError, AttributeError):
        return None


def _decoded(pieces: Sequence[Piece]) -> Iterator[Mapping[str, Any]]:
    for raw, run in groupby(pieces, lambda piece: isinstance(piece, bytes)):
        if raw:
            members: list[Any] = list(run)
            yield from json.loads(b"[{%b}]" % b"},{".join(members))
        else:
            yield from run  # type: ignore[misc]


def _call(calls: dict[int, dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Add `pieces` of tool calls to `calls`; a piece without an index is the whole next call."""
    for piece in pieces:
        call = calls.setdefault(piece.get("index", len(calls)), {})
        for name, value in piece.items():
            if name == "function":
                function = call.setdefault(name, {})
                for part, text in value.items():
                    function.setdefault(part, StringIO()).write(text or "")
            elif name != "index" and value is not None:
                call.setdefault(name, value)


def _told(said: Mapping[str, Any]) -> dict[str, Any]:
    """All that was `said`, each text as a whole."""
    return {name: value.getvalue() if isinstance(value, StringIO) else value for name, value in said.items()}
