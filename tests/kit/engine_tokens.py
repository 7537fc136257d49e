"""The stub engine's tokenizer, template and "model": bytes are tokens, the reply is a function of prompt and seed.

A reply that is rendered back into the next prompt gives the very ids that were sampled, as with a well-behaved engine,
so that the calls of an episode merge. Multi-byte characters are several tokens, so text comes late, as it does in vLLM.
A user message that contains ``say: TEXT`` decides the reply; otherwise tools are called if there are any and the last
message is not a tool's, and else a few words are said.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

IM_START, IM_END, TOOL_START, TOOL_END = 256, 257, 258, 259
SPECIALS = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<tool_call>": TOOL_START, "</tool_call>": TOOL_END}
_TEXT_OF = {token: text for text, token in SPECIALS.items()}
MERGED = 260
"""The first of the tokens that stand for whole words, which the model never samples."""
WORDS = ("naïve", "hello", "guess", "日本", "higher", "lower", "yes", "🙂", "number", "seven", "done")
MAX_MODEL_LEN = 131_072


@dataclass(frozen=True, slots=True)
class Output:
    """One generated choice: `pieces[i]` is the text that token i made visible (often "" for part of a character)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def encode(text: str, *, merged: bool = False) -> list[int]:
    """Specials by name, everything else byte by byte; words of `WORDS` as one token each if they are `merged`."""
    names = SPECIALS | ({word: MERGED + place for place, word in enumerate(WORDS)} if merged else {})
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return [token for part in parts for token in ((names[part],) if part in names else part.encode())]


def decode(token_ids: Sequence[int], *, skip_chat_marks: bool = True) -> str:
    return "".join(_pieces(token_ids, skip_chat_marks=skip_chat_marks))


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """The ChatML prompt of a conversation, ready for the assistant's turn."""
    head = f"<|im_start|>system\ntools: {json.dumps(tools)}<|im_end|>\n" if tools else ""
    return (
        head
        + "".join(f"<|im_start|>{m['role']}\n{message_text(m)}<|im_end|>\n" for m in messages)
        + "<|im_start|>assistant\n"
    )


def message_text(message: dict[str, Any]) -> str:
    """The text that a message shows the model: its text parts, then its tool calls."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return text + "".join(tool_text(call["name"], _as_template_writes(call["arguments"])) for call in calls)


def _as_template_writes(arguments: str) -> str:
    """vLLM hands templates the arguments as an object, which they write by `tojson`: spacing is not the client's."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except ValueError:
        return arguments


def tool_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def generate(prompt: Sequence[int], body: dict[str, Any], index: int, said: str | None = None) -> Output:
    """Choice `index` of the reply to `prompt`: `said`, or one that follows from the other arguments alone."""
    key = repr((tuple(prompt), body.get("seed"), index)).encode()
    dice = hashlib.blake2b(key, digest_size=64).digest()
    token_ids = [*encode(_reply(body, dice) if said is None else said), IM_END]
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16 * 1024
    finish = "stop" if len(token_ids) <= limit else "length"
    token_ids = token_ids[:limit]
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else list(body.get("stop") or ())
    pieces, stop = _until_stop(_pieces(token_ids), stops)
    token_ids = token_ids[: len(pieces)]
    known = [*prompt, *token_ids]
    places = range(len(prompt), len(known))
    logprobs = tuple(logprob_of(known[max(0, place - 16) : place], known[place]) for place in places)
    return Output(tuple(token_ids), logprobs, tuple(pieces), "stop" if stop else finish, stop)


def logprob_of(before: Sequence[int], token: int) -> float:
    """The logprob of `token` after `before`, of which the last 16 count: the same when it is sampled and when
    scored."""
    return -(crc32(repr((list(before[-16:]), token)).encode()) % 997 + 1) / 256


def _reply(body: dict[str, Any], dice: bytes) -> str:
    messages = body.get("messages") or [{"role": "user", "content": str(body.get("prompt"))}]
    said = message_text(messages[-1]) if messages[-1]["role"] == "user" else ""
    if "say: " in said:
        return said.split("say: ", 1)[1]
    tools = body.get("tools")
    if tools and body.get("tool_choice") != "none" and messages[-1]["role"] != "tool":
        return "ok " + tool_text(tools[0]["function"]["name"], json.dumps({"number": dice[0] % 10}))
    return " ".join(WORDS[byte % len(WORDS)] for byte in dice[: 3 + dice[0] % 6])


def _pieces(token_ids: Sequence[int], *, skip_chat_marks: bool = True) -> list[str]:
    """The text that each token completes; a broken character at the end comes as U+FFFD with the last token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = []
    for place, token in enumerate(token_ids):
        last = place == len(token_ids) - 1
        if token < 256:
            pieces.append(decoder.decode(bytes([token]), last))
            continue
        flushed = decoder.decode(b"", True)
        decoder.reset()
        if token >= MERGED:
            pieces.append(flushed + WORDS[token - MERGED])
            continue
        pieces.append(flushed + ("" if skip_chat_marks and token in (IM_START, IM_END) else _TEXT_OF.get(token, "")))
    return pieces


def _until_stop(pieces: list[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """`pieces` as the engine shows them: enough held back to never show part of a stop string, then cut there."""
    if not stops:
        return pieces, None
    held = max(len(stop) for stop in stops) - 1
    text, shown, out = "", 0, []
    for place, piece in enumerate(pieces):
        text += piece
        found = sorted((text.find(stop), stop) for stop in stops if stop in text)
        last = place == len(pieces) - 1
        end = found[0][0] if found else len(text) if last else max(shown, len(text) - held)
        out.append(text[shown:end])
        shown = max(shown, end)
        if found:
            return out, found[0][1]
    return out, None
