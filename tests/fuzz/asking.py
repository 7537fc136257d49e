"""Requests as agents write them, and as nobody should: seeded, for the four protocols."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.engine import MESSAGES
from tests.kit.engine_stub import CHAT, COMPLETIONS, RESPONSES

TEXTS = (
    "hello", "say: é日😀 ok", "say: a\nb\t\"q\" \\ {} \u2028", "say: ", "say: <|im_end|>", "guess",
    "say: 👩\u200d👩\u200d👧 naïve", "x" * 300, "say: data: [DONE]", 'say: ,"token_ids":[1],"logprobs":null}', "",
)  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 3, 5, 2.0, 2.5, 1e300, 2**70, float("nan"), "", "1", "2", "true", "False", "on",
    "x", " 2 ", [], {}, [1], ["a"], [None], {"a": 1}, {"include_usage": True},
    [{"role": "user", "content": "x"}], [[1, 2], [3]],
    "\ud800", "1_0", "+1", "2.0", 16385, 20000, {"type": "text"}, [{}], [[]], ["message.output_text.logprobs"],
)  # fmt: skip
FIELDS = {
    CHAT: ("n", "stream", "logprobs", "top_logprobs", "return_token_ids", "max_tokens", "stream_options", "messages",
           "tools", "seed", "model", "temperature", "stop", "user", "metadata", "x"),
    COMPLETIONS: ("n", "stream", "logprobs", "return_token_ids", "max_tokens", "prompt", "stream_options", "model",
                  "stop", "seed", "user", "suffix"),
    RESPONSES: ("stream", "input", "include", "top_logprobs", "enable_response_messages", "max_output_tokens",
                "instructions", "model", "background", "tools", "store", "previous_response_id"),
    MESSAGES: ("messages", "system", "max_tokens", "stream", "tools", "tool_choice", "thinking", "stop_sequences",
               "metadata", "model", "temperature", "top_k"),
}  # fmt: skip


def request(path: str, dice: random.Random) -> dict[str, Any]:
    """A request that the engine takes."""
    text = dice.choice(TEXTS)
    out: dict[str, Any] = {"model": "stub", "stream": dice.random() < 0.7}
    maybe: dict[str, list[Any]] = {}
    messages = [{"role": "user", "content": text}]
    if dice.random() < 0.3:
        messages = [{"role": "system", "content": "é"}, *messages, {"role": "assistant", "content": "ok"}, *messages]
    if path == RESPONSES:
        out |= {"input": text, "max_output_tokens": dice.choice((4, 12))}
        maybe |= {"include": [["message.output_text.logprobs"], [], None], "enable_response_messages": [True, False],
                 "instructions": ["be brief"], "tools": [[TOOL["function"] | {"type": "function"}]]}  # fmt: skip
    elif path == MESSAGES:
        out |= {"messages": [message for message in messages if message["role"] != "system"], "max_tokens": 12}
        maybe |= {"system": ["é", [{"type": "text", "text": "x"}]], "stop_sequences": [["ok"]],
                 "tools": [[{"name": "guess", "input_schema": {"type": "object"}}]],
                 "metadata": [{"user_id": "u"}]}  # fmt: skip
    else:
        prompts: tuple[Any, ...] = (text, [text, "two"], [104, 105], [[104], [105, 106]])
        prompt = dice.choice(prompts)
        out |= {"messages": messages} if path == CHAT else {"prompt": prompt}
        logprobs: list[Any] = [True, False, None] if path == CHAT else [0, 1, None]
        maybe |= {"n": [1, 2, 3], "return_token_ids": [True, False], "logprobs": logprobs, "stop": ["lo", ["ok", "é"]],
                 "seed": [1, 7], "temperature": [0.5, 1], "max_tokens": [3, 12, 40]}  # fmt: skip
        out["max_tokens"] = dice.choice((3, 12))
        if path == CHAT:
            maybe |= {"tools": [[TOOL]], "top_logprobs": [0, None]}
        if out["stream"]:
            maybe["stream_options"] = [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    return out | {name: dice.choice(values) for name, values in maybe.items() if dice.random() < 0.3}


def odd(path: str, dice: random.Random) -> tuple[bytes, list[str]]:
    """The bytes of a request after up to three mutations, and their names."""
    fields, names = request(path, dice), []
    for _ in range(dice.choice((0, 1, 1, 2))):
        name = dice.choice(FIELDS[path])
        if dice.random() < 0.15:
            fields.pop(name, None)
        else:
            fields[name] = dice.choice(ODD)
        names.append(name)
    if dice.random() < 0.2:
        fields = dict(dice.sample(list(fields.items()), len(fields)))
    text = json.dumps(fields, ensure_ascii=dice.random() < 0.5, indent=dice.choice((None, None, None, 1)))
    body = text.encode("utf-8", "surrogatepass")
    if dice.random() < 0.25:
        spoil = dice.choice(SPOILERS)
        names.append(spoil.__name__)
        body = spoil(text, dice)
    return body, names


def truncated(text: str, dice: random.Random) -> bytes:
    body = text.encode("utf-8", "surrogatepass")
    return body[: dice.randrange(len(body))]


def flipped(text: str, dice: random.Random) -> bytes:
    body = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(dice.choice((1, 1, 3))):
        body[dice.randrange(len(body))] = dice.choice((34, 44, 58, 92, 123, 125, 91, 93, 0, 255, 128, 48, 120))
    return bytes(body)


def recoded(text: str, dice: random.Random) -> bytes:
    return text.encode(dice.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig")), "surrogatepass")


def doubled(text: str, dice: random.Random) -> bytes:
    """A field stands there twice; the last one counts."""
    name = dice.choice(("n", "stream", "logprobs", "return_token_ids", "model", "max_tokens"))
    return (text[:-1] + f', "{name}": {json.dumps(dice.choice(ODD))}}}').encode("utf-8", "surrogatepass")


def nested(text: str, dice: random.Random) -> bytes:
    return b'{"messages":' + b"[" * dice.choice((10, 900, 100_000))


def other(text: str, dice: random.Random) -> bytes:
    empty = (b"", b"[]", b"null", b'"x"', b"7", b"{}", b"\xff", b" " * 10, b"{} {}", b"{" + b" " * 5000 + b"}")
    return dice.choice(empty)


SPOILERS: tuple[Callable[[str, random.Random], bytes], ...] = (
    truncated, flipped, flipped, recoded, doubled, nested, other,
)  # fmt: skip
