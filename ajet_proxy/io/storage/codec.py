"""An event as one MessagePack record of the journal, and back.

A record is ``[event name, {field: value}]``. Token ids are little-endian int32, logprobs little-endian float64, so that
what is read equals what was written, bit for bit. Metadata is JSON within the record, because MessagePack does not tell
lists from tuples. A field that has its default is left out. Unknown fields are ignored and missing ones take their
default, so that a journal stays readable when a field is added.

A prompt mostly repeats what its episode said before. So a call names the earlier call whose text begins like its own,
how many tokens they share, and only then the rest. An episode costs its distinct tokens, and not turns times context.
Reading needs the episodes as they were when the record was written, which is what a replay has at that point.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from array import array
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import msgpack
from msgspec import Struct, structs
from msgspec.msgpack import Encoder

from ajet_proxy.core.conversation.history import Mark
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.tokens import count, cut
from ajet_proxy.core.trajectory.timeline import Packed, Turn

_ARRAYS = (("i", "text"), ("d", "logprobs"))
"""The fields of a call's record that are numbers, with the kind of these."""
NONE: Mapping[str, Episode] = MappingProxyType({})
_packed = Encoder().encode
EVENTS: dict[str, Any] = {
    name: kind for name, kind in vars(ev).items()
    if isinstance(kind, type) and issubclass(kind, ev.Event) and kind not in (ev.Event, ev.EpisodeEvent)
}
"""The kinds of events by their names on disk, which never change: those are their classes' (contract §11.3)."""


class UnknownRecord(Exception):
    """A record that this version of the proxy cannot read."""


def encode(event: ev.Event, episodes: Mapping[str, Episode] = NONE) -> bytes:
    """The record of `event`, which has not yet been applied to `episodes`."""
    fields = fields_of(event)
    if isinstance(event, ev.CallFinished):
        fields["call"] = _pack_call(event.call, episodes.get(event.episode))
    record = [type(event).__name__, fields]
    try:
        return _packed(record)
    except UnicodeEncodeError:  # half a character, which msgspec does not write
        return bytes(msgpack.packb(record, unicode_errors="surrogatepass"))


def decode(record: bytes, episodes: Mapping[str, Episode] = NONE) -> ev.Event:
    """The event in `record`, or `UnknownRecord`; `episodes` are as the events before it have made them."""
    try:
        name, fields = msgpack.unpackb(record, raw=False, use_list=False, unicode_errors="surrogatepass")
        kind = EVENTS[name]
        if kind is ev.CallFinished:
            fields["call"] = _unpack_call(fields["call"], fields["episode"], episodes)
        if "metadata" in fields:
            fields["metadata"] = json.loads(fields["metadata"])
        if "marks" in fields:
            fields["marks"] = tuple(Mark(*mark) for mark in fields["marks"])
        event: ev.Event = _build(kind, fields)
    except KeyError as error:
        raise UnknownRecord(f"this version of ajet knows no record, or no history, {error.args[0]!r}") from error
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UnknownRecord(f"a record cannot be read: {error}") from error
    return event


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a record by name, without those that follow from others or get their default in reading anyway.
    Metadata is JSON."""
    defaults = _defaults(value.__class__)
    items = structs.astuple(value) if isinstance(value, Struct) else (getattr(value, name) for name in defaults)
    known = {name: item for (name, default), item in zip(defaults.items(), items, strict=True) if item is not default}
    return known | {"metadata": json.dumps(known["metadata"])} if "metadata" in known else known


@cache
def made_of(kind: Any) -> Mapping[str, Any]:
    """The fields that make a value of `kind`, a struct or a dataclass, by name, as ``fields`` of its library tells
    them. None for another class."""
    fields: tuple[Any, ...] = ()
    if issubclass(kind, Struct):
        fields = structs.fields(kind)
    elif dataclasses.is_dataclass(kind):
        fields = tuple(field for field in dataclasses.fields(kind) if field.init)
    return MappingProxyType({field.name: field for field in fields})


@cache
def _defaults(kind: Any) -> Mapping[str, Any]:
    return MappingProxyType({name: field.default for name, field in made_of(kind).items()})


def _build(kind: Any, fields: dict[str, Any]) -> Any:
    known = made_of(kind)
    return kind(**{name: value for name, value in fields.items() if name in known})


def _pack_call(call: Packed, episode: Episode | None) -> dict[str, Any]:
    fields = fields_of(call.turn)
    shared = 0
    if episode is not None:
        before, shared = episode.transcript.texts.nearest(call.text)
    if shared:
        fields["history"] = (before, shared)
    fields["text"] = cut(call.text, shared, count(call.text))
    return fields | {name: _little(kind, fields[name]) for kind, name in _ARRAYS}


def _unpack_call(fields: dict[str, Any], episode: str, episodes: Mapping[str, Episode]) -> Packed:
    text, fields["logprobs"] = (_little(kind, bytes(memoryview(fields[name]))) for kind, name in _ARRAYS)
    if (history := fields.get("history")) is not None:
        before, shared = history
        text = episodes[episode].transcript.beginning(before, shared) + text
    call = Packed(_build(Turn, fields), text)
    if not call.is_whole:
        raise ValueError(f"call {call.turn.call} is not as long as it says")
    return call


def _little(kind: str, values: bytes) -> bytes:
    """`values` of an array's `kind`, put into little-endian order or back."""
    if sys.byteorder == "little":
        return values
    swapped = array(kind, values)
    swapped.byteswap()
    return swapped.tobytes()
