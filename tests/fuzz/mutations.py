"""Things that can happen to an engine's answer on its way: a seeded choice of mutations of its events, or of its
document.

Each takes the parts and gives new ones. A part is one event, blank line included, unless a mutation of bytes has made
something else of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.reference import write

Parts = list[bytes]
Mutation = Callable[[Parts, random.Random], Parts]
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 99, 2**40, 1.5, float("nan"), float("inf"), "", "x", "é日😀", "\ud83d", "0",
    [], [None], [[]], [1], ["a"], [1.5], [{}], [2**70], {}, {"a": 1}, {"content": [1]}, {"content": [{}]},
    {"content": None}, {"content": "x"}, {"reasoning": "hm"}, {"tool_calls": [{}]}, {"tool_calls": 3},
    {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": "{"}}]},
    {"role": "assistant"}, {"token_logprobs": 3}, {"token_logprobs": [None]},
    {"text_offset": [1], "token_logprobs": [-1.0]},
)  # fmt: skip
JUNK = (
    b": ping\n\n", b"\n", b"\r\n", b"data: [DONE]\n\n", b"data: no json\n\n", b"data: []\n\n", b"data:\n\n",
    b"data\n\n", b"data: {}\n\n", b"data: \xff\xfe\n\n", b"event: x\nid: 3\nretry: 5\n\n", b'data: {"choices":[7]}\n\n',
    b'data: {"choices":7}\n\n', b'data: {"choices":[]}\n\n', b'data: {"choices":[{}]}\n\n',
    b'data: {"error":{"message":"EngineCore","type":"InternalServerError","param":null,"code":500}}\n\n',
    b'event: error\ndata: {"type":"error","code":"500","message":"x"}\n\n', b'data: {"error":"x","choices":[]}\n\n',
    b"\xef\xbb\xbfdata: {}\n\n", b"data: " + b'{"a":' * 5000 + b"\n\n", b"data: null\n\n", b'data: {"type":[]}\n\n',
    b'data: {"type":"response.completed","response":{}}\n\n', b'data: {"type":"response.completed","response":7}\n\n',
    b'data: {"type":"response.output_text.delta","delta":"x","logprobs":[1]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop","token_ids":[1]}],"prompt_token_ids":[1]}\n\n',
    b'data: {"choices":[{"index":0,"text":null,"finish_reason":null,"token_ids":[1]}]}\n\n',
)  # fmt: skip
KEYS = (
    "id", "choices", "index", "delta", "message", "text", "logprobs", "token_ids", "prompt_token_ids", "finish_reason",
    "stop_reason", "usage", "content", "tool_calls", "role", "model", "error", "type", "response", "output", "status",
    "output_messages", "input_messages", "reasoning", "text_offset", "token_logprobs", "prompt_logprobs",
    "top_logprobs",
)  # fmt: skip


TELLING = b"\0\t\n\r\",:[\\]{}\x80\xc3\xf0\xff"
"""Bytes that mean something to those who read JSON, UTF-8 or server-sent events."""


def drop(parts: Parts, dice: random.Random) -> Parts:
    at = dice.randrange(len(parts))
    return parts[:at] + parts[at + dice.choice((1, 1, 2, 5)) :]


def repeat(parts: Parts, dice: random.Random) -> Parts:
    at = dice.randrange(len(parts))
    return parts[: at + 1] + [parts[at]] * dice.choice((1, 1, 2, 5)) + parts[at + 1 :]


def swap(parts: Parts, dice: random.Random) -> Parts:
    out = list(parts)
    a, b = dice.randrange(len(out)), dice.randrange(len(out))
    out[a], out[b] = out[b], out[a]
    return out


def shuffle(parts: Parts, dice: random.Random) -> Parts:
    return dice.sample(parts, len(parts))


def twice(parts: Parts, dice: random.Random) -> Parts:
    return parts + parts


def insert(parts: Parts, dice: random.Random) -> Parts:
    at = dice.randrange(len(parts) + 1)
    return [*parts[:at], dice.choice(JUNK), *parts[at:]]


def cut(parts: Parts, dice: random.Random) -> Parts:
    """The stream ends early, mostly inside an event."""
    at = dice.randrange(len(parts))
    return [*parts[:at], parts[at][: dice.randrange(len(parts[at]) + 1)]]


def no_end(parts: Parts, dice: random.Random) -> Parts:
    return parts[: -dice.choice((1, 1, 2))]


def line_ends(parts: Parts, dice: random.Random) -> Parts:
    end = dice.choice((b"\r\n", b"\r"))
    some = dice.random() < 0.5
    return [part.replace(b"\n", end) if not some or dice.random() < 0.5 else part for part in parts]


def framing(parts: Parts, dice: random.Random) -> Parts:
    more = dice.choice((b"", b"id: 7\n", b": c\n", b"event: e\n"))
    name = dice.choice((b"data:", b"data: "))
    return [more + name + part[6:] if part.startswith(b"data: ") and dice.random() < 0.5 else part for part in parts]


def style(parts: Parts, dice: random.Random) -> Parts:
    """The same values, written otherwise."""
    known = dice.choice(({"ascii_only": True}, {"spaced": True}, {"lines": True}))
    return [_rewritten(part, lambda value: value, known) if dice.random() < 0.6 else part for part in parts]


def edit(parts: Parts, dice: random.Random) -> Parts:
    """One value somewhere in an event becomes another."""
    at = dice.randrange(len(parts))
    return [*parts[:at], _rewritten(parts[at], lambda value: _edited(value, dice), {}), *parts[at + 1 :]]


def null_ids(parts: Parts, dice: random.Random) -> Parts:
    """The engine forgets the ids (or logprobs) of some events."""
    name = dice.choice(("token_ids", "prompt_token_ids", "logprobs", "input_messages", "output_messages"))
    gone, share = dice.random() < 0.3, dice.choice((0.2, 1.0))

    def forget(value: Any) -> Any:
        if isinstance(value, list):
            return [forget(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {key: forget(item) for key, item in value.items() if not (gone and key == name)}
        return kept | ({name: None} if name in kept else {})

    return [_rewritten(part, forget, {}) if dice.random() < share else part for part in parts]


def spoil(parts: Parts, dice: random.Random) -> Parts:
    """Bytes are lost, changed or added anywhere, in the middle of characters and of line ends."""
    at = dice.randrange(len(parts))
    part = bytearray(parts[at])
    for _ in range(dice.choice((1, 1, 2, 8))):
        place = dice.randrange(len(part) + 1)
        match dice.randrange(3):
            case 0:
                del part[place : place + dice.choice((1, 1, 3, 20))]
            case 1:
                part[place:place] = bytes(dice.choice(TELLING) for _ in range(dice.choice((1, 1, 3))))
            case _ if place < len(part):
                part[place] = dice.randrange(256)
    return [*parts[:at], bytes(part), *parts[at + 1 :]]


MUTATIONS: tuple[Mutation, ...] = (
    drop, repeat, swap, shuffle, twice, insert, insert, cut, no_end, line_ends, framing, style, edit, edit, edit,
    null_ids, spoil, spoil,
)  # fmt: skip


def mutated(parts: Parts, dice: random.Random) -> tuple[Parts, list[str]]:
    """`parts` after one to four mutations, and their names."""
    names = []
    for _ in range(dice.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        if not (parts := [part for part in parts if part]):
            break
        mutation = dice.choice(MUTATIONS)
        parts = mutation(parts, dice)
        names.append(mutation.__name__)
    return parts, names


def pieces(body: bytes, dice: random.Random) -> Parts:
    """`body` cut at random places: whole, byte by byte, or in sizes that split characters and events."""
    match dice.randrange(8):
        case 0:
            return [body]
        case 1 if len(body) < 3000:
            return [body[at : at + 1] for at in range(len(body))]
        case _:
            sizes = dice.choice(((1, 2, 3, 5), (17, 100), (1, 64, 300, 1000), (300, 1000, 4000)))
            out = []
            while body:
                size = dice.choice(sizes)
                out.append(body[:size])
                body = body[size:]
            return out


def _rewritten(part: bytes, change: Callable[[Any], Any], known: dict[str, bool]) -> bytes:
    """`part` with its JSON changed; as it is where it holds none."""
    event = part.startswith((b"data: ", b"event: "))
    head, mark, rest = part.partition(b"data: ") if event else (b"", b"", part)
    text = rest.rstrip(b"\r\n")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return part
    written = write(change(value), **known).encode("utf-8", "backslashreplace")
    return head + mark + (written.replace(b"\n", b"\ndata: ") if event else written) + rest[len(text) :]


def _edited(value: Any, dice: random.Random) -> Any:
    """`value` with one value in it exchanged, left out or added."""
    if isinstance(value, dict) and value and dice.random() < 0.93:
        name = dice.choice(list(value))
        inside = [key for key, item in value.items() if isinstance(item, dict | list) and item]
        if inside and dice.random() < 0.7:
            name = dice.choice(inside)
            return value | {name: _edited(value[name], dice)}
        match dice.randrange(4):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return value | {dice.choice(KEYS): dice.choice(ODD)}
            case _:
                return value | {name: dice.choice(ODD)}
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        match dice.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], _edited(value[at], dice), *value[at + 1 :]]
    return dice.choice(ODD)
