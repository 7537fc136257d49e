"""Faults of the scripted engine, and the looks of a spoiled answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.kit import engine_dialect as dialect
from tests.kit.engine_tokens import Output

KINDS = (
    "status",         # answer with `status` and an error body
    "cut",            # close the connection after `after` body bytes
    "reset",          # reset the connection after `after` body bytes
    "silent_close",   # close the connection without a byte
    "hang",           # never answer
    "no_token_ids",   # know nothing of return_token_ids and enable_response_messages
    "no_logprobs",    # token ids, but no logprobs, not even when asked to score
    "refuses_ids",    # 400 for whoever asks for token ids
    "refuses_logprobs",  # 400 for whoever asks for logprobs
    "refuses_both",   # 400 for either
    "not_vllm",       # 200 with a body that is not JSON
    "says",           # answer with `body` as it stands, of the type `media`
    "error_event",    # in a stream: an error event after `after` events, then [DONE]
    "no_done",        # a stream that ends without [DONE]
    "no_finish",      # a stream that ends without a finish_reason or a final response
    "abort",          # finish_reason "abort", half of the tokens
    "late_done",      # in a stream: wait behind the finish until the stub's `go_on` is set, then usage and [DONE]
    "said_on",        # in a stream: wait as long, then say one piece of the answer once more
    "slow",           # wait `delay_s` before the answer and before each event
)  # fmt: skip
IDS, LOGPROBS = ("return_token_ids", "enable_response_messages"), ("logprobs", "include", "prompt_logprobs")
EXTRAS = {"no_token_ids": IDS, "no_logprobs": LOGPROBS}
REFUSED = {"refuses_ids": IDS, "refuses_logprobs": LOGPROBS, "refuses_both": (*IDS, *LOGPROBS)}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, for the next `times` requests to an LLM route. `kind` is one of `KINDS`."""

    kind: str
    times: int = 1
    after: int = 0
    status: int = 500
    delay_s: float = 0.0
    body: str = ""
    media: str = "application/json"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}; known: {', '.join(KINDS)}")


def as_asked(body: dict[str, Any], kind: str) -> dict[str, Any]:
    """`body` as an engine understands it that lacks what the fault takes away."""
    return {key: value for key, value in body.items() if key not in EXTRAS.get(kind, ())}


def refused(body: dict[str, Any], kind: str) -> str | None:
    """The first field of `body` that an engine with this fault refuses, if any."""
    return next((name for name in REFUSED.get(kind, ()) if body.get(name)), None)


def aborted(output: Output) -> Output:
    half = max(1, len(output.token_ids) // 2)
    return Output(output.token_ids[:half], output.logprobs[:half], output.pieces[:half], "abort", None)


def without_ids(body: bytes, kind: str) -> bytes:
    """`body` as another maker's server writes it: no null where a token id could be."""
    if kind != "no_token_ids":
        return body
    return body.replace(b',"token_ids":null', b"").replace(b',"prompt_token_ids":null', b"")


def finishes(event: bytes) -> bool:
    """Tell whether `event` has the finish of a choice, or the final response."""
    return b'"finish_reason":"' in event or b'"type":"response.completed"' in event


def spoiled(events: Iterator[bytes], kind: str, after: int) -> Iterator[bytes]:
    before = b""
    for place, event in enumerate(events):
        if kind == "error_event" and place == after:
            yield event_of_error()
            yield dialect.DONE
            return
        if kind == "no_done" and event == dialect.DONE:
            return
        if kind == "no_finish" and finishes(event):
            continue
        yield without_ids(event, kind)
        if kind == "said_on" and finishes(event):
            yield before
        if kind == "said_on" and (b'"token_ids":[' in event or b".delta" in event):
            before = event


def event_of_error() -> bytes:
    """The event by which vLLM tells of a failure inside a stream that has begun with status 200."""
    return b"data: " + dialect.error(500, "EngineCore encountered an issue.", "InternalServerError") + b"\n\n"
