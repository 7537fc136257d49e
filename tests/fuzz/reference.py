"""The part of an engine's answer that the client must see, said a second time and in another way than the proxy does
it.

The rule: the bytes are the engine's, one for one, except

1. in an event (or document) that is a JSON object in UTF-8, the values that only the proxy asked for are what the
   engine writes where they are not asked for: null (in a response's deltas, an empty list). They stand in the
   objects of ``choices``, and ``prompt_token_ids`` also at the top; on ``/v1/responses`` in deltas and in ``response``;
2. an event all of whose choices say nothing and exist only because ids or logprobs were asked for is left out;
3. with ``include_reasoning: false`` and with ``echo`` the words are what vLLM makes of them (`_quiet`, `_echo`).

What is no JSON object stays as it came. The proxy exchanges spans of text; here each event is decoded, changed and
written again in the style it had (`_style`), so the two have nothing in common. An event in a style that is not known
here cannot be foretold byte by byte: it is `loose`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from ajet_proxy.core.protocol.dialect import Ask
from tests.kit.engine_stub import CHAT, RESPONSES

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
_DELTAS = ("response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta")
Writer = Callable[[Any], str]


class Loose(Exception):
    """The client's view cannot be foretold byte by byte."""


class Reference:
    """One answer to a request that was put with `ask`. Feed the events in order."""

    def __init__(self, ask: Ask, path: str) -> None:
        self._ask = ask
        self._path = path
        self._begun: set[int] = set()
        self.ids: dict[int, list[Any]] = {}
        """The ids that the answer reports for each choice, as far as it is well formed."""
        self.prompts: list[Any] = []

    def event(self, raw: bytes) -> bytes:
        """The bytes that are to be seen of one event; raises `Loose`."""
        lines = [line for line in _lines(raw) if _data(line[0]) is not None]
        data = b"\n".join(_data(line) or b"" for line, _ in lines)
        if not lines or data == b"[DONE]":
            return raw
        seen = self._text(data)
        if seen is None:
            if b"\r" in raw:
                raise Loose  # of an event that is left out a last LF may stay, if it comes apart from its CR
            return b""
        if seen == data:
            return raw
        parts, out = seen.split(b"\n"), b""
        for line, end in _lines(raw):
            value = _data(line)
            out += line + end if value is None else line[: len(line) - len(value)] + parts.pop(0) + end
        return out

    def document(self, body: bytes) -> bytes:
        """The bytes that are to be seen of an answer in one piece; raises `Loose`."""
        seen = self._text(body, whole=True)
        assert seen is not None
        return seen

    def _text(self, data: bytes, *, whole: bool = False) -> bytes | None:
        """The bytes that are to be seen of an event's data or of a `whole` document; None: nothing."""
        try:
            value = json.loads(data.decode())
        except (ValueError, RecursionError):
            return data
        if not isinstance(value, dict):
            return data
        before = json.dumps(value)
        seen = self._answer(value, whole)
        if seen is None or json.dumps(seen) == before:
            return None if seen is None else data
        writer = _style(data)
        if (self._ask.hide_reasoning or self._ask.echo) and writer(value) != write(value):
            raise Loose  # what the proxy puts in, and not just out, is in the engine's usual style
        return writer(seen).encode("utf-8", "surrogatepass")

    def _answer(self, value: dict[str, Any], whole: bool) -> dict[str, Any] | None:
        if self._path != RESPONSES:
            return self._choices(value, whole)
        if whole:
            self._response(value)
            return value
        return self._response_event(value)

    # ---- chat and completions

    def _choices(self, value: dict[str, Any], whole: bool) -> dict[str, Any] | None:
        choices = value.get("choices")
        if isinstance(choices, list) and not all(isinstance(choice, dict) for choice in choices):
            return value
        ask = self._ask
        listed = choices if isinstance(choices, list) else []
        filler = self._path == CHAT and not whole and bool(listed) and all(map(self._filler, listed))
        for owner in (value, *listed):
            if owner.get("prompt_token_ids") is not None:
                self.prompts.append(owner["prompt_token_ids"])
                if ask.hide_ids and not ask.show_prompt:
                    owner["prompt_token_ids"] = None
        for choice in listed:
            self._choice(choice)
        return None if filler else value

    def _filler(self, choice: dict[str, Any]) -> bool:
        if choice.get("finish_reason") not in (None, "") or "delta" not in choice:
            return False
        if self._ask.hide_reasoning:
            return "token_ids" in choice and isinstance(choice["delta"], dict) and not _speaks(choice["delta"])
        both = self._ask.hide_ids and self._ask.hide_logprobs
        return both and choice["delta"] == {} and bool(choice.get("token_ids") or choice.get("logprobs"))

    def _choice(self, choice: dict[str, Any]) -> None:
        ids = choice.get("token_ids")
        if isinstance(ids, list) and type(choice.get("index")) is int:
            self.ids.setdefault(choice["index"], []).extend(ids)
        if self._ask.hide_reasoning:
            _quiet(choice)
        if self._ask.echo is not None and self._ask.echo.texts:
            self._echo(choice)
        if self._ask.hide_ids and ids is not None:
            choice["token_ids"] = None
        if self._ask.hide_logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None

    def _echo(self, choice: dict[str, Any]) -> None:
        echo, index = self._ask.echo, choice.get("index")
        assert echo is not None
        if choice.get("prompt_logprobs") is not None and self._ask.hide_logprobs and not echo.prompt_logprobs:
            choice["prompt_logprobs"] = None
        if type(index) is not int or not 0 <= index < len(echo.texts):
            return
        words = echo.texts[index]
        if not words or choice.get("token_ids") is None or not isinstance(choice.get("text"), str):
            return
        if index not in self._begun:
            self._begun.add(index)
            choice["text"] = words + choice["text"]
        elif isinstance(choice.get("logprobs"), dict) and not self._ask.hide_logprobs:
            offsets = choice["logprobs"].get("text_offset")
            if isinstance(offsets, list) and all(type(offset) is int for offset in offsets):
                choice["logprobs"]["text_offset"] = [offset + len(words) for offset in offsets]

    # ---- responses

    def _response_event(self, value: dict[str, Any]) -> dict[str, Any]:
        kind = value.get("type")
        if kind in _DELTAS:
            if value.get("logprobs") and self._ask.hide_logprobs:
                value["logprobs"] = []
        elif kind != "error" and not value.get("error") and isinstance(value.get("response"), dict):
            self._response(value["response"])
        return value

    def _response(self, value: dict[str, Any]) -> None:
        for name, hidden in (
            ("input_messages", self._ask.hide_ids), ("output_messages", self._ask.hide_ids),
            ("top_logprobs", self._ask.hide_logprobs),
        ):
            if hidden and value.get(name) is not None:
                value[name] = None
        for item in _objects(value.get("output")) if self._ask.hide_logprobs else ():
            for part in _objects(item.get("content")):
                if part.get("logprobs") is not None:
                    part["logprobs"] = None


