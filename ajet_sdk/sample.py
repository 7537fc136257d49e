"""Calls and samples: the two records that everything in ajet produces or consumes.

A `Call` is one generation of one choice, exactly as the engine reported it. A `Sample` is one timeline of calls as the
trainer sees it. Token ids are plain tuples of ints here; the codec in `ajet_sdk.frame` packs them as little-endian
int32. A `Batch` is what a trainer leases: complete groups of episodes, each with its samples.

Both records read and write the JSON lines of contract §6. Reading checks types and lengths, so a record that
exists is a record that is whole.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ajet_sdk.bodies import check_storable
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import DEFAULT_LANE

LOGPROB_SLACK = 1e-3
"""A log probability is at most 0; engines that compute in half precision overshoot by less than this."""
PolicySpans = tuple[tuple[int, int], ...]
"""Runs of ``(policy version, number of sampled tokens)``, in order."""
Sampling = Mapping[str, Any]
"""The sampling of tokens, in effect (contract §6.1): vLLM's own names with their values."""
SamplingSpans = tuple[tuple[Sampling | None, int], ...]
"""Runs of ``(sampling, number of sampled tokens)``, in order; None is not known."""


def are_logprobs(values: Sequence[float]) -> bool:
    """True if `values` can be logprobs, as the 32-bit floats that a trainer gets: finite, and above 0 by no more than
    rounding makes. (vLLM tells -inf as -9999.)"""
    least, most = array("f", (min(values, default=0.0), max(values, default=0.0)))  # rounding keeps their order
    return math.isfinite(sum(values)) and math.isfinite(least) and most <= LOGPROB_SLACK


