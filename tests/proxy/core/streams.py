"""A short stream of two tokens, as the engine tells it to the proxy and as the agent must see it."""

from __future__ import annotations

from typing import Any

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.trajectory.call import Outcome
from tests.proxy.core.protocol.answers import CHAT, SSE, chat_event, chat_start, event, exchange

START = event(chat_start([1, 2]))
WORD = event(chat_event({"content": "é日😀"}, ids=[5], logprobs=[-0.5]))
SEEN_START = event(chat_start(None))
SEEN_WORD = event(chat_event({"content": "é日😀"}))
END = event(chat_event({"content": ""}, ids=[6], logprobs=[-0.25], finish="stop"))
SEEN_END = event(chat_event({"content": ""}, finish="stop"))
USAGE = event({"choices": [], "usage": {"total_tokens": 4}})
DONE = event("[DONE]")


def streaming(request: dict[str, Any] | None = None, path: str = CHAT) -> Exchange:
    running = exchange(path, {"stream": True, **(request or {})})
    running.on_headers(200, SSE)
    return running


def run(parts: list[bytes], running: Exchange) -> tuple[bytes, bytes, tuple[Outcome, ...]]:
    """``(what left before the calls were settled, what left after, outcomes)``."""
    early, late = b"", b""
    for part in parts:
        settled = running.settled
        out = b"".join(running.feed(part))
        early, late = (early, late + out) if settled else (early + out, late)
        if running.settled:
            late += b"".join(running.release())
    settled = running.settled
    rest = b"".join(running.finish())
    assert running.settled
    return early, late + rest, running.outcomes
