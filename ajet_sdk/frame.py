"""The one codec of the wire to the trainer: a `Batch` as a MessagePack map, and back.

The tokens of a group travel as one tree (`ajet_sdk.tree`), so that what its samples share is sent once. A sample says
at which node it ends, and the logprobs of the tokens that it sampled. Token ids are little-endian int32 ``bin``,
logprobs little-endian float32 ``bin``. Masks are run lengths that begin with a run of 0 (possibly empty), policy
versions are ``[version, count]`` pairs. Readers refuse another version, ignore unknown fields and never unpickle
anything.

Invariant: `decode_batch(encode_batch(b))` equals `b` after its logprobs are rounded to float32, if they are 0.0 where
nothing was sampled.

Next: ajet_trainer/admission.py
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import compress, groupby
from typing import Any

import msgpack

from ajet_sdk.errors import BadRequest, TooLarge
from ajet_sdk.routes import DEFAULT_LANE
from ajet_sdk.sample import Batch, BatchEpisode, Group, Sample, SamplingSpans, canonical, sampling_of, spans_of
from ajet_sdk.tree import Tree, tree_of

VERSION = 1
CONTENT_TYPE = "application/msgpack"
MAX_FRAME_BYTES = 1 << 30
MAX_TOKENS = 1 << 27
"""Of all samples of a frame: a small one may tell many that share their tokens, and reading lays each of them out."""
FIELDS = ("version", "batch", "lease_until", "policy_version", "groups")
"""The first level of a frame."""
OF_EPISODE = ("episode", "task", "model")
"""The fields of a sample that its episode has."""
WHERE_SET = ("uncertain_tokens", "sampling")


class FrameError(BadRequest):
    """A frame that is truncated, oversized, of another version, or not what it says it is."""


def pack(kind: str, values: Iterable[float]) -> bytes:
    """Token ids (`kind` ``i``) as little-endian int32, or logprobs (``f``) as little-endian float32."""
    return _little(array(kind, values)).tobytes()


def unpack(kind: str, data: bytes, name: str) -> tuple[Any, ...]:
    """The numbers in `data`, 4 bytes each, little-endian, of a `kind` of `array`. `FrameError` names the field if the
    last one is cut."""
    if len(data) % 4:
        raise FrameError(f"{name}: {len(data)} bytes is no whole number of 4-byte items")
    values = array(kind)
    values.frombytes(data)
    return tuple(_little(values))


def _little(values: array[Any]) -> array[Any]:
    """`values` in the byte order of the wire, or back from it."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_mask(mask: Sequence[int]) -> list[int]:
    """Run lengths, alternating from 0: ``[0, 0, 1, 1, 1]`` is ``[2, 3]`` and ``[1]`` is ``[0, 1]``."""
    runs = [(bit, sum(1 for _ in run)) for bit, run in groupby(mask)]
    head = [0] if runs and runs[0][0] else []
    return head + [count for _, count in runs]


def unpack_mask(runs: Any, length: int, name: str = "loss_mask") -> tuple[int, ...]:
    """The mask of `length` tokens, 0 or 1 each, of its `runs`: how many zeros, how many ones, and so on. `FrameError`
    if they are no such numbers."""
    if not isinstance(runs, list) or any(type(run) is not int or run < 0 for run in runs) or sum(runs) != length:
        raise FrameError(f"{name}: run lengths must be non-negative and add up to {length} tokens")
    out: list[int] = []
    for index, run in enumerate(runs):
        out.extend([index & 1] * run)
    return tuple(out)


def encode_batch(batch: Batch) -> bytes:
    """The frame of `batch`; deterministic, so equal batches give equal bytes. Half of a surrogate pair becomes a
    question mark: no text of one episode may keep the others from a trainer."""
    body = {"version": VERSION} | _fields(batch) | {"groups": list(map(_group, batch.groups))}
    return bytes(msgpack.packb(body, use_bin_type=True, unicode_errors="replace"))


def _fields(record: Any) -> dict[str, Any]:
    """A record of `ajet_sdk.sample` as the map of its fields, in the order of its class."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _group(group: Group) -> dict[str, Any]:
    samples = [sample for episode in group.compared for sample in episode.samples]
    tokens, runs, ends = tree_of([pack("i", sample.token_ids) for sample in samples])
    packed = iter(list(map(_sample, samples, ends)))
    episodes = [_fields(one) | {"samples": [next(packed) for _ in one.samples]} for one in group.compared]
    for body in episodes:
        del body["fault"]
    mine, earlier = episodes[: len(group.episodes)], episodes[len(group.episodes) :]
    body = {"task": group.task, "tree": {"token_ids": tokens, "parents": runs}, "episodes": mine}
    body |= {"lane": group.lane} if group.lane != DEFAULT_LANE else {}
    return body | ({"earlier": earlier} if earlier else {})


def _sample(sample: Sample, end: int) -> dict[str, Any]:
    """A sample that ends at node `end` of its group's tree."""
    body = {"end": end} | _fields(sample)
    body |= {"loss_mask": pack_mask(sample.loss_mask), "logprobs": pack("f", sampled(sample))}
    body["sampling"] = [(_in_order(sampling), count) for sampling, count in sample.sampling]
    for name in ("token_ids", *OF_EPISODE, *(name for name in WHERE_SET if not body[name])):
        del body[name]
    return body