def _ints(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise BadRequest(f"{name} must be a list of integers", param=name)
    if not set(map(type, value)) <= {int}:
        found = next(item for item in value if type(item) is not int)
        raise BadRequest(f"{name} must be a list of integers, found {repr(found)[:80]}", param=name)
    if value and (min(value) < -(2**31) or max(value) >= 2**31):
        raise BadRequest(f"{name} must be a list of 32-bit integers", param=name)
    return tuple(value)


def _logprobs(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise BadRequest("logprobs must be a list of numbers", param="logprobs")
    numbers = tuple(_number(item, "logprobs") for item in value)
    if not are_logprobs(numbers):
        found = next(number for number in numbers if not are_logprobs((number,)))
        raise BadRequest(f"logprobs must be at most 0, and finite in 32 bits, found {found!r}", param="logprobs")
    return numbers


def _number(value: Any, name: str) -> float:
    """`value` as a finite float; an integer too large for one is refused, not an error of its own."""
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise BadRequest(f"{name} must be finite numbers, found {repr(value)[:80]}", param=name)


def _text(record: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = record.get(name, default)
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string", param=name)
    return value


def spans_of(value: Any, sampled: int, name: str = "policy_version") -> PolicySpans:
    """``int`` or ``[[version, count], …]`` as spans over `sampled` tokens; empty when nothing was sampled."""
    if type(value) is int:
        return tuple((version, sampled) for version in _ints([value], name)) if sampled else ()
    if not isinstance(value, (list, tuple)):
        raise BadRequest(f"{name} must be an integer or a list of [version, count]", param=name)
    spans = tuple(_ints(pair, name) for pair in value)
    if any(len(pair) != 2 or pair[1] < 1 for pair in spans) or sum(pair[1] for pair in spans) != sampled:
        raise BadRequest(f"the counts in {name} must be positive and add up to {sampled} sampled tokens", param=name)
    return tuple((version, count) for version, count in spans)


def canonical(value: Any) -> str:
    """`value` as JSON text; equal ones give equal texts. `ValueError` for a number that JSON does not know."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sampling_of(value: Any, name: str = "sampling") -> Sampling | None:
    """`value` as how a call was sampled; None is not known."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise BadRequest(f"{name} must be an object", param="sampling")
    check_storable(value, name)
    return value


def _same_text(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2:
        call, tokens = value
        if isinstance(call, str) and type(tokens) is int and tokens > 0:
            return call, tokens
    raise BadRequest("same_text must be a call's id and a number of tokens", param="same_text")


@dataclass(frozen=True, slots=True)
class Call:
    """One generation of one choice.

    ``prompt_token_ids`` and ``token_ids`` are the engine's own. ``logprobs`` has one natural-log probability per
    sampled token, taken from the distribution the token was sampled from. ``started_at`` is Unix time in seconds.
    """

    call: str
    episode: str
    model: str
    agent: str
    started_at: float
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    policy_versions: PolicySpans
    identified_by: str | None = None
    altered: tuple[str, ...] = ()
    continuity: str | None = None
    """The engine read the exact ids of the conversation before it, or the reason why not; None if nothing was tried."""
    version_uncertain: bool = False
    """True if weights changed during the call and nobody knows for sure which token came from which."""
    same_text: tuple[str, int] | None = None
    """A call and a number: so many tokens at the beginning of the prompt are, as text, what that call read and sampled,
    and are other tokens."""
    sampling: Sampling | None = None
    """The sampling of its tokens, in effect; None where that is not known."""
    response: str | None = None
    """The id of the answer that it is a part of, as its client saw it."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise BadRequest(
                f"call {self.call}: {len(self.token_ids)} token_ids but {len(self.logprobs)} logprobs", param="logprobs"
            )

    @classmethod
    def from_json(cls, record: Any) -> Call:
        """A call from one decoded JSON line; unknown fields are ignored."""
        if not isinstance(record, Mapping):
            raise BadRequest("a call must be a JSON object")
        token_ids = _ints(record.get("token_ids"), "token_ids")
        for name in ("identified_by", "continuity", "response"):
            if not isinstance(record.get(name), (str, type(None))):
                raise BadRequest(f"{name} must be a string", param=name)
        altered = record.get("altered") or ()
        if not isinstance(altered, (list, tuple)) or not all(isinstance(item, str) for item in altered):
            raise BadRequest("altered must be a list of strings", param="altered")
        return cls(
            call=_text(record, "call"),
            episode=_text(record, "episode"),
            model=_text(record, "model", ""),
            agent=_text(record, "agent", ""),
            started_at=_number(record.get("started_at"), "started_at"),
            prompt_token_ids=_ints(record.get("prompt_token_ids"), "prompt_token_ids"),
            token_ids=token_ids,
            logprobs=_logprobs(record.get("logprobs")),
            finish_reason=_text(record, "finish_reason", "stop"),
            policy_versions=spans_of(record.get("policy_version", 0), len(token_ids)),
            identified_by=record.get("identified_by"),
            altered=tuple(altered),
            continuity=record.get("continuity"),
            version_uncertain=record.get("version_uncertain") is True,
            same_text=_same_text(record.get("same_text")),
            sampling=sampling_of(record.get("sampling")),
            response=record.get("response"),
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object of contract §6.1."""
        lists = ("prompt_token_ids", "token_ids", "logprobs")
        return call_json(self, self.episode, {name: list(getattr(self, name)) for name in lists}, self.sampling)


def call_json(call: Any, episode: str, tokens: Mapping[str, Any], sampling: Sampling | None) -> dict[str, Any]:
    """The JSON object of contract §6.1 for a `Call`, or for a record with its fields. `tokens` says what it read and
    sampled, and `sampling` how."""
    versions = call.policy_versions
    out = {
        "call": call.call,
        "episode": episode,
        "model": call.model,
        "agent": call.agent,
        "started_at": call.started_at,
        **tokens,
        "finish_reason": call.finish_reason,
        "policy_version": versions[0][0] if len(versions) == 1 else [list(pair) for pair in versions],
    }
    extra = {
        "identified_by": call.identified_by, "continuity": call.continuity, "altered": list(call.altered) or None,
        "version_uncertain": call.version_uncertain or None, "same_text": call.same_text and list(call.same_text),
        "sampling": sampling, "response": call.response,
    }  # fmt: skip
    return out | {name: value for name, value in extra.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Sample:
    """One timeline as the trainer sees it; the laws of contract §6.3 hold for it.

    ``token_ids``, ``loss_mask`` and ``logprobs`` have the same length. A mask of 1 marks a sampled token, whose logprob
    is the engine's; elsewhere the logprob is 0.0. ``spans`` gives each call's sampled tokens as ``(call, start, end)``.
    ``sampling`` is empty if it is known of no token; otherwise its counts add up to the sampled tokens.
    ``finish_reasons`` and ``turns`` have one for each of ``calls``. A turn is the call's place, from 0, among the
    complete calls of its model and agent in the episode, in the order they began.
    """

    sample: str
    episode: str
    task: str
    model: str
    agent: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: PolicySpans
    calls: tuple[str, ...]
    spans: tuple[tuple[str, int, int], ...]
    finish_reasons: tuple[str, ...]
    turns: tuple[int, ...]
    reward: float | None = None
    broken_by: str | None = None
    repaired_tokens: int = 0
    uncertain_tokens: int = 0
    """Sampled tokens of which `policy_versions` is a reading around the call and not the engine's own word."""
    sampling: SamplingSpans = ()

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.loss_mask) == len(self.logprobs):
            raise BadRequest(f"sample {self.sample}: token_ids, loss_mask and logprobs differ in length")

    def to_json(self) -> dict[str, Any]:
        """The JSON object of contract §6.2."""
        out = {f.name: _listed(getattr(self, f.name)) for f in fields(self)}
        return {name: value for name, value in out.items() if value not in _UNSET.get(name, ())}


_UNSET: Mapping[str, tuple[Any, ...]] = {
    "broken_by": (None,), "repaired_tokens": (0,), "uncertain_tokens": (0,), "sampling": ([],),
}
"""The values of the fields that are left out then."""


def _listed(value: Any) -> Any:
    """`value` with lists for its tuples."""
    if not isinstance(value, tuple):
        return value
    return [list(item) for item in value] if value and isinstance(value[0], tuple) else list(value)


@dataclass(frozen=True, slots=True)
class BatchEpisode:
    """One episode of a leased group: its reward (a finite float) and its samples, in the order of their first call.

    With a ``fault`` the frame held something that is none. Then this says what, and the rest is empty.
    """

    episode: str
    task: str
    model: str
    reward: float
    rewards: tuple[Mapping[str, Any], ...]
    samples: tuple[Sample, ...]
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task that share a group-relative baseline. Those of ``earlier`` are compared with them, and
    are not trained: the others of their group, which were leased or dropped before."""

    task: str
    episodes: tuple[BatchEpisode, ...]
    earlier: tuple[BatchEpisode, ...] = ()
    lane: str = DEFAULT_LANE

    @property
    def compared(self) -> tuple[BatchEpisode, ...]:
        """All whose rewards are in the baseline."""
        return (*self.episodes, *self.earlier)


@dataclass(frozen=True, slots=True)
class Batch:
    """Complete groups under one lease. ``lease_until`` is Unix time in seconds by the proxy's clock."""

    batch: str
    lease_until: float
    policy_version: int
    groups: Sequence[Group]