def events(stream: bytes) -> Iterator[bytes]:
    """The events of a stream, blank lines included; the last may lack its own."""
    raw = b""
    for found in _LINE.finditer(stream):
        raw += found[0]
        if found[0] in (b"\r\n", b"\r", b"\n"):
            yield raw
            raw = b""
    if raw:
        yield raw


def _objects(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else []


def _speaks(delta: Any) -> bool:
    if delta.get("content") or delta.get("tool_calls"):
        return True
    return "content" in delta and delta["content"] is None and "reasoning" not in delta


def _quiet(choice: dict[str, Any]) -> None:
    """vLLM's answer to ``include_reasoning: false``, made of one with the reasoning."""
    if "token_ids" not in choice:
        return
    if "message" in choice:
        if isinstance(choice["message"], dict) and "reasoning" in choice["message"]:
            choice["message"]["reasoning"] = None
    elif isinstance(choice.get("delta"), dict):
        delta = choice["delta"]
        if not _speaks(delta):
            choice["delta"] = {}
        elif "reasoning" in delta:
            delta["reasoning"] = None
        else:
            before = [name for name in delta if name in ("role", "content")]
            place = list(delta).index(before[-1]) + 1 if before else 0
            members = list(delta.items())
            choice["delta"] = dict([*members[:place], ("reasoning", None), *members[place:]])


def _lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    for found in _LINE.finditer(raw):
        line = found[0].rstrip(b"\r\n")
        yield line, found[0][len(line) :]


def _data(line: bytes) -> bytes | None:
    name, colon, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
    if name != b"data":
        return None
    return value.removeprefix(b" ") if colon else b""


def write(value: Any, *, ascii_only: bool = False, spaced: bool = False, lines: bool = False) -> str:
    """JSON in one of the styles that are known here; with `lines`, a line for each member at the top."""
    comma = ", " if spaced else ","
    encode = json.JSONEncoder(ensure_ascii=ascii_only, separators=(comma, ": " if spaced else ":")).encode
    if not lines or not isinstance(value, dict):
        return encode(value)
    return "{" + ",\n".join(f"{encode(name)}:{encode(member)}" for name, member in value.items()) + "}"


def _style(data: bytes) -> Writer:
    """Who wrote `data`."""
    text = data.decode()
    value = json.loads(text)
    for ascii_only in (False, True):
        for spaced, lines in ((False, False), (True, False), (False, True)):

            def writer(value: Any, a: bool = ascii_only, s: bool = spaced, n: bool = lines) -> str:
                return write(value, ascii_only=a, spaced=s, lines=n)

            if writer(value) == text:
                return writer
    raise Loose
