"""The engine's chat answer as Anthropic's clients read it: one document, or events that open, fill and close blocks.

::

    | chat chunk                       | events
    | the first                        | message_start
    | delta.reasoning, delta.content   | (content_block_stop, content_block_start,) content_block_delta
    | delta.tool_calls, with a name    | (content_block_stop,) content_block_start; its arguments are deltas
    | no choices: usage                | (content_block_stop,) message_delta
    | [DONE]                           | message_stop
    | an error                         | error, and nothing after it

One block is open at a time, and blocks are numbered from 0. What belongs to a later block waits until those before it
may end. The block of a tool may end when its arguments are a whole object, so calls whose pieces alternate lose none.
Text waits for the end of a tool's block in any case, because a block's deltas are of one kind. Each event has the bytes
that vLLM writes for it. Thinking is signed with 32 hexadecimal digits that mean nothing, as vLLM's do: its are random,
these say which block it was.

What comes is read as chat by `Reading`, whose outcomes hold whatever the client is shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.protocol.anthropic.errors import error_body
from ajet_proxy.core.protocol.dialect import DONE, Ask, OpenAIDialect
from ajet_proxy.core.protocol.json_edits import scan
from ajet_proxy.core.protocol.reading import UNREADABLE, Reading
from ajet_proxy.core.protocol.sse import SseEvent
from ajet_proxy.core.trajectory.call import CAPTURE_FAILED

INVALID = "INVALID_JSON"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {b'"content"': "text", b'"reasoning"': "thinking"}
_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","delta":{"type":"%b_delta","%b":%b},"index":%d}\n\n'
)


class MessagesReading(Reading):
    """One chat answer, for a client of the Messages API."""

    translates, waiting = True, PING

    def __init__(self, dialect: OpenAIDialect, ask: Ask) -> None:
        super().__init__(dialect, ask)
        self._blocks: Blocks | None = None
        self._over = False
        self._finish_reason: Any = None
        self._stop_reason: Any = None

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        """As `Reading.usual`, once the message has begun."""
        return super().usual(stream) if self._blocks else ([], 0)

    def _usually(self, found: re.Match[bytes]) -> Sequence[bytes] | None:
        """The delta of a text that belongs to the block that is open."""
        name, _, text = found[3].partition(b":")
        kind, blocks = _KINDS[name], self._blocks
        if blocks is None or kind != blocks.kind or text == b'""' or b"\\u" in text or b"\\/" in text:
            return None  # escapes that can be written in another way, too, are written in one
        return (_DELTA % (kind.encode(), kind.encode(), text, blocks.index),)

    def show(self, event: SseEvent) -> bytes | None:
        if not event.data:
            return None
        if self._over:
            self._watch(event.data)
            return None
        try:
            return b"".join(self._events(event.data))
        except UNREADABLE as error:
            self.spoil(CAPTURE_FAILED)
            return self._fail(f"the engine's stream cannot be read: {error}")

    def document(self, body: bytes) -> bytes:
        try:
            answer, _, _ = self._document(body)
            choices: Any = answer.values.get("choices") or ()
            refusal = answer.values.get("error")
            if isinstance(refusal, dict) and not choices:
                return _dump(error_body(refusal["type"], refusal["message"]))
            shown = self._message(answer.values, choices[0].values)
        except UNREADABLE:
            self.spoil(CAPTURE_FAILED)
            return body
        self.ended = True
        return _dump(shown)

    def _watch(self, data: bytes) -> None:
        """Read what the client is no longer shown."""
        with suppress(*UNREADABLE):
            answer = scan(data.decode(), deep="choices")
            self._read(answer, answer.values.get("choices"))

    def _events(self, data: bytes) -> list[bytes]:
        if data.strip() == DONE:
            self.ended = self._over = True
            return [*(self._close(self._blocks) if self._blocks else ()), _event("message_stop")]
        answer = scan(data.decode(), deep="choices")
        values = answer.values
        choices: Any = values.get("choices") or ()
        self._read(answer, choices)
        if (error := values.get("error")) and not choices:
            return [self._fail(error["message"] if isinstance(error, dict) else str(error))]
        if self._blocks is None:
            self._blocks = Blocks(values["id"])
            message = {"id": values["id"], "type": "message", "role": "assistant", "content": [],
                       "model": values["model"], "stop_reason": None, "stop_sequence": None}  # fmt: skip
            return [_event("message_start", message=message | {"usage": _usage(values.get("usage"))})]
        if not choices:
            named = isinstance(self._stop_reason, str)  # in a stream, whatever else it ended with
            end = _stop("stop" if named else self._finish_reason, self._stop_reason)
            return [*self._close(self._blocks), _event("message_delta", delta=end, usage=_usage(values.get("usage")))]
        choice = choices[0].values
        if choice.get("finish_reason"):
            self._finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        return self._blocks.add(choice["delta"])

    def _close(self, blocks: Blocks) -> list[bytes]:
        """The end of the `blocks`. If the client was not told all, the call is lost."""
        out = blocks.close()
        if blocks.is_lossy:
            self.spoil(CAPTURE_FAILED)
        return out

    def _fail(self, message: str) -> bytes:
        """End the stream here: the engine has failed, or cannot be understood."""
        self.ended = self._over = True
        return _event("error", error={"type": "internal_error", "message": message})

    def _message(self, values: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        said = choice["message"]
        content: list[dict[str, Any]] = []
        if said.get("reasoning"):
            signature = _signature(values["id"], 0)
            content.append({"type": "thinking", "thinking": said["reasoning"], "signature": signature})
        if said.get("content"):
            content.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls") or ():
            function = call["function"]
            given = _arguments(function["arguments"])
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append(block | ({} if given is None else {"input": given}))
        shown = {"id": values["id"], "type": "message", "role": "assistant",
                 "content": content or [{"type": "text", "text": ""}], "model": values["model"],
                 **_stop(choice.get("finish_reason"), choice.get("stop_reason")), "usage": _usage(values.get("usage")),
                 "kv_transfer_params": values.get("kv_transfer_params"),
                 "ec_transfer_params": values.get("ec_transfer_params")}  # fmt: skip
        return {name: value for name, value in shown.items() if value is not None}


@dataclass(slots=True, eq=False)
class _Block:
    """A content block: what opens it, and what was said in it. A tool's has an `id`, and opens once it has a name."""

    kind: str
    head: dict[str, Any]
    id: Any = None
    said: list[str] = field(default_factory=list)
    looked: tuple[int, bool] = (0, False)
    """The number of pieces that were said when it was last looked at, and whether it was whole then."""

    def may_open(self) -> bool:
        return self.kind != "tool_use" or self.head["name"] is not None

    def may_end(self) -> bool:
        """Tell whether nothing of it can follow: the arguments of a tool are a whole object by then."""
        if self.kind == "tool_use" and self.looked[0] != len(self.said):
            self.looked = len(self.said), self._is_whole()
        return self.kind != "tool_use" or self.looked[1]

    def _is_whole(self) -> bool:
        with suppress(ValueError, RecursionError):
            return self.said[-1].rstrip().endswith("}") and isinstance(json.loads("".join(self.said)), dict)
        return False