def sampled(sample: Sample) -> tuple[float, ...]:
    """The logprobs of the tokens that were sampled."""
    return tuple(compress(sample.logprobs, sample.loss_mask))


def _in_order(sampling: Any) -> Any:
    """`sampling` in the one order of its names, so that equal ones give equal bytes."""
    return None if sampling is None else json.loads(canonical(sampling))


def decode_batch(data: bytes, *, max_bytes: int = MAX_FRAME_BYTES, lenient: bool = False) -> Batch:
    """The batch in `data`, or a `FrameError` that names what is wrong or missing. If it is `lenient` and names its
    episodes, those that cannot be read have a ``fault`` instead, and the others are read."""
    if len(data) > max_bytes:
        raise TooLarge(f"frame of {len(data)} bytes is over the limit of {max_bytes}", code="frame_too_large")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"frame of {len(data)} bytes is {_fault(data)}") from error
    if not isinstance(body, dict):
        raise FrameError("a frame must be a MessagePack map")
    found = _Map(body, "frame")
    version = found.get("version", int)
    if version != VERSION:
        raise FrameError(f"frame has wire version {version}; this reader knows {VERSION}", code="wire_version")
    try:
        return Batch(
            batch=found.get("batch", str),
            lease_until=found.number("lease_until"),
            policy_version=found.get("policy_version", int),
            groups=_Groups(lenient).read(found.get("groups", list)),
        )
    except FrameError:
        raise
    except BadRequest as error:
        raise FrameError(error.message, param=error.param) from error


def _fault(data: bytes) -> str:
    """The fault of a frame that cannot be unpacked; if it is cut off, the fields of its first level it lacks."""
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


