"""The one codec of the wire to the trainer: a `Batch` as a MessagePack map, and back.

Token ids travel as little-endian int32 ``bin``, logprobs as little-endian float32 ``bin``, masks as run lengths that
begin with a run of 0 (possibly empty), policy versions as ``[version, count]`` pairs. Readers accept this version and
the one before it, ignore unknown fields and never unpickle anything.

Invariant: `decode_batch(encode_batch(b))` equals `b` after its logprobs are rounded to float32.

Next: ajet_trainer/admission.py
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgpack

from ajet_sdk.errors import BadRequest, TooLarge
from ajet_sdk.sample import Batch, BatchEpisode, Group, Sample, spans_of

VERSION = 1
CONTENT_TYPE = "application/msgpack"
MAX_FRAME_BYTES = 1 << 30
FIELDS = ("version", "batch", "lease_until", "policy_version", "groups")
"""The first level of a frame."""


class FrameError(BadRequest):
    """A frame that is truncated, oversized, of another version, or not what it says it is."""


def pack_ints(values: Iterable[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _little(array("i", values))


def unpack_ints(data: bytes, name: str) -> tuple[int, ...]:
    return tuple(_array("i", data, name))


def pack_floats(values: Iterable[float]) -> bytes:
    """Logprobs as little-endian float32."""
    return _little(array("f", values))


def unpack_floats(data: bytes, name: str) -> tuple[float, ...]:
    return tuple(_array("f", data, name))


def pack_mask(mask: Sequence[int]) -> list[int]:
    """Run lengths, alternating from 0: ``[0, 0, 1, 1, 1]`` is ``[2, 3]`` and ``[1]`` is ``[0, 1]``."""
    runs = [(bit, sum(1 for _ in run)) for bit, run in groupby(mask)]
    head = [0] if runs and runs[0][0] else []
    return head + [count for _, count in runs]


def unpack_mask(runs: Any, length: int, name: str = "loss_mask") -> tuple[int, ...]:
    if not isinstance(runs, list) or any(type(run) is not int or run < 0 for run in runs) or sum(runs) != length:
        raise FrameError(f"{name}: run lengths must be non-negative and add up to {length} tokens")
    out: list[int] = []
    for index, run in enumerate(runs):
        out.extend([index & 1] * run)
    return tuple(out)


def encode_batch(batch: Batch) -> bytes:
    """The frame of `batch`; deterministic, so equal batches give equal bytes."""
    body = {
        "version": VERSION,
        "batch": batch.batch,
        "lease_until": batch.lease_until,
        "policy_version": batch.policy_version,
        "groups": [
            {"task": group.task, "episodes": [_encode_episode(episode) for episode in group.episodes]}
            for group in batch.groups
        ],
    }
    return bytes(msgpack.packb(body, use_bin_type=True))


def decode_batch(data: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> Batch:
    """The batch in `data`, or a `FrameError` that names what is wrong or missing."""
    if len(data) > max_bytes:
        raise TooLarge(f"frame of {len(data)} bytes is over the limit of {max_bytes}", code="frame_too_large")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"frame of {len(data)} bytes is {_fault(data)}") from error
    if not isinstance(body, dict):
        raise FrameError("a frame must be a MessagePack map")
    version = _field(body, "version", int, "frame")
    if version not in (VERSION, VERSION - 1):
        raise FrameError(f"frame has wire version {version}; this reader knows {VERSION}", code="wire_version")
    try:
        return _decode_body(body)
    except FrameError:
        raise
    except BadRequest as error:
        raise FrameError(error.message, param=error.param) from error


def _fault(data: bytes) -> str:
    """What is wrong with a frame that cannot be unpacked; if it is cut off, the fields of its first level it lacks."""
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=len(data) or 1)
    unpacker.feed(data)
    lacking = list(FIELDS)
    try:
        for _ in range(unpacker.read_map_header()):
            name = unpacker.unpack()
            unpacker.unpack()
            lacking = [field for field in lacking if field != name]
    except msgpack.OutOfData:
        return f"truncated: {', '.join(map(repr, lacking))} missing or incomplete"
    except (ValueError, TypeError, msgpack.UnpackException):
        pass
    return "not MessagePack"


def _decode_body(body: Any) -> Batch:
    return Batch(
        batch=_field(body, "batch", str, "frame"),
        lease_until=_finite(_field(body, "lease_until", (int, float), "frame"), "frame: lease_until"),
        policy_version=_field(body, "policy_version", int, "frame"),
        groups=tuple(
            Group(
                task=_field(group, "task", str, "group"),
                episodes=tuple(_decode_episode(item) for item in _field(group, "episodes", list, "group")),
            )
            for group in _field(body, "groups", list, "frame")
        ),
    )


def _encode_episode(episode: BatchEpisode) -> dict[str, Any]:
    return {
        "episode": episode.episode,
        "task": episode.task,
        "model": episode.model,
        "reward": episode.reward,
        "rewards": [dict(item) for item in episode.rewards],
        "samples": [_encode_sample(sample) for sample in episode.samples],
    }


def _encode_sample(sample: Sample) -> dict[str, Any]:
    body: dict[str, Any] = {
        "sample": sample.sample,
        "agent": sample.agent,
        "token_ids": pack_ints(sample.token_ids),
        "loss_mask": pack_mask(sample.loss_mask),
        "logprobs": pack_floats(sample.logprobs),
        "policy_versions": [list(pair) for pair in sample.policy_versions],
        "calls": list(sample.calls),
        "spans": [list(span) for span in sample.spans],
        "reward": sample.reward,
        "broken_by": sample.broken_by,
        "repaired_tokens": sample.repaired_tokens,
    }
    if sample.uncertain_tokens:
        body["uncertain_tokens"] = sample.uncertain_tokens
    if sample.parents is not None:
        body["parents"] = pack_ints(sample.parents)
    return body


def _decode_episode(body: Any) -> BatchEpisode:
    where = "episode"
    episode = _field(body, "episode", str, where)
    where = f"episode {episode}"
    task = _field(body, "task", str, where)
    model = _field(body, "model", str, where)
    return BatchEpisode(
        episode=episode,
        task=task,
        model=model,
        reward=_finite(_field(body, "reward", (int, float), where), f"{where}: reward"),
        rewards=tuple(_each(body, "rewards", dict, where)),
        samples=tuple(_decode_sample(item, episode, task, model) for item in _field(body, "samples", list, where)),
    )


def _decode_sample(body: Any, episode: str, task: str, model: str) -> Sample:
    name = _field(body, "sample", str, f"sample of {episode}")
    where = f"sample {name}"
    token_ids = unpack_ints(_field(body, "token_ids", bytes, where), f"{where}: token_ids")
    loss_mask = unpack_mask(_field(body, "loss_mask", list, where), len(token_ids), f"{where}: loss_mask")
    reward, broken_by, parents = body.get("reward"), body.get("broken_by"), body.get("parents")
    if not isinstance(broken_by, (str, type(None))):
        raise FrameError(f"{where}: 'broken_by' has type {type(broken_by).__name__}", param="broken_by")
    return Sample(
        sample=name,
        episode=episode,
        task=task,
        model=model,
        agent=_field(body, "agent", str, where),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=unpack_floats(_field(body, "logprobs", bytes, where), f"{where}: logprobs"),
        policy_versions=spans_of(
            _field(body, "policy_versions", list, where), sum(loss_mask), f"{where}: policy_versions"
        ),
        calls=tuple(_each(body, "calls", str, where)),
        spans=tuple(_span(span, len(token_ids), where) for span in _each(body, "spans", list, where)),
        reward=None if reward is None else _finite(reward, f"{where}: reward"),
        broken_by=broken_by,
        repaired_tokens=_field(body, "repaired_tokens", int, where) if "repaired_tokens" in body else 0,
        uncertain_tokens=_field(body, "uncertain_tokens", int, where) if "uncertain_tokens" in body else 0,
        parents=None if parents is None else _parents(parents, len(token_ids), where),
    )


def _span(value: list[Any], length: int, where: str) -> tuple[str, int, int]:
    if [type(item) for item in value] != [str, int, int] or not 0 <= value[1] <= value[2] <= length:
        raise FrameError(f"{where}: a span must be [call, start, end] within its {length} tokens", param="spans")
    call, start, end = value
    return call, start, end


def _parents(value: Any, length: int, where: str) -> tuple[int, ...]:
    parents = unpack_ints(value, f"{where}: parents") if isinstance(value, bytes) else ()
    if len(parents) != length or any(not -1 <= parent < index for index, parent in enumerate(parents)):
        raise FrameError(f"{where}: parents must name an earlier token, or -1, for each of {length}", param="parents")
    return parents


def _each(body: Any, name: str, kind: type, where: str) -> list[Any]:
    items: list[Any] = _field(body, name, list, where)
    for item in items:
        if not isinstance(item, kind):
            raise FrameError(f"{where}: {name!r} holds a {type(item).__name__}", param=name)
    return items


def _finite(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise FrameError(f"{name} must be a finite number, found {value!r:.80}")
    return float(value)


def _field(body: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(body, dict):
        raise FrameError(f"{where} must be a map")
    if name not in body:
        raise FrameError(f"{where} lacks {name!r}", param=name)
    value = body[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FrameError(f"{where}: {name!r} has type {type(value).__name__}", param=name)
    return value


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _array(kind: str, data: bytes, name: str) -> array[Any]:
    if len(data) % 4:
        raise FrameError(f"{name}: {len(data)} bytes is no whole number of 4-byte items")
    values = array(kind)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