class Blocks:
    """The content blocks of one streamed message: which one is open, which ones wait for its end, and the events that
    lead from one to the next."""

    def __init__(self, message: str) -> None:
        self.kind: str | None = None
        self.index = 0
        self.is_lossy = False
        """True if something could not be told: its block had ended, or is a tool's that never had a name."""
        self._message = message
        self._open: _Block | None = None
        self._later: list[_Block] = []
        self._tools: dict[Any, _Block] = {}

    def add(self, delta: Mapping[str, Any]) -> list[bytes]:
        """The events of one chat delta."""
        out: list[bytes] = []
        for name, kind in (("reasoning", "thinking"), ("content", "text")):
            if text := delta.get(name):
                out += self._say(kind, text)
        for call in delta.get("tool_calls") or ():
            out += self._call(call)
        return out

    def close(self) -> list[bytes]:
        """Close the open block, and tell those that waited for it."""
        out = self._stop()
        for block in self._later:
            if block.may_open():
                out += [*self._start(block), *self._stop()]
            else:
                self.is_lossy = True
        self._later = []
        return out

    def _say(self, kind: str, text: str) -> list[bytes]:
        if kind == self.kind:
            return [self._delta(kind, text)]
        if not self._later or self._later[-1].kind != kind:
            self._later.append(_Block(kind, {kind: ""}))
        self._later[-1].said.append(text)
        return self._go_on()

    def _call(self, call: Mapping[str, Any]) -> list[bytes]:
        function = call.get("function") or {}
        tool, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
        block = self._tools.get(call["index"])
        if block is None or (tool is not None and name is not None and block.id not in (None, tool)):
            block = self._tools[call["index"]] = _Block("tool_use", {"id": tool, "name": name, "input": {}}, tool)
            self._later.append(block)
        elif block in self._later:
            block.id = block.id or tool
            block.head |= {"id": block.id, "name": block.head["name"] or name}
        out = []
        if arguments and block is self._open:
            out.append(self._delta("input_json", arguments))
        if arguments:
            self.is_lossy = self.is_lossy or not (block is self._open or block in self._later or arguments.isspace())
            block.said.append(arguments)
        return out + self._go_on()

    def _go_on(self) -> list[bytes]:
        """Open what waits, as far as what stands before it may end. Text alone waits for the end of a tool's block."""
        out: list[bytes] = []
        while self._later and self._later[0].may_open():
            if self.kind == "tool_use" and all(block.kind == "text" for block in self._later):
                break
            if self._open is not None and not self._open.may_end():
                break
            out += [*self._stop(), *self._start(self._later.pop(0))]
        return out

    def _start(self, block: _Block) -> list[bytes]:
        self._open, self.kind = block, block.kind
        head = {"type": block.kind, **block.head}
        out = [_event("content_block_start", content_block=head, index=self.index)]
        if block.said:
            out.append(self._delta("input_json" if block.kind == "tool_use" else block.kind, "".join(block.said)))
        return out

    def _delta(self, kind: str, said: str) -> bytes:
        name = "partial_json" if kind == "input_json" else kind
        return _event("content_block_delta", delta={"type": f"{kind}_delta", name: said}, index=self.index)

    def _stop(self) -> list[bytes]:
        if self._open is None:
            return []
        signed = []
        if self.kind == "thinking":
            signed.append(self._delta("signature", _signature(self._message, self.index)))
        out = [*signed, _event("content_block_stop", index=self.index)]
        self._open = self.kind = None
        self.index += 1
        return out