class _Map:
    """One map of a frame, called `where` in the errors about its fields."""

    def __init__(self, body: Any, where: str) -> None:
        if not isinstance(body, dict):
            raise FrameError(f"{where} must be a map")
        self.body, self.where = body, where

    def get(self, name: str, kind: type) -> Any:
        if name not in self.body:
            raise FrameError(f"{self.where} lacks {name!r}", param=name)
        value = self.body[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FrameError(f"{self.where}: {name!r} has type {type(value).__name__}", param=name)
        return value

    def number(self, name: str) -> float:
        value = self.get(name, object)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise FrameError(f"{self.where}: {name} must be a finite number, found {value!r:.80}", param=name)
        return float(value)

    def each(self, name: str, kind: type) -> list[Any]:
        items: list[Any] = self.get(name, list)
        for item in items:
            if not isinstance(item, kind):
                raise FrameError(f"{self.where}: {name!r} holds a {type(item).__name__}", param=name)
        return items


class _Groups:
    """Reads groups. Their samples are paths in the tree of their group."""

    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient
        self._left = MAX_TOKENS
        self._tree = Tree((), ())

    def read(self, groups: list[Any]) -> tuple[Group, ...]:
        return tuple(self._group(body, f"group {number}") for number, body in enumerate(groups))

    def _group(self, body: Any, where: str) -> Group:
        found, fault = _Map(body, where), None
        try:
            self._tree = _tree(_Map(found.get("tree", dict), f"{where}: tree"))
        except FrameError as error:
            fault = error
        found.body = {"earlier": [], "lane": DEFAULT_LANE} | found.body
        episodes, earlier = (
            tuple(self._episode(one, fault) for one in found.get(name, list)) for name in ("episodes", "earlier")
        )
        return Group(found.get("task", str), episodes, earlier, found.get("lane", str))

    def _episode(self, body: Any, fault: FrameError | None) -> BatchEpisode:
        """An episode of a group that has a `fault`, or has none."""
        found = _Map(body, "episode")
        episode = found.get("episode", str)
        found.where = f"episode {episode}"
        task, model = found.get("task", str), found.get("model", str)
        of_episode = {"episode": episode, "task": task, "model": model}
        try:
            if fault is not None:
                raise fault
            return BatchEpisode(
                **of_episode,
                reward=found.number("reward"),
                rewards=tuple(found.each("rewards", dict)),
                samples=tuple(self._sample(item, of_episode) for item in found.get("samples", list)),
            )
        except BadRequest as error:
            if not self._lenient:
                raise
            return BatchEpisode(**of_episode, reward=0.0, rewards=(), samples=(), fault=error.message)

    def _sample(self, body: Any, of_episode: dict[str, str]) -> Sample:
        found = _Map(body, f"sample of {of_episode['episode']}")
        name = found.get("sample", str)
        found.where = f"sample {name}"
        token_ids, loss_mask, logprobs = self._laid_out(found)
        sampled = sum(loss_mask)
        return Sample(
            sample=name,
            **of_episode,
            agent=found.get("agent", str),
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            policy_versions=spans_of(found.get("policy_versions", list), sampled, f"{found.where}: policy_versions"),
            calls=tuple(found.each("calls", str)),
            spans=tuple(_span(found, span, len(loss_mask)) for span in found.each("spans", list)),
            reward=None if body.get("reward") is None else found.number("reward"),
            broken_by=None if body.get("broken_by") is None else found.get("broken_by", str),
            repaired_tokens=found.get("repaired_tokens", int),
            uncertain_tokens=found.get("uncertain_tokens", int) if "uncertain_tokens" in body else 0,
            sampling=_sampling(found, sampled) if "sampling" in body else (),
            finish_reasons=_of_each_call(found, "finish_reasons", str),
            turns=_turns(found),
        )

    def _laid_out(self, found: _Map) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """A sample's tokens, mask and logprobs, of one length."""
        end, runs = found.get("end", int), found.get("loss_mask", list)
        try:
            length = self._tree.length(end)
        except ValueError as error:
            raise FrameError(f"{found.where}: {error}", param="end") from error
        self._left -= length
        if self._left < 0:
            raise FrameError(f"{found.where}: with its {length} tokens, all samples have more than {MAX_TOKENS}")
        loss_mask = unpack_mask(runs, length, f"{found.where}: loss_mask")
        values, sampled = unpack("f", found.get("logprobs", bytes), f"{found.where}: logprobs"), sum(runs[1::2])
        if len(values) != sampled:
            said = f"{len(values)} logprobs for {sampled} sampled tokens"
            raise FrameError(f"{found.where}: {said}", param="logprobs")
        logprobs, at = list[float](), 0
        for index, run in enumerate(runs):
            logprobs += values[at : at + run] if index & 1 else [0.0] * run
            at += run if index & 1 else 0
        return self._tree.path(end), loss_mask, tuple(logprobs)


def _tree(found: _Map) -> Tree:
    tokens = unpack("i", found.get("token_ids", bytes), f"{found.where}: token_ids")
    runs = found.each("parents", list)
    if any(list(map(type, run)) != [int, int] for run in runs):
        raise FrameError(f"{found.where}: parents must be runs of [nodes, parent]", param="parents")
    try:
        return Tree(tokens, runs)
    except ValueError as error:
        raise FrameError(f"{found.where}: {error}", param="parents") from error


def _sampling(found: _Map, sampled: int) -> SamplingSpans:
    runs: list[list[Any]] = found.each("sampling", list)
    good = all(len(run) == 2 and type(run[1]) is int and run[1] > 0 for run in runs)
    if not good or sum(run[1] for run in runs) != sampled:
        said = f"runs of [sampling, count] whose counts add up to {sampled} sampled tokens"
        raise FrameError(f"{found.where}: sampling must be {said}", param="sampling")
    return tuple((sampling_of(sampling, f"{found.where}: sampling"), count) for sampling, count in runs)


def _of_each_call(found: _Map, name: str, kind: type) -> tuple[Any, ...]:
    """One `kind` for each call."""
    values, calls = found.each(name, kind), found.each("calls", str)
    if len(values) != len(calls):
        raise FrameError(f"{found.where}: {len(values)} {name} for {len(calls)} calls", param=name)
    return tuple(values)


def _turns(found: _Map) -> tuple[int, ...]:
    turns: tuple[int, ...] = _of_each_call(found, "turns", int)
    if any(type(turn) is not int or turn < 0 for turn in turns):
        raise FrameError(f"{found.where}: turns must be integers from 0", param="turns")
    return turns


def _span(found: _Map, value: list[Any], length: int) -> tuple[str, int, int]:
    if [type(item) for item in value] != [str, int, int] or not 0 <= value[1] <= value[2] <= length:
        raise FrameError(f"{found.where}: a span must be [call, start, end] within its {length} tokens", param="spans")
    call, start, end = value
    return call, start, end
