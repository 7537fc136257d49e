"""The outcome of one choice: `Captured`, with everything a `Call` needs from the engine, or `Lost` with its reason.

A failed capture is a value and not an exception: the agent's answer does not depend on it. An exchange is whole or lost
as a whole. Within a whole exchange, a choice that the engine did not describe exactly is lost by itself. Between the
two stands `Unscored`: exact ids without logprobs. The engine can be asked for those (`core.protocol.rescoring`) before
the agent sees the end of its answer.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ajet_proxy.core.trajectory.timeline import Packed, packed
from ajet_sdk.sample import PolicySpans

DISCONNECTED = "disconnected"
"""The client went away before it was sent the end of its answer."""
NOT_WRITTEN = "not_written"
"""The disk did not take the call in time, so the client was not sent the end of its answer."""
ENGINE_SILENT = "engine_silent"
"""The client gave up on an engine that had sent nothing for it and showed no sign of life, or was frozen for new
weights."""
STALLED = "stalled"
"""The client stopped reading its answer for longer than it may, so it was cut off."""
EPISODE_DISCARDED = "episode_discarded"
"""The episode was discarded while the call ran, which ended it."""
RESTARTED = "restarted"
"""The process that had the call ended before the call did."""
REFUSED = "refused"
"""The engine answered with an error status: nothing was generated."""
ENGINE_ERROR = "engine_error"
"""The engine reported an error in the middle of its answer, at its end (finish reason ``error``) or behind it, or could
not be reached."""
ENGINE_ABORTED = "engine_aborted"
"""The engine ended the generation before it was done (finish reason ``abort``)."""
TRUNCATED = "truncated"
"""The engine's answer ended before every choice was finished."""
NO_TOKEN_IDS = "no_token_ids"
"""The engine gave no token ids: it is not vLLM, or hides them."""
NO_LOGPROBS = "no_logprobs"
"""The engine did not give one logprob for each sampled token: too few, or a number that is none
(`core.protocol.reading.logprobs_of`)."""
CAPTURE_FAILED = "capture_failed"
"""The answer is not what this dialect says it should be, tells a thing twice or goes on behind its finish; the agent
got it as it came."""
UNASKABLE: Final = "unaskable"
"""The engine refuses to be asked for ids or logprobs; the agent got its answer to the request as it was."""
NO_CHAT_ROUTE: Final = "no_chat_route"
"""The engine answers the agent's own route itself, and has none that would report token ids."""
SEVERAL_GENERATIONS = "several_generations"
"""The response was made in several generations, with tools of the engine's own."""
RETRIED = "retried"
"""A retry took the call's place."""
WEIGHTS_CHANGED = "weights_changed"
"""Other weights served the model before the logprobs of the sampled tokens were known."""
OTHER_WEIGHTS = "other_weights"
"""The engine serves what its trainer has not given it: it was started again."""
NOT_SCORED = "not_scored"
"""The engine did not tell the logprobs of tokens that it had sampled."""

SCORED = "scored_logprobs"
"""The word of `Call.altered` for a call whose logprobs come from a second look at its tokens."""


class Captured(Struct, frozen=True):
    """One whole choice, as the engine reported it. ``index`` is its place among the request's choices."""

    index: int
    model: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    scored: bool = False
    """True if the logprobs were asked for after the tokens had been sampled."""
    stop_string: str | None = None
    """The stop string at which the engine cut the text; the tokens go on to its end."""
    labels: tuple[tuple[str, int], ...] = ()
    """Runs of tokens by the label of the weights that sampled them, where the engine tells."""


class Unscored(Struct, frozen=True):
    """One whole choice whose tokens the engine reported without logprobs."""

    index: int
    model: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str


class Lost(Struct, frozen=True):
    """A choice that will never be trained."""

    index: int
    reason: str


Outcome = Captured | Unscored | Lost


class Origin(Struct, frozen=True):
    """Facts that the proxy knows about a call before the engine answers; ``calls`` has one id for each choice."""

    calls: tuple[str, ...]
    episode: str
    model: str
    agent: str
    started_at: float
    policy_version: int
    identified_by: str
    altered: tuple[str, ...]
    continuity: str | None = None


class Change(Struct, frozen=True):
    """The weights changed to `version` when choice number i had ``sampled[i]`` tokens."""

    version: int
    sampled: tuple[int, ...]


def to_packed(
    captured: Captured, origin: Origin, changes: Sequence[Change] = (), same_text: tuple[str, int] | None = None,
    sampling: str | None = None, response: str | None = None,
) -> Packed:
    """The record of one choice. If the request named no model, it has the name that the engine answered with. `changes`
    are what was read of the weights while the call ran, and `sampling` says how it was sampled, as JSON text. It is a
    part of the answer `response`."""
    spans, uncertain = versions_of(captured, origin.policy_version, changes)
    return packed(
        captured.prompt_token_ids, captured.token_ids, captured.logprobs,
        call=origin.calls[captured.index],
        model=origin.model or captured.model,
        agent=origin.agent,
        started_at=origin.started_at,
        finish_reason=captured.finish_reason,
        policy_versions=spans,
        identified_by=origin.identified_by,
        altered=(*origin.altered, SCORED) if captured.scored else origin.altered,
        continuity=origin.continuity,
        version_uncertain=uncertain,
        same_text=same_text,
        sampling=sampling,
        response=response,
    )


def versions_of(captured: Captured, before: int, changes: Sequence[Change] = ()) -> tuple[PolicySpans, bool]:
    """Runs of tokens by the version that sampled them, and whether that is uncertain.

    The engine's labels count if they are the trainer's versions. They must be whole numbers that never fall, and none
    may be lower than the version `before` the call. None may be more than one ahead of the last one read, since an
    update is announced only when the engines have it. Otherwise what was read around the call counts. It is uncertain
    if the readings differ, or if the engine's labels say that the weights changed or contradict the readings.
    """
    last = changes[-1].version if changes else before
    labels = captured.labels
    numbers = [int(label) for label, _ in labels if re.fullmatch("[0-9]{1,18}", label)]
    expected = [before, *numbers, last + 1]
    if numbers and len(numbers) == len(labels) and expected == sorted(expected):
        return tuple((version, count) for version, (_, count) in zip(numbers, labels, strict=True)), False
    if not captured.token_ids:
        return (), False
    return _readings(captured, before, changes), bool(changes) or len(labels) > 1 or bool(numbers)


def _readings(captured: Captured, before: int, changes: Sequence[Change]) -> PolicySpans:
    """Runs of tokens by the version that was read when they came."""
    spans = []
    done = 0
    whole = len(captured.token_ids)
    ends = (*(min(change.sampled[captured.index], whole) for change in changes), whole)
    for run, end in zip((before, *(change.version for change in changes)), ends, strict=True):
        if end > done:
            spans.append((run, end - done))
            done = end
    return tuple(spans)


def prompt_hash(prompt_token_ids: Sequence[int]) -> str:
    """The task of an episode that was given none; equal prompts give equal tasks."""
    packed = struct.pack(f"<{len(prompt_token_ids)}q", *prompt_token_ids)
    return f"prompt-{hashlib.sha256(packed).hexdigest()[:24]}"