def _arguments(text: str) -> dict[str, Any] | None:
    """A tool call's arguments. What is no object is given as it is under a name that says so, as Anthropic advises, so
    that the agent can tell its model."""
    with suppress(ValueError, RecursionError):
        given = json.loads(text or "{}")
        if given is None or isinstance(given, dict):
            return given
    return {INVALID: text}


def _usage(usage: Any) -> dict[str, int]:
    """Token counts in Anthropic's words. vLLM's prompt tokens are all; Anthropic's are those that no cache had."""
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    created, read = details.get("created_cache_tokens"), details.get("cached_tokens")
    fresh = usage.get("prompt_tokens", 0) - (created or 0) - (read or 0)
    told = {"input_tokens": max(0, fresh), "output_tokens": usage.get("completion_tokens") or 0}
    cached = {"cache_creation_input_tokens": created, "cache_read_input_tokens": read}
    return told | {name: tokens for name, tokens in cached.items() if tokens is not None}


def _stop(finish_reason: Any, stop_reason: Any) -> dict[str, Any]:
    """Why the message ended. A stop string is named, a stop token is not."""
    if isinstance(stop_reason, str) and finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _REASONS.get(finish_reason or "stop"), "stop_sequence": None}


def _signature(message: str, index: int) -> str:
    return hashlib.sha256(f"{message}/{index}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _dump({"type": kind, **fields}))


def _dump(value: Any) -> bytes:
    """JSON as vLLM writes it. Half of a surrogate pair, for which UTF-8 has no bytes, is written as its escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
