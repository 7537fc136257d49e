"""The form of any answer to a client of the Messages API, whatever the engine sent: a grammar, and no word lost.

There is no second engine to compare with in process (vLLM's own translation is compared elsewhere, over real answers).
The rules of a stream: it opens with ``message_start``; blocks are numbered from 0, one is open at a time, and deltas
are of its kind; after ``message_stop`` or ``error`` comes nothing. Of an answer that nothing happened to, every text is
there, in order. A document that can be read is a message or an error; what cannot be read is the engine's own.
"""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.engine import Answer

_KINDS = {
    "text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking", "input_json_delta": "tool_use",
}  # fmt: skip


def check(seen: bytes, answer: Answer, *, whole: bool) -> None:
    """Raises AssertionError where `seen`, made of `answer`, breaks a rule; `whole` if nothing happened to `answer`."""
    stream = answer.content_type.startswith("text/event-stream") and answer.status < 400
    if stream:
        told = "".join(block.get("text", "") for block in blocks(seen))
        if whole:
            assert told == _said(answer), f"{told!r} of {_said(answer)!r}"
        return
    if seen == answer.body:
        assert not whole, "an answer that can be read is translated"
        return
    assert not seen or json.loads(seen)["type"] in ("message", "error")


def blocks(seen: bytes) -> list[dict[str, Any]]:
    """The content blocks of a stream as a client puts them together, after a check of its grammar."""
    begun = over = is_open = False
    content: list[dict[str, Any]] = []
    for raw in seen.split(b"\n\n")[:-1]:
        name, data = raw.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        kind = event["type"]
        assert name == b"event: " + kind.encode()
        assert not over, f"{kind} after the end"
        match kind:
            case "message_start":
                assert not begun
                begun = True
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append({"partial_json": ""} | event["content_block"])
                is_open = True
            case "content_block_delta":
                (_, of), (name, words) = event["delta"].items()
                assert is_open and event["index"] == len(content) - 1 and _KINDS[of] == content[-1]["type"]
                content[-1][name] = content[-1].get(name, "") + (words if isinstance(words, str) else "")
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                is_open = False
            case "message_delta":
                assert not is_open
            case _:
                assert kind in ("message_stop", "error")
                over = True
    assert seen.endswith(b"\n\n") or not seen
    return content


def _said(answer: Answer) -> str:
    text = ""
    for part in answer.parts:
        data = part.removeprefix(b"data: ").strip()
        if data != b"[DONE]":
            event: dict[str, Any] = json.loads(data)
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text
