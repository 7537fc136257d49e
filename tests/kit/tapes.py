"""Tapes: exchanges recorded from a real vLLM, raw as they came, so that tests replay the engine, not our idea of it.

Each request stands on tape twice, once as an agent asks it and once as the proxy asks it on the agent's behalf (with
token ids and logprobs), with one seed. So a tape also says what the agent must see: take from the proxy's answer what
only the proxy asked for, and the agent's own answer has to be left, but for the response id and the time of creation.

`chunks` keep the boundaries that the engine wrote. `python -m tests.kit.record_tapes` records them anew.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("vllm-0.31.tapes.jsonl.gz")
AGENT, PROXY = "agent", "proxy"


@dataclass(frozen=True, slots=True)
class Tape:
    """One exchange. `asked_by` is ``agent`` or ``proxy``; `request` is the JSON body sent; header names lower-case."""

    name: str
    asked_by: str
    route: str
    request: dict[str, Any]
    status: int
    headers: dict[str, str]
    chunks: list[str]

    @property
    def body(self) -> bytes:
        return "".join(self.chunks).encode()

    @property
    def stream(self) -> bool:
        return bool(self.request.get("stream"))


@cache
def load(path: Path = FILE) -> Mapping[tuple[str, str], Tape]:
    """Every tape by ``(name, asked_by)``."""
    tapes = [Tape(**json.loads(line)) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return {(tape.name, tape.asked_by): tape for tape in tapes}


def save(tapes: list[Tape], path: Path = FILE) -> None:
    lines = [json.dumps(asdict(tape), ensure_ascii=False, separators=(",", ":")) for tape in tapes]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def names() -> list[str]:
    """The name of each request that stands on tape in both ways."""
    return sorted({name for name, _ in load()})


_VOLATILE = (
    (re.compile(rb'"id": ?"(?:chatcmpl-|cmpl-|resp_)[^"]*"'), b'"id":"ID"'),
    (re.compile(rb'"id": ?"(?:chatcmpl-tool|call)[-_][^"]*"'), b'"id":"TOOL"'),
    (re.compile(rb'"(id|item_id|call_id)": ?"(?:[a-z-]*[-_])?[0-9a-f]{16,}"'), rb'"\1":"ITEM"'),
    (re.compile(rb'"(created|created_at)": ?\d+'), rb'"\1":0'),
)


def steady(body: bytes) -> bytes:
    """`body` with response ids, tool call ids and creation times made equal: what two runs of one request share."""
    for pattern, replacement in reversed(_VOLATILE):
        body = pattern.sub(replacement, body)
    return body
